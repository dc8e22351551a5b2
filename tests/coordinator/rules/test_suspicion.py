"""Odds that are carried over submissions: fair to honest owners for any length of time, and they add up for others."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.suspicion import LINE, NUM_BETS, RIVALS, Suspicion, read_suspicion
from shoal.protocol.messages import MAX_ODDS
from shoal.protocol.params import MILLION

NOTHING = Suspicion({})
odds_by_rival = st.dictionaries(st.sampled_from(RIVALS), st.lists(st.integers(0, MAX_ODDS), min_size=3, max_size=3))


def live(draw, submissions: int, rollouts: int = 8) -> Suspicion:
    found = NOTHING
    for _ in range(submissions):
        found = found.weigh({rival: [draw()] * 3 for rival in RIVALS}, rollouts)
    return found


def test_fair_odds_leave_no_more_than_the_rollouts_replayed_on_average() -> None:
    """The mean wealth is at most the number of replayed rollouts, so 1e9 is reached once in 1e9 of them at most."""
    rng = random.Random(0)
    # 8, 1 or 0 times the stake with chances that make it fair
    ends = [live(lambda: rng.choice([8 * MILLION, *[MILLION] * 3, *[0] * 7]), 20).evidence for _ in range(2000)]
    assert sum(ends) / len(ends) <= 20 * 8 * 1.1


def test_weak_odds_add_up_and_honest_submissions_between_them_cost_little() -> None:
    """Odds of 1 : 20 in one submission of ten convict nobody alone; carried over they do."""
    found = NOTHING
    for number in range(400):
        found = found.weigh({"int8": [MILLION // 2] * 2 + [20_000 * MILLION if number % 10 == 9 else 0]}, 8)
        if found.evidence >= LINE:
            break
    assert 10 < number < 100 and found.leader == "int8"


def test_a_long_honest_record_does_not_shield_an_owner_that_begins_to_cheat() -> None:
    record = live(lambda: MILLION // 10, 5000)
    assert record.evidence < 100
    fresh, late = 0, 0
    for start, count in ((NOTHING, "fresh"), (record, "late")):
        found, number = start, 0
        while found.evidence < LINE:
            found, number = found.weigh({rival: [5 * MILLION] * 3 for rival in RIVALS}, 8), number + 1
        fresh, late = (number, late) if count == "fresh" else (fresh, number)
    assert late <= fresh + 1


@given(odds_by_rival, st.integers(1, 1024))
def test_wealth_is_bounded_whatever_is_stated_and_is_stored_as_it_is(odds, rollouts: int) -> None:
    found = NOTHING
    for _ in range(5):
        found = found.weigh(odds, rollouts)
    assert all(len(own) == NUM_BETS for own in found.wealth.values())
    assert len(found.to_text()) < 1000
    assert read_suspicion(found.to_text()).to_text() == found.to_text()
    assert read_suspicion("") == NOTHING


def test_a_rival_that_was_not_compared_is_left_as_it_is() -> None:
    found = NOTHING.weigh({"int8": [2 * MILLION] * 3}, 4)
    after = found.weigh({"previous": [0, 0, 0]}, 4)
    assert after.wealth["int8"] == found.wealth["int8"] and after.wealth["previous"][0] == 0
