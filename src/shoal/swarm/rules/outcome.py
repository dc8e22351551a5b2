"""From verdicts to what becomes of a submission.

- one clear verdict decides, but for a hard one: that takes two validators;
- an inconclusive verdict says nothing, and another validator is asked. A file that made the checker crash twice is one
  of bad form: a crash is never the end and never pays;
- where verdicts contradict each other the majority of the clear ones decides; without one, or without another opinion
  in time, nobody is paid and nobody blamed. A single hard verdict without a second counts as soft: not punished.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.swarm.messages import SubmissionState, Verdict

REJECTIONS = (Verdict.FORM, Verdict.SOFT, Verdict.HARD)
CRASH_CHECK = "crash"
"""name of the check by which a validator says that its checker died on the file"""


class Vote(NamedTuple):
    """One validator's word."""

    verdict: Verdict
    crashed: bool = False


def decide_outcome(votes: Sequence[Vote], max_rounds: int) -> SubmissionState | None:
    """What the verdicts so far make of a submission; None while another is needed."""
    clear = [vote.verdict for vote in votes if vote.verdict is not Verdict.INCONCLUSIVE]
    if clear.count(Verdict.HARD) >= 2:
        return SubmissionState.HARD
    if sum(vote.crashed for vote in votes) >= 2:
        return SubmissionState.FORM
    if len(clear) == 1 and clear[0] is not Verdict.HARD:
        return SubmissionState(clear[0].value)
    if clear.count(Verdict.ACCEPTED) >= 2:
        return SubmissionState.ACCEPTED
    if sum(verdict in REJECTIONS for verdict in clear) >= 2:
        return _mildest(clear)
    return end_waiting(votes) if len(votes) >= max_rounds else None


def end_waiting(votes: Sequence[Vote]) -> SubmissionState:
    """The outcome if no further opinion comes."""
    clear = [vote.verdict for vote in votes if vote.verdict is not Verdict.INCONCLUSIVE]
    if clear == [Verdict.HARD]:
        return SubmissionState.SOFT
    return SubmissionState.INCONCLUSIVE


def agrees(verdict: Verdict, state: SubmissionState) -> bool:
    """Whether a verdict said what became of a submission: that it is good, or that it is not."""
    if verdict is Verdict.ACCEPTED:
        return state is SubmissionState.ACCEPTED
    return verdict in REJECTIONS and state.value in REJECTIONS


def _mildest(clear: Sequence[Verdict]) -> SubmissionState:
    """Of rejections that are not two hard ones."""
    return SubmissionState.FORM if set(clear) <= {Verdict.FORM, Verdict.ACCEPTED} else SubmissionState.SOFT
