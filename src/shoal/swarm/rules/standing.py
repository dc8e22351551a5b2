"""Standing: what an owner's history makes of it.

probation -> good -> trusted       by accepted submissions
any of them -> limited             by rejections in a row that are not hard ones
limited -> probation               by time; by accepted work too, but for owners that judge: theirs is another fault
any -> banned                      by a ban event; banned -> probation by an unban event, and by nothing else
"""

from shoal.swarm.messages import Standing, SubmissionState
from shoal.swarm.params import RunParams

_MILD = (SubmissionState.FORM, SubmissionState.SOFT)
MOVES = {
    Standing.PROBATION: {Standing.GOOD, Standing.LIMITED, Standing.BANNED},
    Standing.GOOD: {Standing.TRUSTED, Standing.LIMITED, Standing.BANNED},
    Standing.TRUSTED: {Standing.LIMITED, Standing.BANNED},
    Standing.LIMITED: {Standing.PROBATION, Standing.BANNED},
    Standing.BANNED: {Standing.PROBATION},
}


def next_standing(
    params: RunParams,
    standing: Standing,
    outcome: SubmissionState,
    *,
    accepted: int,
    soft_row: int,
    judges: bool = False,
) -> Standing:
    """The standing after a submission was decided; counts include it. Bans are events of their own."""
    if standing is Standing.BANNED:
        return standing
    if outcome in _MILD and soft_row >= params.limit_after:
        return Standing.LIMITED
    if outcome is not SubmissionState.ACCEPTED:
        return standing
    if standing is Standing.LIMITED:
        return standing if judges else Standing.PROBATION
    if standing is Standing.PROBATION and accepted >= params.good_after:
        return Standing.GOOD
    if standing is Standing.GOOD and accepted >= params.trusted_after:
        return Standing.TRUSTED
    return standing


def count_soft(soft_row: int, outcome: SubmissionState) -> int:
    """Rejections in a row, hard ones aside. What was inconclusive or voided says nothing either way."""
    if outcome is SubmissionState.ACCEPTED:
        return 0
    return soft_row + (outcome in _MILD)
