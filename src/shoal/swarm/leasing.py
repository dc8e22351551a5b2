"""Leases: who gets what work, and what becomes of work that is not done.

    of each open step, the smallest first: what is offered again, then groups that are missing;
    then, for whom there is nothing of that, what is kept for others; then backups

Invariants:
- work is given out for open steps only, and only as much as their batches lack;
- a span has at most two holders at once, the second one being its backup;
- while others want work an owner gets no more of a step than its share of the batch (see `rules.share`);
- what an owner returned or let expire is kept for it for a while: who does not like its tasks meets them again. Who has
  nothing else to do need not wait for it longer than `RESCUE_S`: a step would wait too, and whoever looks for other
  tasks finds none then;
- and not for ever: after a few leases they are for anybody, and who holds them makes them no younger, so that a backup
  is due when it would have been. Whose leases come to nothing again and again has to rest. Nobody stops a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.swarm.callers import Rows, require_member
from shoal.swarm.delegation import Scope
from shoal.swarm.ending import end_lease
from shoal.swarm.event import Kind
from shoal.swarm.messages import Lease, LeaseAnswer, ReturnAnswer, Standing
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_event
from shoal.swarm.rules.age import oldest_version
from shoal.swarm.rules.batch import count_missing
from shoal.swarm.rules.deadline import is_backup_due, lease_time
from shoal.swarm.rules.width import rest_time
from shoal.swarm.sharing import Room, find_room
from shoal.swarm.state.leases import LeaseRow, count_held, find_lease, find_request, find_slowest, list_due
from shoal.swarm.state.queue import is_crowded
from shoal.swarm.state.spans import find_kept, find_offer, find_span
from shoal.swarm.state.steps import StepRow, find_step, list_steps, newest_version
from shoal.swarm.state.submissions import count_open
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
RESCUE_S = 5
"""after which those who are idle take what is kept for somebody else"""
_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """A span to lease."""

    step: int
    first: int
    count: int
    fence: int
    fresh: bool
    backup: bool = False


def grant_lease(turn: Turn, *, node: str, request_key: str) -> LeaseAnswer:
    """Give a node work, or say why not."""
    caller = require_member(turn, node, Scope.WORK)
    earlier = find_request(turn.connection, node, request_key)
    if earlier is not None:
        return _answer_lease(turn, earlier)
    refusal = _find_refusal(turn, caller)
    if refusal is not None:
        return refusal
    steps = list_steps(turn.connection, "open")
    rooms = {step.step: find_room(turn, step, caller.owner.owner) for step in steps}
    choice = _choose_span(turn, caller, steps, rooms)
    if choice is None:
        return _explain_none(turn, caller, steps, rooms)
    name = f"l{turn.next_seq}"
    turn.append(Kind.LEASE_GRANT, name, _describe_lease(turn, caller, request_key, choice))
    lease = find_lease(turn.connection, name)
    assert lease is not None, "it was granted"
    return _answer_lease(turn, lease)


def return_lease(turn: Turn, *, node: str, lease_id: str) -> ReturnAnswer:
    """Take a lease back; it costs width, or one could choose one's tasks."""
    require_member(turn, node)
    lease = find_lease(turn.connection, lease_id)
    if lease is None or lease.node != node:
        raise AuthError(404, "unknown_lease", "this node has no such lease")
    if lease.state != "active":
        return ReturnAnswer(lease=lease_id, state=lease.state)
    end_lease(turn, lease, "returned", "returned by its holder", blame=True, keep=True)
    return ReturnAnswer(lease=lease_id, state="returned")


def expire_leases(turn: Turn) -> bool:
    """End leases whose deadline has passed; whether there may be more."""
    due = list_due(turn.connection, turn.now_ms, MAX_AT_ONCE)
    for lease in due:
        end_lease(turn, lease, "expired", "expired before it was submitted", blame=True, keep=True)
    return len(due) == MAX_AT_ONCE


def _find_refusal(turn: Turn, caller: Rows) -> LeaseAnswer | None:
    """Why this caller gets no lease now; None if it may have one."""
    params, connection = turn.params, turn.connection
    newest = newest_version(connection)
    if newest >= params.steps:
        return _refuse_lease("finished", "the run is finished", retry_s=0)
    if turn.state.stopped:
        return _refuse_lease("stopped", "the operator stopped the run", retry_s=60)
    if newest < 0:
        return _refuse_lease("no_version", "the run waits for its trainer to publish v0")
    if is_crowded(connection, params.max_queue):
        return _refuse_lease("queue_full", "more work waits for validation than is good; no leases until it is less")
    if count_open(connection, caller.owner.owner) >= params.max_pending_per_owner:
        return _refuse_lease("too_many", "too many submissions of this owner wait for their verdict")
    return _check_width(turn, caller)


def _check_width(turn: Turn, caller: Rows) -> LeaseAnswer | None:
    """As many leases at once as node and owner may hold."""
    params, (node, owner) = turn.params, caller
    rest_ms = owner.failed_ms + rest_time(owner.failures, params.reserve_s) - turn.now_ms
    if owner.failures and rest_ms > 0:
        reason = f"{owner.failures} leases of this owner in a row came to nothing; it rests"
        return _refuse_lease("resting", reason, retry_s=math.ceil(rest_ms / 1000))
    held = count_held(turn.connection, node.node, owner.owner)
    if held.node >= min(node.width, node.max_leases):
        return _refuse_lease("busy", f"this node holds {held.node} leases, as many as it may; deliver them first")
    most = {Standing.PROBATION.value: params.probation_leases, Standing.LIMITED.value: 1}
    if held.owner >= min(most.get(owner.standing, params.max_leases_per_owner), params.max_leases_per_owner):
        return _refuse_lease("busy", f"this owner holds {held.owner} leases, as many as its standing allows")
    return None


def _choose_span(turn: Turn, caller: Rows, steps: Sequence[StepRow], rooms: Mapping[int, Room]) -> Choice | None:
    until_ms = turn.now_ms - 1000 * turn.params.reserve_s
    for step in steps:
        offer = find_offer(turn.connection, step.step, caller.owner.owner, until_ms)
        if offer is not None and offer.count <= rooms[step.step].groups:
            return Choice(offer.step, offer.first, offer.count, offer.fence + 1, fresh=False)
        missing = count_missing(turn.params, step.signal, step.on_their_way, step.next_index)
        count = min(missing, turn.params.groups_per_lease, rooms[step.step].groups)
        if count:
            return Choice(step.step, step.next_index, count, fence=1, fresh=True)
    for step in steps:
        kept = find_kept(turn.connection, step.step, turn.now_ms - 1000 * RESCUE_S)
        if kept is not None and kept.count <= rooms[step.step].groups:
            return Choice(kept.step, kept.first, kept.count, kept.fence + 1, fresh=False)
    for step in steps:
        slow = find_slowest(turn.connection, step.step, caller.owner.owner)
        if slow is not None and slow.count <= rooms[step.step].groups and _is_slow(turn, slow):
            return Choice(slow.step, slow.first, slow.count, slow.fence + 1, fresh=False, backup=True)
    return None


def _explain_none(turn: Turn, caller: Rows, steps: Sequence[StepRow], rooms: Mapping[int, Room]) -> LeaseAnswer:
    """Why there is nothing for a caller: it has its share of what is missing, or nothing is."""
    waits = [room.wait_s for room in rooms.values() if room.wait_s]
    boundless = {step.step: Room(turn.params.groups_per_batch) for step in steps}
    if waits and _choose_span(turn, caller, steps, boundless) is not None:
        reason = "this owner writes as much of each open step as one may while others want work"
        return _refuse_lease("share", reason, retry_s=min(_RETRY_S, *waits))
    return _refuse_lease("no_need", "every open step has its groups on their way; a new step opens when one is trained")


def _is_slow(turn: Turn, lease: LeaseRow) -> bool:
    span = find_span(turn.connection, lease.step, lease.first)
    assert span is not None, "a lease has a span"
    return is_backup_due(turn.params, turn.now_ms - span.granted_ms, lease.deadline_ms - lease.granted_ms)


def _describe_lease(turn: Turn, caller: Rows, request_key: str, choice: Choice) -> dict[str, object]:
    params = turn.params
    return {
        "backup": int(choice.backup),
        "count": choice.count,
        "deadline_ms": turn.now_ms + lease_time(params, turn.setting.mirror.group_ms, choice.count),
        "duplicate_tokens": params.duplicate_tokens,
        "fence": choice.fence,
        "first": choice.first,
        "fresh": int(choice.fresh),
        "newest_version": newest_version(turn.connection),
        "node": caller.node.node,
        "owner": caller.owner.owner,
        "price": params.price,
        "request_key": request_key,
        "step": choice.step,
        "upload_s": params.upload_s,
    }


def _answer_lease(turn: Turn, row: LeaseRow) -> LeaseAnswer:
    """The lease as it was granted. If its deadline moved since, it moved away: who goes by the first one is in time."""
    granted = read_event(turn.connection, int(row.lease[1:]))
    params, step = turn.params, find_step(turn.connection, row.step)
    assert step is not None, "a lease is of a step that was opened"
    lease = Lease(
        run=turn.run,
        lease=row.lease,
        node=row.node,
        step=row.step,
        first=row.first,
        count=row.count,
        group_size=params.group_size,
        max_tokens=params.max_tokens,
        beacon=step.beacon,
        fence=row.fence,
        newest_version=row.newest_version,
        oldest_version=oldest_version(row.step, params.async_level),
        granted_ms=row.granted_ms,
        deadline_ms=row.deadline_ms if granted is None else granted.content["deadline_ms"],
        price=row.price,
    )
    return LeaseAnswer(lease=lease, document=turn.sign(Tag.LEASE, lease))


def _refuse_lease(code: str, reason: str, retry_s: int = _RETRY_S) -> LeaseAnswer:
    return LeaseAnswer(lease=None, code=code, reason=reason, retry_after_s=retry_s)
