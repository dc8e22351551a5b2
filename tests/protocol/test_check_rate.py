"""The check rate meets its guarantee, however a cheat spreads its work, and replays no more than necessary."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.economics import (
    STANDINGS,
    count_burned,
    describe_check_rate,
    expect_gain,
    list_rates,
    list_warnings,
    price_identity,
)
from shoal.errors import ConfigError
from shoal.protocol.check_rate import (
    Guarantee,
    ValidationConfig,
    catch_owner,
    check_guarantee,
    count_checked,
    count_submissions,
    detect_cheat,
    hasten,
    keeps_promise,
)
from shoal.protocol.messages import Standing
from shoal.protocol.params import MILLION, RunParams, count_drawn, set_check_rate

TWO = ("a" * 64, "b" * 64)
parts = st.integers(1, MILLION).map(lambda part: part / MILLION)
chances = st.integers(1, MILLION - 1).map(lambda part: part / MILLION)
guarantees = st.builds(Guarantee, fraction=parts, submissions=st.integers(1, 2000), probability=chances)


def miss_submission(cheated: int, rollouts: int, checked: int, power: float) -> float:
    """The chance that nothing is detected, by counting all draws of `checked` rollouts out of `rollouts`."""
    return sum(
        math.comb(cheated, hits)
        * math.comb(rollouts - cheated, checked - hits)
        / math.comb(rollouts, checked)
        * (1.0 - power) ** hits
        for hits in range(checked + 1)
    )


def test_the_formula_by_hand() -> None:
    assert detect_cheat(2, 0.75) == pytest.approx(1 - 1 / 16)
    assert detect_cheat(1, 1.0) == 1.0 and detect_cheat(0, 1.0) == detect_cheat(0, 0.5) == 0.0
    assert catch_owner(0.5, 2, 0.5) == pytest.approx(1 - 0.75**2)
    assert catch_owner(1.0, 1, 1.0) == 1.0
    assert count_submissions(0.5, 0.4375, 0.5) == 2 and count_submissions(0.5, 0.44, 0.5) == 3


def test_the_worked_example_of_the_page() -> None:
    """docs/validation.md"""
    guarantee = Guarantee(fraction=0.1, submissions=100, probability=0.99)
    assert count_checked(guarantee, 0.75, 16) == 1
    assert count_checked(hasten(guarantee), 0.75, 16) == 2


@given(parts, st.integers(1, 64), parts)
def test_lumps_are_the_worst_that_a_cheat_can_do(fraction: float, checked: int, power: float) -> None:
    spread = detect_cheat(checked, fraction * power)
    assert spread >= fraction * detect_cheat(checked, power) * (1 - 1e-12)


@given(st.data(), st.integers(1, 24), chances)
def test_no_way_to_spread_a_cheat_beats_the_bound(data: st.DataObject, rollouts: int, power: float) -> None:
    """For every number of cheated rollouts in each of several submissions."""
    checked = data.draw(st.integers(1, rollouts))
    cheated = data.draw(st.lists(st.integers(0, rollouts), min_size=1, max_size=8))
    fraction = sum(cheated) / (rollouts * len(cheated))
    caught = 1.0 - math.prod(miss_submission(number, rollouts, checked, power) for number in cheated)
    assert caught >= catch_owner(fraction, len(cheated), detect_cheat(checked, power)) - 1e-9


@given(guarantees, parts, st.integers(1, 256))
def test_the_least_number_that_keeps_the_promise_is_chosen(guarantee: Guarantee, power: float, rollouts: int) -> None:
    checked = count_checked(guarantee, power, rollouts)
    if checked is None:
        assert not keeps_promise(guarantee, power, rollouts)
        return
    assert keeps_promise(guarantee, power, checked)
    assert checked == 1 or not keeps_promise(guarantee, power, checked - 1)


@given(guarantees, parts, st.integers(1, 256))
def test_an_owner_with_a_short_record_is_checked_no_less(guarantee: Guarantee, power: float, rollouts: int) -> None:
    good, trusted = (count_checked(promise, power, rollouts) for promise in (hasten(guarantee), guarantee))
    assert good is None or (trusted is not None and good >= trusted)


@given(guarantees, parts, st.integers(1, 64))
def test_a_promise_that_cannot_be_kept_is_refused_with_ones_that_can(
    guarantee: Guarantee, power: float, rollouts: int
) -> None:
    if keeps_promise(guarantee, power, rollouts):
        check_guarantee(guarantee, power, rollouts)
        return
    with pytest.raises(ConfigError, match=r"^validation\.guarantee: ") as refusal:
        check_guarantee(guarantee, power, rollouts)
    ways = str(refusal.value).partition("possible values: ")[2].split(" or ")
    assert ways
    for way in ways:
        name, _, value = way.partition(" = ")
        changed = guarantee.model_copy(update={name: int(value) if name == "submissions" else float(value)})
        assert keeps_promise(changed, power, rollouts), way


@given(st.integers(1, MILLION), st.integers(1, 256))
def test_a_share_of_a_submission_is_never_rounded_below_itself(share: int, rollouts: int) -> None:
    drawn = count_drawn(share, rollouts)
    assert 1 <= drawn <= rollouts and drawn * MILLION >= share * rollouts


@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("groups", [1, 3, 16])
def test_every_size_of_submission_keeps_the_promise_and_the_floor(group_size: int, groups: int) -> None:
    params, rollouts = RunParams(group_size=group_size), group_size * groups
    for standing, promise in ((Standing.TRUSTED, params.guarantee), (Standing.GOOD, hasten(params.guarantee))):
        drawn = count_drawn(params.check_share(standing, rollouts), rollouts)
        assert keeps_promise(promise, params.power, drawn) or drawn == rollouts
        assert drawn * 20 >= rollouts
        least = count_checked(promise, params.power, rollouts) or rollouts
        assert drawn == max(least, -(-rollouts // 20)), "and no more than that"
    assert count_drawn(params.check_share(Standing.PROBATION, rollouts), rollouts) == rollouts


def test_settings_of_a_swarm_become_parameters() -> None:
    config = ValidationConfig(guarantee=Guarantee(fraction=0.05, submissions=300, probability=0.999), power=0.9)
    params = RunParams(**set_check_rate(config))
    assert (params.guarantee, params.power) == (config.guarantee, config.power)
    assert RunParams(**set_check_rate(ValidationConfig())) == RunParams(), "the defaults of both are the same"


def test_parameters_that_promise_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match="even if all 8 rollouts"):
        RunParams(guarantee_submissions=10)


@pytest.mark.parametrize("groups", [1, 16])
def test_cheating_does_not_pay_at_the_default(groups: int) -> None:
    params = RunParams(validators=TWO, groups_per_lease=groups)
    assert all(expect_gain(params, standing) < 0.0 for standing in STANDINGS)
    assert not list(list_warnings(params))


def test_the_gain_of_a_cheat_by_hand() -> None:
    params = RunParams(validators=TWO, group_size=2, lease_max_s=1000)  # one of two replayed, if trusted
    price = price_identity(params, 1 << 22)
    assert price == pytest.approx(5 / 1000)
    assert count_burned(params, Standing.PROBATION) == 0
    assert count_burned(params, Standing.GOOD) == 20
    assert count_burned(params, Standing.TRUSTED) == 40
    assert expect_gain(params, Standing.TRUSTED) == pytest.approx(0.25 - 0.75 * (40 + price))
    halved = RunParams(validators=TWO, slash_share=MILLION // 2, hold_submissions=5, stake_submissions=30)
    assert count_burned(halved, Standing.GOOD) == 10 and count_burned(halved, Standing.TRUSTED) == 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "pays for owners with standing probation"),
        (
            {"stake_submissions": 0, "good_after": 1, "hold_submissions": 0, "check_power": 400_000},
            "for owners with standing good",
        ),
        ({"validators": TWO[:1]}, "there is only one validator: nobody can be convicted"),
        ({"validators": ()}, "there is no validator: nothing can be judged"),
    ],
)
def test_parameters_with_which_cheating_pays_are_reported(changes: dict[str, object], words: str) -> None:
    assert any(words in line for line in list_warnings(RunParams(**{"validators": TWO} | changes)))


def test_the_description_of_the_check_rate_has_rate_and_cost_of_each_standing() -> None:
    params = RunParams(group_size=16, groups_per_lease=16)
    head, new, good, trusted = describe_check_rate(params)
    assert "10 % of the work" in head and "within 100 submissions" in head
    assert new.startswith("probation: 100 % replayed (256 of 256 rollouts")
    assert "13 of 256 rollouts, never fewer than 2" in good and "never fewer than 1" in trusted
    costs = [rate.cost for rate in list_rates(params)]
    assert costs[0] > 5 * costs[1] > 0 and all("of generation" in line for line in (new, good, trusted))
