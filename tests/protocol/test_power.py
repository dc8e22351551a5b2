"""The check rate follows from measured power: it replays more where less is found, and refuses what it cannot keep."""

import json
import random

import pytest

from shoal.errors import ConfigError
from shoal.protocol.check_rate import (
    EVIDENCE_LINE,
    EvidencePower,
    Guarantee,
    ValidationConfig,
    carry_evidence,
    catch_spread,
    detect_cheat,
    hasten,
    keeps_promise,
)
from shoal.protocol.messages import Standing
from shoal.protocol.params import MILLION, RunParams, count_drawn
from shoal.protocol.power import AttackPower, Dial, read_power

RNG = random.Random(0)
HONEST = tuple(RNG.gauss(-1.5, 0.8) for _ in range(200))
WEAK = tuple(RNG.gauss(0.9, 1.2) for _ in range(200))
"""log odds of int8 weights on the demo's short answers"""
INT8 = AttackPower("int8", 0.025, WEAK, HONEST)
FAINT = AttackPower("int8 in groups", 0.0, tuple(RNG.gauss(0.5, 0.6) for _ in range(200)), HONEST)
PLAIN = AttackPower("int4", 0.97)
ADAPTER = AttackPower("adapter of 0.001", 0.0, tuple(RNG.gauss(-1.4, 0.8) for _ in range(200)), HONEST)


def open_dial(*powers: AttackPower, rollouts: int = 256, **settings: object) -> Dial:
    return Dial(ValidationConfig(**settings), powers, rollouts=rollouts, validators=2)


def test_strong_power_changes_nothing() -> None:
    """float32: every attack is found in nearly every rollout."""
    params = RunParams(groups_per_lease=16, group_size=16, **open_dial(PLAIN).set_params())
    assert params.check_power == 750_000 and params.evidence_gain == 0
    assert count_drawn(params.check_share(Standing.GOOD, 256), 256) == 13


def test_measured_power_is_used_where_it_is_less_than_assumed() -> None:
    """2.5 % of the rollouts of int8 weights are found, not 75 %: the rate follows, by odds that add up."""
    dial = open_dial(INT8, PLAIN, ADAPTER)
    params = RunParams(groups_per_lease=16, group_size=16, **dial.set_params())
    assert dial.hardest is not None and dial.hardest.attack == "int8" and params.check_power == 25_000
    assert params.evidence_gain > 0
    drawn = count_drawn(params.check_share(Standing.GOOD, 256), 256)
    assert 20 < drawn < 128, "more than the 13 of a power of 0.75, far from all"
    assert keeps_promise(hasten(params.guarantee), params.power, drawn, params.evidence)
    assert not keeps_promise(hasten(params.guarantee), params.power, drawn - 1, params.evidence)
    assert not keeps_promise(hasten(params.guarantee), params.power, 13)


def test_a_promise_that_cannot_be_kept_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"cannot be kept against int8, even if all 8 .*float32.*groups_per_lease"):
        open_dial(INT8, rollouts=8).set_params()
    with pytest.raises(ConfigError, match=r"cannot be kept against adapter of 0\.001"):
        open_dial(ADAPTER, promised=["adapter of 0.001"]).set_params()


def test_what_is_not_promised_and_not_caught_is_said_at_the_start() -> None:
    lines = open_dial(FAINT, PLAIN, ADAPTER).describe(128)
    assert [is_caught for is_caught, _ in lines] == [False, True, False]
    assert "caught within 50 submissions, but NOT if it is spread over single rollouts" in lines[0][1]
    assert "NOT caught" in lines[2][1] and "float32" in lines[2][1]


def test_power_is_read_from_the_calibration_file() -> None:
    data = {
        "power": [
            {"attack": "int8", "found": 0.1, "rival": "int8", "odds": [1.0, 2.0]},
            {"attack": "int4", "found": 0.9, "rival": None, "odds": []},
        ],
        "honest_odds": {"int8": [-1.0]},
    }
    first, second = read_power(json.dumps(data).encode())
    assert first == AttackPower("int8", 0.1, (1.0, 2.0), (-1.0,)) and second == AttackPower("int4", 0.9)
    assert read_power(b"{}") == []
    for other in (b"no json", b"[]", b'{"power": [{}]}'):
        with pytest.raises(ConfigError, match="not a calibration file"):
            read_power(other)


@pytest.mark.parametrize("checked", [8, 16, 40])
def test_carried_evidence_is_what_a_simulation_finds(checked: int) -> None:
    """Lives of owners that cheat in one of ten submissions, with the bet on rare cheating of one validator."""
    power = INT8.weigh(0.1, 1)
    guarantee = Guarantee(fraction=0.1, submissions=100)
    rng, caught = random.Random(1), 0
    for _ in range(300):
        nats = 0.0
        for _ in range(guarantee.submissions):
            if rng.random() < 0.1:
                gain = rng.gauss(checked * power.gain, power.spread * checked**0.5)
                nats += max(gain - 2.303, -0.106)
            else:
                nats -= 0.106
        caught += nats >= EVIDENCE_LINE
    assert carry_evidence(guarantee, checked, power) <= caught / 300 + 0.05, "it never promises more"


def test_odds_that_do_not_grow_promise_nothing() -> None:
    assert ADAPTER.weigh(0.1, 2) == EvidencePower()
    assert catch_spread(Guarantee(), 256, EvidencePower()) == 0.0
    assert detect_cheat(256, 1 / MILLION) < 0.001
