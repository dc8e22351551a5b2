import pytest
from tests.plan.conftest import MakeSettings

from shoal.plan.broadcast import Links, count_levels, delta_ratio, find_rate, plan_broadcasts
from shoal.plan.settings import LoraSettings, TrainerOptions
from shoal.plan.shapes import ModelShape

GBIT = 1e9 / 8


@pytest.mark.parametrize(("relays", "levels"), [(0, 0), (1, 1), (8, 1), (9, 2), (72, 2), (73, 3)])
def test_a_server_feeds_eight_relays(relays: int, levels: int) -> None:
    assert count_levels(relays) == levels


@pytest.mark.parametrize(
    ("links", "machines", "gbps"),
    [
        (Links(0, 10, 10, 100), 20, 0.5),  # the origin feeds all
        (Links(4, 10, 100, 100), 20, 2.5),  # the origin feeds the relays
        (Links(4, 100, 10, 100), 80, 0.5),  # the relays feed all
        (Links(4, 100, 10, 0.25), 80, 0.25),  # a machine's own link
        (Links(16, 1000, 10, 100), 8, 1.25),  # inner relays feed eight others
    ],
)
def test_the_slowest_stage_decides(links: Links, machines: int, gbps: float) -> None:
    assert find_rate(links, machines) == pytest.approx(gbps * GBIT)


def test_a_version_is_sent_in_full_as_a_delta_or_as_an_adapter(shape: ModelShape, make_settings: MakeSettings) -> None:
    links = Links(1, 10, 10, 1)
    options = TrainerOptions(publish="bfloat16")
    full, delta = plan_broadcasts(shape, make_settings(options, lr=1e-6), links, 1)
    assert (full.kind, full.bytes, delta.kind) == ("full", 2 * shape.parameters, "delta")
    assert delta.bytes == pytest.approx(full.bytes / 86)
    assert full.seconds == pytest.approx(full.bytes / GBIT * 1.006)
    adapted = TrainerOptions(publish="bfloat16", lora=LoraSettings(4, ("q_proj",)))
    _, adapter = plan_broadcasts(shape, make_settings(adapted), links, 1)
    assert (adapter.kind, adapter.bytes) == ("adapter", 2 * 2 * 4 * 128)


def test_deltas_shrink_with_the_learning_rate() -> None:
    assert delta_ratio("bfloat16", 3e-7) == 205 and delta_ratio("bfloat16", 1e-9) == 205
    assert delta_ratio("bfloat16", 1e-6) == pytest.approx(86)
    assert 40 < delta_ratio("bfloat16", 2e-6) < 86
    assert delta_ratio("bfloat16", 1.0) == 5.3
    assert delta_ratio("float32", 1e-4) == pytest.approx(1.7)
