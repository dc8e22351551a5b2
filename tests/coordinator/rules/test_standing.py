"""Standing: each change is in the table, and a ban has one exit."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.standing import MOVES, count_soft, next_standing
from shoal.protocol.messages import Standing, SubmissionState
from shoal.protocol.params import RunParams

PARAMS = RunParams(good_after=2, trusted_after=4, limit_after=3)
COUNTS = st.integers(0, 10)


def move(standing, outcome, accepted=0, soft_row=0):
    return next_standing(PARAMS, standing, outcome, accepted=accepted, soft_row=soft_row)


def test_accepted_work_leads_upwards():
    accepted = SubmissionState.ACCEPTED
    assert move(Standing.PROBATION, accepted, 1) is Standing.PROBATION
    assert move(Standing.PROBATION, accepted, 2) is Standing.GOOD
    assert move(Standing.GOOD, accepted, 3) is Standing.GOOD
    assert move(Standing.GOOD, accepted, 4) is Standing.TRUSTED
    assert move(Standing.LIMITED, accepted, 9) is Standing.PROBATION


def test_soft_rejections_in_a_row_limit():
    assert move(Standing.TRUSTED, SubmissionState.SOFT, soft_row=2) is Standing.TRUSTED
    assert move(Standing.TRUSTED, SubmissionState.SOFT, soft_row=3) is Standing.LIMITED


def test_a_row_is_broken_by_accepted_work_and_by_nothing_else():
    states = ("accepted", "rejected_soft", "rejected_form", "inconclusive", "void")
    assert [count_soft(2, SubmissionState(state)) for state in states] == [0, 3, 3, 2, 2]


def test_accepted_work_lifts_the_limit_of_a_worker_and_not_that_of_a_judge():
    found = [
        next_standing(RunParams(), Standing.LIMITED, SubmissionState.ACCEPTED, accepted=1, soft_row=0, judges=judges)
        for judges in (False, True)
    ]
    assert found == [Standing.PROBATION, Standing.LIMITED]


@given(st.sampled_from(Standing), st.sampled_from(SubmissionState), COUNTS, COUNTS)
def test_every_move_is_in_the_table(standing, outcome, accepted, soft_row):
    after = move(standing, outcome, accepted, soft_row)
    assert after == standing or after in MOVES[standing]


@given(st.sampled_from(SubmissionState), COUNTS, COUNTS)
def test_no_outcome_lifts_a_ban(outcome, accepted, soft_row):
    assert move(Standing.BANNED, outcome, accepted, soft_row) is Standing.BANNED
