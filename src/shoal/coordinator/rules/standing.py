"""Standing: how an owner's history determines its standing.

probation -> good -> trusted       by accepted submissions
any of them -> limited             by consecutive rejections that are not hard
limited -> limited                 renewed by a further fault
limited -> probation               by time; also by accepted work, except for owners that judge (a different fault)
any -> banned                      by a ban event; banned -> probation only by an unban event
"""

from shoal.protocol.messages import Standing, SubmissionState
from shoal.protocol.params import RunParams

_MILD = (SubmissionState.FORM, SubmissionState.SOFT)
MOVES = {
    Standing.PROBATION: {Standing.GOOD, Standing.LIMITED, Standing.BANNED},
    Standing.GOOD: {Standing.TRUSTED, Standing.LIMITED, Standing.BANNED},
    Standing.TRUSTED: {Standing.LIMITED, Standing.BANNED},
    Standing.LIMITED: {Standing.LIMITED, Standing.PROBATION, Standing.BANNED},
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
    """The standing after a submission was decided; counts include it. Bans are separate events."""
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
    """Consecutive rejections, not counting hard ones. Inconclusive or void submissions do not change the count."""
    if outcome is SubmissionState.ACCEPTED:
        return 0
    return soft_row + (outcome in _MILD)
