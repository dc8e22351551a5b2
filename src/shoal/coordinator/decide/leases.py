"""Leases: which node gets which groups, and what happens to groups that are not delivered.

    for each open step, lowest first: groups that are offered again, then missing groups;
    then, for an owner that finds neither, groups reserved for others; then backups

    an owner without a record, while its like fails (a trial): a missing group of the highest open step, now and then

Invariants:
- groups are granted for open steps only, and only as many as their batches lack;
- a range of groups has at most two holders at once, the second one being its backup; and further ones while no holder
  has a record, so that identities that cost nothing cannot hold up a step;
- a group that a trial lost is not given to another trial while owners of record take leases;
- the version is fixed with the lease, when its node does not know the tasks yet: nobody can choose the better of two;
- while others want work, an owner gets no more of a step than its share of the batch (`rules.leases`). The bound
  follows from the ledger and the time alone, so an audit gets the same; without a bound nothing is counted;
- groups that an owner returned or let expire are offered to it first for a while, so returning a lease does not get
  different tasks. An idle owner waits at most `RESCUE_S` for them: otherwise the step would wait too;
- after `_MAX_RESERVED` leases, groups are no longer reserved, and their age counts from the first lease, so a backup is
  not delayed. An owner whose leases fail repeatedly must pause. No owner can stop a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.coordinator.decide.context import CallerRows, Decision, build_from, require_member, require_row
from shoal.coordinator.rules import leases as rules
from shoal.coordinator.rules.standing import count_fault, is_suspect
from shoal.coordinator.rules.storage import find_shortage, limit_lease_file
from shoal.coordinator.state import leases
from shoal.coordinator.state.members import OwnerRow, find_node, find_owner
from shoal.coordinator.state.queue import is_crowded
from shoal.coordinator.state.run import StepRow, count_away, list_steps, newest_version
from shoal.coordinator.state.storage import find_owner_room, find_total_room
from shoal.coordinator.state.submissions import SubmissionRow, count_open
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag
from shoal.ledger.reader import read_event
from shoal.net.api_error import ApiError
from shoal.protocol.events import Flag, LeaseEnd, LeaseExtend, LeaseGrant, read_body
from shoal.protocol.messages import Lease, LeaseAnswer, ReturnAnswer, Standing, SubmissionState
from shoal.protocol.params import RunParams, count_missing, is_allowed
from shoal.util.units import count_things

MAX_AT_ONCE = 64
RESCUE_S = 5
"""time after which an idle owner gets groups reserved for another"""
_RETRY_S = 5
_ROOM_RETRY_S = 60
"""room becomes free when files are deleted, about once a minute"""
_MAX_RESERVED = 3
"""number of leases of the same groups after which they are no longer reserved"""


class ShareRoom(NamedTuple):
    """What remains of an owner's share of a step."""

    groups: int
    wait_s: int = 0
    """time until the bound is lifted, if nobody else takes the missing groups; 0 if there is no bound"""


def find_room(decision: Decision, step: StepRow, owner: str) -> ShareRoom:
    """The number of groups of a step that an owner may still get."""
    params = decision.params
    if not rules.is_bounded(params):
        return ShareRoom(params.groups_per_batch)
    left = rules.most_groups(params, _count_owners(decision, step, owner)) - leases.count_share(
        decision.connection, step.step, owner
    )
    if left >= (params.groups_per_lease or 1):
        return ShareRoom(left)
    since_ms = max(step.opened_ms, leases.last_other(decision.connection, step.step, owner))
    wait_ms = since_ms + 1000 * params.share_wait_s + count_away(decision.connection, since_ms) - decision.now_ms
    return ShareRoom(max(left, 0), math.ceil(wait_ms / 1000)) if wait_ms > 0 else ShareRoom(params.groups_per_batch)


def _count_owners(decision: Decision, step: StepRow, owner: str) -> int:
    """The number of active owners: those with leases of this step or the previous one, counted as far as it matters."""
    most = rules.count_equals(decision.params)
    owners = {owner, *leases.list_owners(decision.connection, step.step - 1, most)}
    return len(owners | set(leases.list_owners(decision.connection, step.step, most)))


@dataclass(frozen=True, slots=True)
class RangeChoice:
    """A range of groups to lease."""

    step: int
    first: int
    count: int
    fence: int
    fresh: Flag = 0
    """1 if these groups were never granted before"""
    backup: Flag = 0
    """1 if another owner holds them"""


def grant_lease(decision: Decision, node: str, request_key: str, version: int) -> LeaseAnswer:
    """Grant a node a lease for work with a version, or return the reason why not."""
    caller = require_member(decision, node, Scope.WORK)
    earlier = leases.find_request(decision.connection, node, request_key)
    if earlier is not None:
        granted = read_event(decision.connection, int(earlier.lease[1:]))
        # If its deadline moved since, it moved later: a node that uses the first one is still in time. The version is
        # that of the first request.
        deadline_ms = earlier.deadline_ms if granted is None else read_body(granted, LeaseGrant).deadline_ms
        return _answer_lease(decision, replace(earlier, deadline_ms=deadline_ms))
    refusal = _find_refusal(decision, caller)
    if refusal is not None:
        return refusal
    newest, level = newest_version(decision.connection), decision.params.async_level
    opened = list_steps(decision.connection, "open")
    steps = [step for step in opened if version <= newest and is_allowed(step.step, version, level)]
    if opened and not steps:
        return _refuse_lease("version", f"no open step accepts rollouts of v{version}; newest is v{newest}", retry_s=1)
    rooms = {step.step: find_room(decision, step, caller.owner.owner) for step in steps}
    choice = _choose_range(decision, caller, steps, rooms)
    if choice is None:
        return _explain_none(decision, caller, steps, rooms)
    shortage = explain_shortage(decision, caller.owner.owner, limit_lease_file(decision.params, choice.count))
    if shortage:
        return _refuse_lease("room", shortage, retry_s=_ROOM_RETRY_S)
    name = f"l{decision.next_seq}"
    decision.append(name, _describe_lease(decision, caller, request_key, choice, version))
    lease = require_row(leases.find_lease(decision.connection, name), "the lease was granted above")
    return _answer_lease(decision, lease)


def explain_shortage(decision: Decision, owner: str, file_bytes: int) -> str:
    """Why an owner gets no room for one more file, in one sentence; empty if it does."""
    own, total = find_owner_room(decision.connection, owner), find_total_room(decision.connection)
    return find_shortage(decision.params, own, file_bytes, all_over=total.over, all_bytes=total.stored)


def return_lease(decision: Decision, node: str, lease_id: str) -> ReturnAnswer:
    """Take a lease back; this lowers the lease limit, otherwise a node could choose its tasks."""
    require_member(decision, node)
    lease = leases.find_lease(decision.connection, lease_id)
    if lease is None or lease.node != node:
        raise ApiError(404, "unknown_lease", "this node has no such lease")
    if lease.state != "active":
        return ReturnAnswer(lease=lease_id, state=lease.state)
    end_lease(decision, lease, "returned", "returned by its holder", blame=True, keep=True)
    return ReturnAnswer(lease=lease_id, state="returned")


def expire_leases(decision: Decision) -> bool:
    """End leases whose deadline has passed, or extend those that progress; return whether more may remain."""
    due = leases.list_due(decision.connection, decision.now_ms, MAX_AT_ONCE)
    for lease in due:
        if not extend_lease(decision, lease, decision.read_progress(lease.lease)):
            end_lease(decision, lease, "expired", "expired before it was submitted", blame=True, keep=True)
    return len(due) == MAX_AT_ONCE


def extend_lease(decision: Decision, lease: leases.LeaseRow, done: int) -> bool:
    """Give a lease more time if its node reports more finished rollouts than when it last got some.

    A node may report what it likes: it gets at most `lease_max_s` in all, and backups do not wait for it.
    """
    rollouts = lease.count * decision.params.group_size
    if not lease.done < done <= rollouts:
        return False
    held_ms = decision.now_ms - lease.granted_ms - count_away(decision.connection, lease.granted_ms)
    more_ms = rules.extend_time(decision.params, held_ms, done, rollouts) - held_ms
    if more_ms <= 0:
        return False
    decision.append(lease.lease, LeaseExtend(deadline_ms=decision.now_ms + more_ms, done=done))
    return True


def _find_refusal(decision: Decision, caller: CallerRows) -> LeaseAnswer | None:
    """The reason why this caller gets no lease now; None if it may have one."""
    params, connection = decision.params, decision.connection
    newest = newest_version(connection)
    if newest >= params.steps:
        return _refuse_lease("finished", "the run is finished", retry_s=0)
    if decision.state.stopped:
        return _refuse_lease("stopped", "the operator stopped the run", retry_s=60)
    if newest < 0:
        return _refuse_lease("no_version", "the run is waiting for its trainer to publish v0")
    # First what needs no query: owners of rubbish that are shut out may ask often.
    if shut_out := _check_standing(params, caller.owner, decision.now_ms):
        return shut_out
    if is_crowded(connection, params.max_queue):
        return _refuse_lease("queue_full", "the validation queue is full; no leases until it is shorter")
    if count_open(connection, caller.owner.owner) >= params.max_pending_per_owner:
        return _refuse_lease("too_many", "too many submissions of this owner are waiting for a verdict")
    return _check_lease_limit(decision, caller)


def _check_standing(params: RunParams, owner: OwnerRow, now_ms: int) -> LeaseAnswer | None:
    """Refuse an owner that is paused, or owes a proof of work."""
    rest_ms = owner.failed_ms - now_ms
    rest_ms += rules.rest_time(params, owner.failures, owner.strikes, owner.charge_ms)
    if owner.failed_ms and rest_ms > 0:
        rest_s = math.ceil(rest_ms / 1000)
        reason = f"this owner is paused for {rest_s} s, because its leases failed or its work was rejected"
        return _refuse_lease("resting", reason, retry_s=rest_s)
    if owes_work(params, owner):
        reason = "a new proof of work is due, because too much work of this owner was rejected or its leases failed"
        return _refuse_lease("work", reason)
    return None


def _check_lease_limit(decision: Decision, caller: CallerRows) -> LeaseAnswer | None:
    """Refuse if node or owner hold as many leases as they may."""
    params, (node, owner) = decision.params, caller
    held = leases.count_held(decision.connection, node.node, owner.owner)
    if held.node >= min(node.width, node.max_leases):
        return _refuse_lease("busy", f"this node holds {count_things(held.node, 'lease')}, its limit")
    most = {Standing.PROBATION.value: params.probation_leases, Standing.LIMITED.value: 1}
    if held.owner >= min(most.get(owner.standing, params.max_leases_per_owner), params.max_leases_per_owner):
        return _refuse_lease("busy", f"this owner holds {count_things(held.owner, 'lease')}, the limit of its standing")
    return None


def owes_work(params: RunParams, owner: OwnerRow) -> bool:
    """Whether an owner has to do a new proof of work before its next lease."""
    is_due = rules.owes_work(params, owner.strikes, owner.failures, has_record=owner.has_record)
    return is_due and not owner.renewed


def _choose_range(
    decision: Decision, caller: CallerRows, steps: Sequence[StepRow], rooms: Mapping[int, ShareRoom]
) -> RangeChoice | None:
    trials = leases.read_trials(decision.connection)
    if not caller.owner.has_record and trials.spacing_ms:
        is_early = _wait_trial(decision, caller.owner, trials) > 0
        awaited = [step for step in steps if _is_awaited(decision, step, trials)]
        if is_early and (is_suspect(caller.owner.strikes) or not awaited):
            return None
        if not awaited:
            return _choose_trial(decision, caller, rooms)
        steps = awaited
    until_ms = decision.now_ms - 1000 * decision.params.reserve_s
    for step in steps:
        offer = leases.find_offer(decision.connection, step.step, caller.owner.owner, until_ms)
        if offer is not None and offer.count <= rooms[step.step].groups:
            return RangeChoice(offer.step, offer.first, offer.count, offer.fence + 1)
        missing = count_missing(decision.params, step.signal, step.on_their_way, step.next_index)
        count = min(missing, _choose_size(decision, caller.owner, step), rooms[step.step].groups)
        if count:
            return RangeChoice(step.step, step.next_index, count, fence=1, fresh=1)
    for step in steps:
        kept = leases.find_spared(decision.connection, step.step, decision.now_ms - 1000 * RESCUE_S)
        if kept is not None and kept.count <= rooms[step.step].groups:
            return RangeChoice(kept.step, kept.first, kept.count, kept.fence + 1)
    slow = _choose_slow(decision, caller, steps, rooms)
    if slow is not None or caller.owner.has_record:
        return slow or _choose_tried(decision, caller, steps, rooms)
    awaited = [step for step in steps if _is_awaited(decision, step, trials)]
    return _choose_tried(decision, caller, awaited, rooms)


def _choose_slow(
    decision: Decision, caller: CallerRows, steps: Sequence[StepRow], rooms: Mapping[int, ShareRoom]
) -> RangeChoice | None:
    """Groups that another owner holds for too long."""
    for step in steps:
        slow = leases.find_slowest(decision.connection, step.step, caller.owner.owner)
        if slow is not None and slow.count <= rooms[step.step].groups and _is_slow(decision, slow):
            return RangeChoice(slow.step, slow.first, slow.count, slow.fence + 1, backup=1)
    return None


def _choose_tried(
    decision: Decision, caller: CallerRows, steps: Sequence[StepRow], rooms: Mapping[int, ShareRoom]
) -> RangeChoice | None:
    """Groups that only owners without a record hold, for longer than usual; not for their like, if others are there."""
    for step in steps:
        tried = leases.find_tried(decision.connection, step.step, caller.owner.owner)
        if tried is not None and tried.count <= rooms[step.step].groups and _is_trial_slow(decision, tried):
            return RangeChoice(tried.step, tried.first, tried.count, tried.fence + 1, backup=1)
    return None


def _is_awaited(decision: Decision, step: StepRow, trials: leases.TrialRow) -> bool:
    """Whether owners without a record may have any groups of a step: no owner of record wants them.

    That is so if there is none yet, or none took a lease for as long as a lease takes while the step was open.
    """
    since_ms = max(trials.record_ms, step.opened_ms)
    time_ms = rules.lease_time(decision.params, leases.list_group_times(decision.connection), 1)
    return not trials.record_ms or decision.now_ms - since_ms - count_away(decision.connection, since_ms) > time_ms


def _wait_trial(decision: Decision, owner: OwnerRow, trials: leases.TrialRow) -> int:
    """Milliseconds until an owner may have a trial; not above 0 if it may now."""
    is_first = owner.since_ms <= trials.granted_ms and not owner.failures and not owner.strikes
    delay_ms = rules.trial_delay(owner.owner, trials.granted_ms, trials.spacing_ms, is_first=is_first)
    return trials.granted_ms + trials.spacing_ms + delay_ms - decision.now_ms


def _choose_trial(decision: Decision, caller: CallerRows, rooms: Mapping[int, ShareRoom]) -> RangeChoice | None:
    """What is reserved for its owner; or a missing group of the highest step, which is needed last."""
    steps = [step for step in list_steps(decision.connection, "open") if step.step in rooms]
    for step in steps:
        own = leases.find_own(decision.connection, step.step, caller.owner.owner)
        if own is not None and own.count <= rooms[step.step].groups:
            return RangeChoice(own.step, own.first, own.count, own.fence + 1)
    for step in reversed(steps):
        if rooms[step.step].groups and count_missing(decision.params, step.signal, step.on_their_way, step.next_index):
            return RangeChoice(step.step, step.next_index, 1, fence=1, fresh=1)
    return None


def _choose_size(decision: Decision, owner: OwnerRow, step: StepRow) -> int:
    """Groups of a new lease."""
    params = decision.params
    if params.groups_per_lease or not owner.has_record:
        return params.groups_per_lease or 1
    group_ms = leases.list_group_times(decision.connection)
    return rules.lease_size(params, group_ms, leases.count_nodes(decision.connection, step.step))


def _is_trial_slow(decision: Decision, lease: leases.LeaseRow) -> bool:
    time_ms = rules.trial_time(decision.params, leases.list_group_times(decision.connection), lease.count)
    return decision.now_ms - lease.granted_ms >= time_ms


def _explain_none(
    decision: Decision, caller: CallerRows, steps: Sequence[StepRow], rooms: Mapping[int, ShareRoom]
) -> LeaseAnswer:
    """Why there is nothing for a caller: it has its share of the missing groups, or none are missing."""
    trials = leases.read_trials(decision.connection)
    if not caller.owner.has_record and trials.spacing_ms:
        reason = "the run limits leases of new owners, because work of new owners failed recently"
        wait_ms = _wait_trial(decision, caller.owner, trials)
        return _refuse_lease("trial", reason, retry_s=max(1, math.ceil(wait_ms / 1000)))
    waits = [room.wait_s for room in rooms.values() if room.wait_s]
    boundless = {step.step: ShareRoom(decision.params.groups_per_batch) for step in steps}
    if waits and _choose_range(decision, caller, steps, boundless) is not None:
        reason = "this owner has reached its share of each open step while other owners want work"
        return _refuse_lease("share", reason, retry_s=min(_RETRY_S, *waits))
    return _refuse_lease("no_need", "all groups of open steps are in progress; a new step opens when one is trained")


def _is_slow(decision: Decision, lease: leases.LeaseRow) -> bool:
    groups = require_row(leases.find_range(decision.connection, lease.step, lease.first), "every lease has a range")
    # Neither the holder's own times nor its reports of progress delay others.
    time_ms = rules.lease_time(decision.params, leases.list_group_times(decision.connection), lease.count)
    return rules.is_backup_due(decision.params, decision.now_ms - groups.granted_ms, time_ms)


def _describe_lease(
    decision: Decision, caller: CallerRows, request_key: str, choice: RangeChoice, version: int
) -> LeaseGrant:
    params, group_ms = decision.params, leases.list_group_times(decision.connection)
    own_ms = leases.list_own_times(decision.connection, caller.owner.owner)
    time_ms = rules.lease_time(params, group_ms, choice.count, own_ms)
    return build_from(
        LeaseGrant,
        choice,
        deadline_ms=decision.now_ms + time_ms,
        duplicate_tokens=params.duplicate_tokens,
        file_bytes=limit_lease_file(params, choice.count),
        node=caller.node.node,
        owner=caller.owner.owner,
        price=params.price,
        request_key=request_key,
        trial=0 if caller.owner.has_record else 1,
        upload_s=params.upload_s,
        version=version,
    )


def _answer_lease(decision: Decision, row: leases.LeaseRow) -> LeaseAnswer:
    """The lease as it was granted."""
    params, chain = decision.params, decision.context.chain
    lease = build_from(
        Lease,
        row,
        run=decision.run,
        group_size=params.group_size,
        max_tokens=params.max_tokens,
        seeds=chain.reveal_groups(row.step, row.first, row.count, params.group_size),
    )
    return LeaseAnswer(lease=lease, document=decision.sign(Tag.LEASE, lease))


def _refuse_lease(code: str, reason: str, retry_s: int = _RETRY_S) -> LeaseAnswer:
    return LeaseAnswer(lease=None, code=code, reason=reason, retry_after_s=retry_s)


def end_lease(
    decision: Decision,
    lease: leases.LeaseRow,
    state: str,
    because: str,
    *,
    blame: bool = False,
    keep: bool = False,
    is_replaced: bool = False,
) -> None:
    """End a lease: `blame` halves the node's lease limit, `keep` offers the groups to the same owner first.

    `is_replaced`: its backup delivered. That is a fault of an owner of record too, or it could hold up every step by
    leases that it never delivers. It is no failure: the owner need not pause."""
    node, owner = find_node(decision.connection, lease.node), find_owner(decision.connection, lease.owner)
    assert node is not None and owner is not None, "every lease has a node, and every node an owner"
    limit = rules.halve_limit(node.lease_limit) if blame else node.lease_limit
    # Leases that were held concurrently and failed together count as one failure, but each is a fault.
    is_failure = blame and lease.granted_ms > owner.failed_ms
    is_fault = blame or (is_replaced and not lease.trial)
    body = build_from(
        LeaseEnd,
        lease,
        because=because,
        failures=owner.failures + is_failure,
        progress=limit.progress,
        reserved=lease.owner if keep and lease.fence < _MAX_RESERVED else "",
        spacing_ms=next_spacing(decision, lease, failed=True if blame or _is_trial_slow(decision, lease) else None),
        state=state,
        strikes=count_fault(owner.strikes) if is_fault else owner.strikes,
        width=limit.width,
    )
    decision.append(lease.lease, body)


def next_spacing(decision: Decision, lease: leases.LeaseRow, *, failed: bool | None) -> int:
    """Milliseconds between trials after a lease failed or its work was accepted; None: neither.

    A trial that others had to make up for has failed too, although its owner is not blamed: it may only be slow.
    """
    spacing_ms = leases.read_trials(decision.connection).spacing_ms
    if failed is None or not lease.trial:
        return spacing_ms
    time_ms = rules.usual_time(leases.list_group_times(decision.connection)) * lease.count
    return rules.space_trials(decision.params, spacing_ms, time_ms, failed=failed)


def drop_upload(
    decision: Decision,
    submission: SubmissionRow,
    because: SubmissionState,
    *,
    blame: bool = False,
    is_replaced: bool = False,
) -> None:
    """Stop waiting for the file of a submission."""
    lease = leases.find_lease(decision.connection, submission.lease)
    assert lease is not None, "a submission that waits for its file has a lease"
    end_lease(decision, lease, "unsent", because.value, blame=blame, keep=blame, is_replaced=is_replaced)
