"""Figures of the checking benchmark."""

import pytest

from checking import ALL, DEMO, READ, TOGETHER, Costs, Size, count_cpu, format_table, list_figures, list_sizes, rotate


def make_costs(size: str, *, written: float = 100.0, together: float = 11.0, leases: int = 2) -> Costs:
    costs = Costs(size, written=written, tokens=5120, rollouts=10, leases=leases, flops=1e6, speed=1e9)
    for name, seconds in {READ: 1.0, ALL: 21.0, TOGETHER: together, "good": 3.0, "trusted": 2.0}.items():
        costs.add(name, seconds / 2)
        costs.add(name, seconds / 2)
    return costs


def test_costs_are_shares_of_what_writing_took() -> None:
    costs = make_costs("small")
    assert costs.share(TOGETHER) == pytest.approx(0.11)
    assert costs.share("trusted") == pytest.approx(0.02)
    assert costs.batch_gain == pytest.approx(2.0), "(21 - 1) / (11 - 1): reading is not part of the replay"
    assert costs.rollouts_per_s == pytest.approx(10 / 11)
    assert costs.mean_tokens == 512
    assert costs.bound == pytest.approx(0.0512), "5,120 tokens of 1 MFLOP at 1 GFLOP/s are 5.12 s, of 100 s"


def test_the_figures_of_long_answers_are_the_worst_and_leave_the_demo_out() -> None:
    alone = make_costs("alone", together=41.0, written=1000.0, leases=1)
    large = make_costs("large", together=31.0)
    figures = list_figures([make_costs("small"), alone, large, make_costs(DEMO, written=10.0)])
    assert figures["cost_all_512"] == pytest.approx(0.31)
    assert figures["cost_replay"] == pytest.approx(0.30)
    assert figures["batch_gain"] == pytest.approx(20 / 30), "a single submission gains nothing"
    assert figures["cost_all_demo"] == pytest.approx(1.1)


def test_the_table_has_a_line_for_each_model() -> None:
    lines = format_table([make_costs("small"), make_costs(DEMO)]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| small | 512 | 51 | 1.00 % | 21.00 % | 11.00 % | 5.12 % | 3.00 % | 2.00 % | 2.00 x |")


def test_each_turn_begins_with_another_way() -> None:
    assert [rotate(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotate(["a", "b", "c"], 2)) == ["a", "b", "c"]


def test_cpu_is_counted_and_waiting_is_not() -> None:
    import time

    spent: list[float] = []
    with count_cpu(spent.append):
        time.sleep(0.2)
    with count_cpu(spent.append):
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
    assert spent[0] < 0.1 <= spent[1]


def test_both_forms_measure_long_answers_and_the_demo() -> None:
    for quick in (False, True):
        sizes = {size.name: size for size in list_sizes(quick)}
        demo = sizes.pop(DEMO)
        assert demo.rollouts == 256 and all(size.tokens == 512 for size in sizes.values())
        assert isinstance(demo, Size) and sizes
