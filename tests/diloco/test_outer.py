import numpy as np
import pytest
import torch

from shoal.diloco.outer import OuterRule, find_momentum, step_outer, warn_rounds
from shoal.diloco.state import FragmentState


def run_rule(rule: OuterRule, deltas: list[float]) -> list[float]:
    part = FragmentState(0, 0, np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32))
    found = []
    for delta in deltas:
        part = step_outer(rule, part, np.full(1, delta, dtype=np.float32))
        found.append(float(part.theta[0]))
    return found


def test_nesterov_is_that_of_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    wanted, deltas = [], [0.1, -0.03, 0.2, 0.05, 0.05]
    for delta in deltas:
        weight.grad = torch.full((1,), delta)
        optimizer.step()
        wanted.append(float(weight.detach()))
    assert run_rule(OuterRule(), deltas) == pytest.approx(wanted, abs=1e-6)


def test_the_first_step_is_lr_times_one_plus_momentum() -> None:
    assert run_rule(OuterRule(), [0.1])[0] == pytest.approx(1 - 0.7 * 1.9 * 0.1)


def test_the_worked_example_of_the_docs() -> None:
    """theta 1, peers at 0.8 on 300 tokens and 0.6 on 100: d = 0.25, theta = 0.6675."""
    delta = (300 * 0.2 + 100 * 0.4) / 400
    assert run_rule(OuterRule(), [delta])[0] == pytest.approx(0.6675)


def test_steady_drift_is_amplified_sevenfold() -> None:
    path = run_rule(OuterRule(), [0.001] * 200)
    assert path[-2] - path[-1] == pytest.approx(0.007, rel=1e-2)


def test_at_outer_rate_one_what_the_peers_reach_is_held_from_the_second_round_on() -> None:
    """In a direction that peers run to its minimum (here 0.25) d = theta - minimum; 0.7 takes longer to settle."""
    paths: dict[float, list[float]] = {}
    for lr in (0.7, 1.0):
        part = FragmentState(0, 0, np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32))
        paths[lr] = []
        for _ in range(4):
            part = step_outer(OuterRule(lr=lr, momentum=0.8), part, part.theta - np.float32(0.25))
            paths[lr].append(float(part.theta[0]) - 0.25)
    assert paths[1.0] == pytest.approx([-0.6, 0.0, 0.0, 0.0], abs=1e-6)
    assert [abs(off) > 0.01 for off in paths[0.7]] == [True] * 4


def test_plain_averaging_goes_where_the_peers_arrived() -> None:
    assert run_rule(OuterRule(name="average"), [0.25, 0.5]) == [0.75, 0.25]


def test_momentum_ramps_from_nothing() -> None:
    rule = OuterRule(ramp=10)
    assert [find_momentum(rule, number) for number in (0, 5, 10, 50)] == pytest.approx([0.0, 0.45, 0.9, 0.9])
    assert run_rule(rule, [0.1])[0] == pytest.approx(1 - 0.7 * 0.1)


def test_momentum_fades_over_the_last_rounds() -> None:
    rule = OuterRule(fade=4, rounds=10)
    found = [find_momentum(rule, number) for number in (0, 5, 6, 7, 8, 9, 12)]
    assert found == pytest.approx([0.9, 0.9, 0.675, 0.45, 0.225, 0.0, 0.0])
    with pytest.raises(ValueError, match="planned"):
        OuterRule(fade=4)


def test_few_rounds_from_random_weights_are_warned_of() -> None:
    assert "outer.ramp" in warn_rounds(OuterRule(), 20, from_random=True)
    assert warn_rounds(OuterRule(), 20, from_random=False) == ""
    assert warn_rounds(OuterRule(), 30, from_random=True) == ""
    assert warn_rounds(OuterRule(ramp=10), 20, from_random=True) == ""
    assert warn_rounds(OuterRule(name="average"), 20, from_random=True) == ""
