"""From verdicts to what becomes of a submission.

- one clear verdict decides, but for a hard one: that takes two validators. Where a second opinion is wanted, one that
  was drawn for instance, it takes two that say the same;
- an inconclusive verdict says nothing, and another validator is asked: `max_rounds` are rounds that said something, or
  who says nothing would keep others from being heard. In all there are at most twice as many;
- a file that made the checker crash twice is one of bad form, and so is one that made it crash once if nobody finds
  anything else: a crash never pays;
- where verdicts contradict each other the majority of the clear ones decides; without one nobody is paid and nobody
  blamed. To accept with other numbers, of tokens or of groups with a signal, is a contradiction too;
- if no further opinion comes, a lone verdict stands as if none had been wanted. A lone hard one counts as soft: not
  punished.
"""

from collections import Counter
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
    sight: tuple[int, str] = (0, "")
    """what who accepts has seen: the tokens, and which groups have a signal"""


def decide_outcome(votes: Sequence[Vote], max_rounds: int, *, doubted: bool = False) -> SubmissionState | None:
    """What the verdicts so far make of a submission; None while another is needed. `doubted`: one is not enough."""
    clear = list_clear(votes)
    verdicts = [vote.verdict for vote in clear]
    if verdicts.count(Verdict.HARD) >= 2:
        return SubmissionState.HARD
    if sum(vote.crashed for vote in votes) >= 2:
        return SubmissionState.FORM
    if len(clear) == 1 and verdicts[0] is not Verdict.HARD and not doubted:
        return SubmissionState(verdicts[0].value)
    if find_sight(clear) is not None:
        return SubmissionState.ACCEPTED
    if sum(verdict in REJECTIONS for verdict in verdicts) >= 2:
        return _mildest(verdicts)
    is_over = len(clear) >= max_rounds or len(votes) >= 2 * max_rounds
    return end_waiting(votes) if is_over else None


def end_waiting(votes: Sequence[Vote]) -> SubmissionState:
    """The outcome if no further opinion comes."""
    clear = list_clear(votes)
    if not clear and any(vote.crashed for vote in votes):
        return SubmissionState.FORM
    if len(clear) != 1:
        return SubmissionState.INCONCLUSIVE
    return SubmissionState.SOFT if clear[0].verdict is Verdict.HARD else SubmissionState(clear[0].verdict.value)


def list_clear(votes: Sequence[Vote]) -> list[Vote]:
    """Those that say something."""
    return [vote for vote in votes if vote.verdict is not Verdict.INCONCLUSIVE]


def find_sight(votes: Sequence[Vote]) -> tuple[int, str] | None:
    """The numbers with which two accepted; None if no two did."""
    sights = Counter(vote.sight for vote in votes if vote.verdict is Verdict.ACCEPTED)
    return next((sight for sight, count in sights.items() if count >= 2), None)


def list_majority(votes: Sequence[Vote]) -> list[bool]:
    """For each vote whether two or more, itself among them, said the same; all False where no two did."""
    sight, rejects = find_sight(votes), sum(vote.verdict in REJECTIONS for vote in votes) >= 2
    return [
        vote.sight == sight if vote.verdict is Verdict.ACCEPTED else rejects and vote.verdict in REJECTIONS
        for vote in votes
    ]


def agrees(verdict: Verdict, state: SubmissionState) -> bool:
    """Whether a verdict said what became of a submission: that it is good, or that it is not."""
    if verdict is Verdict.ACCEPTED:
        return state is SubmissionState.ACCEPTED
    return verdict in REJECTIONS and state.value in REJECTIONS


def _mildest(clear: Sequence[Verdict]) -> SubmissionState:
    """Of rejections that are not two hard ones."""
    return SubmissionState.FORM if set(clear) <= {Verdict.FORM, Verdict.ACCEPTED} else SubmissionState.SOFT
