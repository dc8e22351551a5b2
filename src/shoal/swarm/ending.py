"""The ends of leases, and of all work of somebody who was banned."""

from shoal.swarm.event import Kind
from shoal.swarm.messages import SubmissionState
from shoal.swarm.rules.width import halve_width
from shoal.swarm.state.leases import LeaseRow, find_lease, list_of_owner
from shoal.swarm.state.nodes import OwnerRow, find_node, find_owner
from shoal.swarm.state.submissions import SubmissionRow, list_open
from shoal.swarm.turn import Turn

_MEETINGS = 3
"""times that groups are given out, after which they are kept for nobody"""


def end_lease(
    turn: Turn, lease: LeaseRow, state: str, because: str, *, blame: bool = False, keep: bool = False
) -> None:
    """End a lease: `blame` halves the node's width, `keep` offers the span to the same owner first."""
    node, owner = find_node(turn.connection, lease.node), find_owner(turn.connection, lease.owner)
    assert node is not None and owner is not None, "a lease has a node, and that an owner"
    width = halve_width(node.aimd) if blame else node.aimd
    body = {
        "because": because,
        "failures": _count_failures(owner, lease) if blame else owner.failures,
        "first": lease.first,
        "node": lease.node,
        "owner": lease.owner,
        "progress": width.progress,
        "reserved": lease.owner if keep and lease.fence < _MEETINGS else "",
        "state": state,
        "step": lease.step,
        "width": width.width,
    }
    turn.append(Kind.LEASE_END, lease.lease, body)


def _count_failures(owner: OwnerRow, lease: LeaseRow) -> int:
    """Leases that were held side by side and came to nothing together are one failure."""
    return owner.failures + int(lease.granted_ms > owner.failed_ms)


def drop_upload(turn: Turn, submission: SubmissionRow, because: SubmissionState, *, blame: bool = False) -> None:
    """Wait no longer for the file of a submission."""
    lease = find_lease(turn.connection, submission.lease)
    assert lease is not None, "a submission that awaits its file has a lease"
    end_lease(turn, lease, "unsent", because.value, blame=blame, keep=blame)


def void_work(turn: Turn, owner: str, node: str | None = None) -> None:
    """End all that an owner, or one node of it, has begun: it is not paid, and others may do it."""
    for lease in list_of_owner(turn.connection, owner):
        if node in (None, lease.node):
            end_lease(turn, lease, "cancelled", "its holder was banned")
    for submission in list_open(turn.connection, owner):
        if node in (None, submission.node):
            _void_submission(turn, submission)


def _void_submission(turn: Turn, submission: SubmissionRow) -> None:
    if submission.state == SubmissionState.COMMITTED:
        drop_upload(turn, submission, SubmissionState.VOID)
        return
    turn.append(
        Kind.SUB_OUTCOME, submission.submission, empty_outcome(turn, submission, SubmissionState.VOID, "banned")
    )


def empty_outcome(turn: Turn, submission: SubmissionRow, state: SubmissionState, because: str) -> dict[str, object]:
    """The body of an outcome that pays nothing and changes nobody's record."""
    node, owner = find_node(turn.connection, submission.node), find_owner(turn.connection, submission.owner)
    assert node is not None and owner is not None, "a submission has a node, and that an owner"
    return {
        "appeal": 0,
        "because": because,
        "blob": submission.blob,
        "drift": [],
        "earned": 0,
        "fills": 1,
        "first": submission.first,
        "group_ms": 0,
        "holds": [],
        "node": submission.node,
        "numbers": [],
        "owner": submission.owner,
        "paid": 0,
        "progress": node.progress,
        "purse": "",
        "round": 0,
        "signals": [],
        "soft_row": owner.soft_row,
        "spared": 0,
        "staked": [],
        "state": state.value,
        "step": submission.step,
        "tokens": 0,
        "version": submission.version,
        "width": node.width,
    }
