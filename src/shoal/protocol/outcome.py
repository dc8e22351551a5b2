"""From verdicts to the outcome of a submission.

- one clear verdict decides, except a hard rejection, which takes two validators. Where a second opinion is required,
  for example because it was drawn, two validators must agree;
- an inconclusive verdict counts for nothing, and another validator is asked. `max_rounds` counts only clear verdicts;
  otherwise validators that abstain would keep others from judging. In total there are at most twice as many rounds;
- a file that crashed the checker twice has an invalid form, and so does one that crashed it once if no validator finds
  anything else: a crash never pays;
- where verdicts contradict each other, the majority of the clear ones decides; without a majority nobody is paid and
  nobody is blamed. Accepting with different numbers, of tokens or of groups with a signal, is a contradiction too;
- if no further opinion arrives, a single verdict stands as if no second one had been required. A single hard rejection
  counts as soft: it is not punished.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal.protocol.messages import SubmissionState, Verdict

REJECTIONS = (Verdict.FORM, Verdict.SOFT, Verdict.HARD)
CRASH_CHECK = "crash"
"""name of the check with which a validator reports that its checker died on the file"""


class Vote(NamedTuple):
    """One validator's verdict."""

    verdict: Verdict
    crashed: bool = False
    sight: tuple[int, str] = (0, "")
    """numbers reported with an acceptance: the tokens, and which groups have a signal"""


def decide_outcome(votes: Sequence[Vote], max_rounds: int, *, doubted: bool = False) -> SubmissionState | None:
    """The outcome of the verdicts so far; None while another is needed. `doubted`: one is not enough."""
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
        is_form = set(verdicts) <= {Verdict.FORM, Verdict.ACCEPTED}  # the mildest rejection, not two hard ones
        return SubmissionState.FORM if is_form else SubmissionState.SOFT
    is_over = len(clear) >= max_rounds or len(votes) >= 2 * max_rounds
    return end_waiting(votes) if is_over else None


def end_waiting(votes: Sequence[Vote]) -> SubmissionState:
    """The outcome if no further opinion arrives."""
    clear = list_clear(votes)
    if not clear and any(vote.crashed for vote in votes):
        return SubmissionState.FORM
    if len(clear) != 1:
        return SubmissionState.INCONCLUSIVE
    return SubmissionState.SOFT if clear[0].verdict is Verdict.HARD else SubmissionState(clear[0].verdict.value)


def list_clear(votes: Sequence[Vote]) -> list[Vote]:
    """The votes that are not inconclusive."""
    return [vote for vote in votes if vote.verdict is not Verdict.INCONCLUSIVE]


def find_sight(votes: Sequence[Vote]) -> tuple[int, str] | None:
    """The numbers with which two validators accepted; None if no two agree."""
    sights = Counter(vote.sight for vote in votes if vote.verdict is Verdict.ACCEPTED)
    return next((sight for sight, count in sights.items() if count >= 2), None)


def list_majority(votes: Sequence[Vote]) -> list[bool]:
    """For each vote, whether at least two votes, including itself, agree; all False if no two do."""
    sight, rejects = find_sight(votes), sum(vote.verdict in REJECTIONS for vote in votes) >= 2
    return [
        vote.sight == sight if vote.verdict is Verdict.ACCEPTED else rejects and vote.verdict in REJECTIONS
        for vote in votes
    ]


def agrees(verdict: Verdict, state: SubmissionState) -> bool:
    """Whether a verdict matches the outcome: both accept, or both reject."""
    if verdict is Verdict.ACCEPTED:
        return state is SubmissionState.ACCEPTED
    return verdict in REJECTIONS and state.value in REJECTIONS
