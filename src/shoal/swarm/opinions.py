"""Who can still be asked for an opinion: owners of validators that may judge a submission now and have not.

Each owner judges a submission once, appeals included, and nobody its own work. So a second opinion takes two owners, an
appeal of a rejection one more than judged it, and one of a conviction two more.
"""

from collections.abc import Iterator

from shoal.swarm.callers import require_validator
from shoal.swarm.messages import SubmissionState
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.nodes import find_node, list_named
from shoal.swarm.state.queue import list_verdicts
from shoal.swarm.state.submissions import SubmissionRow
from shoal.swarm.turn import Turn

CONVICTIONS = 2
"""validators that must clear a submission which as many convicted"""


def count_opinions(turn: Turn, submission: SubmissionRow) -> int:
    """Owners of validators that could still judge a submission."""
    return len(set(_list_able(turn)) - set(_list_heard(turn, submission)))


def refuse_vain(turn: Turn, submission: SubmissionRow) -> None:
    """Refuse an appeal for which there are not validators enough to make it right."""
    needed = CONVICTIONS if submission.state == SubmissionState.HARD else 1
    able = count_opinions(turn, submission)
    if able < needed:
        text = f"an appeal of this needs {needed} further owners of validators to judge it, and the run has {able} now"
        raise AuthError(409, "no_validators", text)


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
