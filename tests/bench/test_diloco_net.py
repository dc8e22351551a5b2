"""The parts of `bench/diloco_net.py` that need no network: the arithmetic of the slow link, and the extrapolation."""

import pytest
from tests.fixtures.benches import load_bench

diloco_link = load_bench("diloco_link")
diloco_net = load_bench("diloco_net")


def test_bytes_of_a_link_pass_one_after_the_other_and_arrive_a_delay_later() -> None:
    lane = diloco_link.Lane(rate=1000.0, delay_s=0.5)
    assert lane.pass_bytes(500, 10.0) == pytest.approx(11.0)
    assert lane.pass_bytes(500, 10.0) == pytest.approx(11.5), "the second waits for the first"
    assert lane.pass_bytes(500, 20.0) == pytest.approx(21.0)


def test_the_table_on_paper_follows_from_bytes_and_rates() -> None:
    rows = diloco_net.make_table(diloco_net.Costs(0.0, 0.0, 0.0))
    assert len(rows) == 12
    slow = rows[0]
    payload = 1e9 * 0.5078125
    assert slow.sync_s == pytest.approx(2 * payload / 12.5e6 + 0.2, rel=1e-3)
    assert slow.find_share(slow.waiting_steps) >= 0.95 > slow.find_share(slow.waiting_steps - 5)
    assert slow.overlapped_steps * slow.step_s >= slow.sync_s
    assert len(diloco_net.format_paper(rows)) == 14
