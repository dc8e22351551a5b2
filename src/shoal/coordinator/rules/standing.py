"""Standing: how an owner's history determines its standing, and how much of its work may be bad.

probation -> good -> trusted       by accepted submissions
any of them -> limited             by strikes: rejected work that accepted work does not outweigh
limited -> limited                 renewed by a further fault
limited -> probation               by time; also by accepted work, except for owners that judge (a different fault)
any -> banned                      by a ban event; banned -> probation only by an unban event

Strikes. A rejection adds `STRIKE`, a lease that failed or that its backup replaced `FAULT` (up to `MAX_FAULTS`),
accepted work takes one away:

    strikes < STRIKE, and work was accepted     an owner of record: it is served first
    strikes >= STRIKE x limit_after             limited; leases only after a new proof of work
    strikes >= 2 x STRIKE x limit_after         banned by the next rejection

Invariants:
- in the long run an owner of record has `STRIKE` accepted submissions for each rejection, and `FAULT` for each lease
  that failed, so an occasional honest submission does not pay for rubbish;
- leases that fail never limit or ban an owner: an honest machine may be slow, or be switched off.
"""

from shoal.protocol.messages import Standing, SubmissionState
from shoal.protocol.params import RunParams

STRIKE, FAULT, MAX_FAULTS = 4, 2, 8
"""what a rejection and a failed lease add, and up to where failed leases do"""
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
    strikes: int,
    judges: bool = False,
) -> Standing:
    """The standing after a submission was decided; counts include it. Bans are separate events."""
    if standing is Standing.BANNED:
        return standing
    if outcome in _MILD and needs_work(params, strikes):
        return Standing.LIMITED
    if outcome is not SubmissionState.ACCEPTED:
        return standing
    if standing is Standing.LIMITED:
        return standing if judges or needs_work(params, strikes) else Standing.PROBATION
    if standing is Standing.PROBATION and accepted >= params.good_after:
        return Standing.GOOD
    if standing is Standing.GOOD and accepted >= params.trusted_after:
        return Standing.TRUSTED
    return standing


def count_strikes(strikes: int, outcome: SubmissionState) -> int:
    """Strikes after an outcome. Hard rejections ban by themselves; inconclusive or void submissions change nothing."""
    if outcome is SubmissionState.ACCEPTED:
        return max(0, strikes - 1)
    return strikes + STRIKE * (outcome in _MILD)


def count_fault(strikes: int) -> int:
    """Strikes after a lease that failed, or that its backup replaced."""
    return max(strikes, min(strikes + FAULT, MAX_FAULTS))


def has_record(accepted: int, strikes: int) -> bool:
    """Whether an owner is of record: its work was accepted, and its strikes are few."""
    return accepted > 0 and strikes < STRIKE


def is_suspect(strikes: int) -> bool:
    """Whether work of an owner was rejected, or leases failed, more than its accepted work outweighs."""
    return strikes >= STRIKE


def needs_work(params: RunParams, strikes: int) -> bool:
    """Whether an owner gets leases only after a new proof of work."""
    return strikes >= STRIKE * params.limit_after


def is_shut_out(params: RunParams, outcome: SubmissionState, strikes: int) -> bool:
    """Whether a rejection bans its owner; `strikes` include it."""
    return outcome in _MILD and strikes >= 2 * STRIKE * params.limit_after
