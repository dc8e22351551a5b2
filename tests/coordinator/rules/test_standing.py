"""Standing: each change is in the table, and a ban has one exit."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.standing import (
    MOVES,
    STRIKE,
    count_fault,
    count_strikes,
    has_record,
    is_shut_out,
    next_standing,
)
from shoal.protocol.messages import Standing, SubmissionState
from shoal.protocol.params import RunParams

PARAMS = RunParams(good_after=2, trusted_after=4, limit_after=3)
COUNTS = st.integers(0, 30)


def move(standing, outcome, accepted=0, strikes=0):
    return next_standing(PARAMS, standing, outcome, accepted=accepted, strikes=strikes)


def test_accepted_work_leads_upwards():
    accepted = SubmissionState.ACCEPTED
    assert move(Standing.PROBATION, accepted, 1) is Standing.PROBATION
    assert move(Standing.PROBATION, accepted, 2) is Standing.GOOD
    assert move(Standing.GOOD, accepted, 3) is Standing.GOOD
    assert move(Standing.GOOD, accepted, 4) is Standing.TRUSTED
    assert move(Standing.LIMITED, accepted, 9) is Standing.PROBATION


def test_rejections_limit():
    assert move(Standing.TRUSTED, SubmissionState.SOFT, strikes=3 * STRIKE - 1) is Standing.TRUSTED
    assert move(Standing.TRUSTED, SubmissionState.SOFT, strikes=3 * STRIKE) is Standing.LIMITED


def test_accepted_work_takes_a_strike_away_and_a_rejection_adds_four():
    states = ("accepted", "rejected_soft", "rejected_form", "inconclusive", "void")
    assert [count_strikes(2, SubmissionState(state)) for state in states] == [1, 6, 6, 2, 2]


def test_leases_that_fail_cost_the_record_and_nothing_more():
    strikes = 0
    for _ in range(100):
        strikes = count_fault(strikes)
    assert not has_record(10, strikes) and strikes < 3 * STRIKE
    assert count_fault(20) == 20, "and take no strike away"


@given(st.lists(st.booleans(), max_size=400))
def test_of_the_work_of_an_owner_of_record_at_most_one_in_five_is_rejected(outcomes):
    strikes, rejected = 0, 0
    for is_good in outcomes:
        rejected += has_record(1, strikes) and not is_good
        strikes = count_strikes(strikes, SubmissionState.ACCEPTED if is_good else SubmissionState.SOFT)
        if is_shut_out(PARAMS, SubmissionState.SOFT, strikes):
            break
    assert STRIKE * rejected <= outcomes.count(True) + 2 * STRIKE - 1


def test_only_a_rejection_shuts_out():
    assert is_shut_out(PARAMS, SubmissionState.FORM, 6 * STRIKE)
    assert not is_shut_out(PARAMS, SubmissionState.FORM, 6 * STRIKE - 1)
    assert not is_shut_out(PARAMS, SubmissionState.INCONCLUSIVE, 99)


def test_accepted_work_lifts_the_limit_of_a_worker_and_not_that_of_a_judge():
    found = [
        next_standing(RunParams(), Standing.LIMITED, SubmissionState.ACCEPTED, accepted=1, strikes=0, judges=judges)
        for judges in (False, True)
    ]
    assert found == [Standing.PROBATION, Standing.LIMITED]


@given(st.sampled_from(Standing), st.sampled_from(SubmissionState), COUNTS, COUNTS)
def test_every_move_is_in_the_table(standing, outcome, accepted, strikes):
    after = move(standing, outcome, accepted, strikes)
    assert after == standing or after in MOVES[standing]


@given(st.sampled_from(SubmissionState), COUNTS, COUNTS)
def test_no_outcome_lifts_a_ban(outcome, accepted, strikes):
    assert move(Standing.BANNED, outcome, accepted, strikes) is Standing.BANNED
