"""Second opinions: which submissions need one, and who can still be asked.

One validator's word is enough for most, and then it could say what it likes. So a share of what it says is held against
another owner's word:

    accepted     `second_share` of them, drawn by the coordinator's secret after the verdict: nobody can know which
    rejected     `reject_share`, all of them unless the operator says otherwise: honest work is hardly ever rejected, so
                 it costs next to nothing, and who rejects what is good is contradicted at once. An owner that is
                 limited has just had several rejections confirmed; of what it hands in a share is drawn, so that
                 rubbish does not cost twice
    watched      all that an owner hands in whose work drifts away from that of others

Each owner judges a submission once, appeals included, and nobody its own work. So a second opinion takes two owners, an
appeal of a rejection one more than judged it, and one of a conviction two more. Where nobody can be asked, nothing is.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shoal.swarm.callers import require_validator
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.params import MILLION
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.history import is_watched
from shoal.swarm.state.judges import find_judge
from shoal.swarm.state.nodes import OwnerRow, find_node, find_owner, list_named
from shoal.swarm.state.queue import JobRow, list_unheard
from shoal.swarm.state.submissions import SubmissionRow, find_submission
from shoal.swarm.state.verdicts import list_verdicts
from shoal.swarm.turn import Turn

CONVICTIONS = 2
"""validators that must clear a submission which as many convicted"""


class Doubt(NamedTuple):
    """Whether one verdict is enough."""

    because: str = ""
    """of a second opinion; empty if none is needed"""
    share: int = 0
    """in millionths, with which it was drawn; 0 if nothing was"""


def needs_second_opinion(turn: Turn, submission: SubmissionRow, verdict: Verdict) -> Doubt:
    """Whether another owner must judge what one verdict would decide."""
    owner = find_owner(turn.connection, submission.owner)
    assert owner is not None, "a submission has an owner"
    because, share = _choose_share(turn, owner, verdict)
    if not share:
        return Doubt()
    if share < MILLION and turn.setting.chain.draw_second(submission.submission, submission.blob) >= share:
        return Doubt(share=share)
    return Doubt(because, share) if count_opinions(turn, submission) else Doubt()


def count_opinions(turn: Turn, submission: SubmissionRow) -> int:
    """Owners of validators that could still judge a submission."""
    return len(set(_list_able(turn)) - set(_list_heard(turn, submission)))


def list_forsaken(turn: Turn, most: int) -> list[JobRow]:
    """Jobs on which nobody is there to give another opinion.

    Who has a claim judges it within `claim_s`. So of who could have been asked for that long and said nothing since, of
    this or of anything else, nothing is to be expected. One that has much to do is heard of, and waited for.
    """
    jobs = list_unheard(turn.connection, turn.now_ms - 1000 * turn.params.claim_s, most)
    if not jobs:
        return []
    heard = {owner: find_judge(turn.connection, owner).heard_ms for owner in set(_list_able(turn))}
    return [job for job in jobs if not _is_awaited(turn, job, heard)]


def _is_awaited(turn: Turn, job: JobRow, heard: Mapping[str, int]) -> bool:
    """Whether somebody who could judge a job has given a verdict since it waits."""
    submission = find_submission(turn.connection, job.submission)
    assert submission is not None, "a job has a submission"
    spent = set(_list_heard(turn, submission))
    return any(heard_ms > job.since_ms for owner, heard_ms in heard.items() if owner not in spent)


def refuse_vain(turn: Turn, submission: SubmissionRow) -> None:
    """Refuse an appeal for which there are not validators enough to make it right."""
    needed = CONVICTIONS if submission.state == SubmissionState.HARD else 1
    able = count_opinions(turn, submission)
    if able < needed:
        text = f"an appeal of this needs {needed} further owners of validators to judge it, and the run has {able} now"
        raise AuthError(409, "no_validators", text)


def _choose_share(turn: Turn, owner: OwnerRow, verdict: Verdict) -> tuple[str, int]:
    """Why a second opinion is asked for, and with which probability."""
    params = turn.params
    if is_watched(turn.connection, owner.owner):
        return "watched", MILLION
    if verdict is not Verdict.ACCEPTED and owner.standing != Standing.LIMITED:
        return "rejected", params.reject_share
    return "drawn", params.second_share


def _list_able(turn: Turn) -> Iterator[str]:
    for key in turn.params.validators:
        for row in list_named(turn.connection, key):
            try:
                yield require_validator(turn, row.node).owner.owner
            except AuthError:
                continue  # it may not judge now: banned, limited, gone


def _list_heard(turn: Turn, submission: SubmissionRow) -> Iterator[str]:
    """Who judged it, and its own owner."""
    yield submission.owner
    for vote in list_verdicts(turn.connection, submission.submission):
        node = find_node(turn.connection, vote.validator)
        assert node is not None, "a verdict is of a node"
        yield node.owner
