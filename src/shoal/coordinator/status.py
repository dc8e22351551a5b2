"""Overview of the run: open steps, the queue, who waits for whom, and alarms."""

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection

from shoal.coordinator.cache import MAX_REPORTED, RunCache
from shoal.coordinator.decide.context import RunContext, build_from
from shoal.coordinator.decide.drift_watch import describe_watch
from shoal.coordinator.economics import describe_check_rate
from shoal.coordinator.rules.leases import progress_time
from shoal.coordinator.rules.storage import POOL_PART, limit_lease_file
from shoal.coordinator.state.canaries import CanaryRow, last_caught, list_missed
from shoal.coordinator.state.credit import count_redeems, list_redeems
from shoal.coordinator.state.drift import count_watched, list_watched
from shoal.coordinator.state.leases import LeaseRow, list_group_times, list_oldest, oldest_offer
from shoal.coordinator.state.members import (
    OwnerRow,
    find_ban,
    find_owner,
    list_leaders,
    list_matching,
    list_owned,
    list_scopes,
)
from shoal.coordinator.state.queue import count_awaiting_opinion, count_queued, oldest_queued
from shoal.coordinator.state.run import (
    StepRow,
    find_version,
    last_command_time,
    list_steps,
    newest_version,
    read_run,
)
from shoal.coordinator.state.storage import find_total_room
from shoal.coordinator.state.submissions import count_awaited, list_rejected
from shoal.ledger.db import read_accounts
from shoal.protocol.messages import (
    MAX_NODES,
    MAX_OWNERS,
    MAX_REJECTIONS,
    KeyAnswer,
    LeaderLine,
    NodeLine,
    OwnerAccount,
    OwnerLine,
    Standing,
    Status,
    StepInfo,
    WaitInfo,
)
from shoal.protocol.params import RunParams, is_exhausted
from shoal.util.units import count_things, format_bytes
from shoal.util.waits import Wait, WaitTable

_MAX_SKEW_MS = 5000
_MAX_COUNTED = 1000
_GRACE_MS = 10_000
"""tolerance after a deadline that the coordinator handles itself, because it checks every second"""
_BRIEF_MS = 5000
"""shorter waits of this process are not reported"""
_MAX_NAMED = 8
"""leases that one sentence lists; canaries and payout requests that are listed one by one"""


class StepStage(NamedTuple):
    """How an open step relates to the others."""

    is_first: bool
    """work for it should be arriving; later steps are served once it has all"""
    is_next: bool
    """the trainer has nothing else to do"""


def build_status(
    connection: Connection, context: RunContext, wait_table: WaitTable, now_ms: int, ahead_ms: int = 0
) -> Status:
    """The run as it is on disk; its time is `ahead_ms` ahead of the system clock."""
    state, cache = read_run(connection), context.cache
    params, newest = state.params, newest_version(connection)
    live, stale, gone = cache.count_alive(now_ms)
    waits = [*find_waits(connection, cache, params, now_ms), *cache.list_waits(now_ms)]
    own = [wait for wait in wait_table.list_waits() if wait.is_overdue(now_ms) or wait.lasts(now_ms) > _BRIEF_MS]
    waits += own[:MAX_REPORTED]
    described = [describe_wait(wait, now_ms) for wait in waits]
    overdue = [f"overdue: {info.text}" for info in described if info.overdue]
    return Status(
        run=context.run,
        server_time_ms=now_ms,
        finished=newest >= params.steps,
        stopped=state.stopped,
        steps=params.steps,
        trained=max(0, newest),
        newest_version=newest,
        open_steps=tuple(_describe_step(params, step) for step in list_steps(connection, "open")),
        queue=count_queued(connection),
        nodes_live=live,
        nodes_stale=stale,
        nodes_gone=gone,
        nodes=tuple(cache.list_live(now_ms)),
        waits=tuple(described),
        alarms=(*find_alarms(connection, params, now_ms, cache.started_ms), *_describe_clock(ahead_ms), *overdue),
        watched=tuple(_list_watched(connection)),
        checks=describe_check_rate(params),
    )


def describe_wait(wait: Wait, now_ms: int) -> WaitInfo:
    """A wait as a message, with a readable sentence."""
    overdue = wait.is_overdue(now_ms)
    end = ""
    if wait.deadline_ms:
        left_s = (wait.deadline_ms - now_ms) // 1000
        end = f", {-left_s} s past its deadline" if overdue else f", deadline in {left_s} s"
    detail = f": {wait.detail}" if wait.detail else ""
    text = f"{wait.owner} waits for {wait.waiting_for}, for {wait.lasts(now_ms) // 1000} s{end}{detail}"
    return build_from(WaitInfo, wait, for_whom=wait.waiting_for, overdue=overdue, text=text)


def find_waits(connection: Connection, cache: RunCache, params: RunParams, now_ms: int) -> Iterator[Wait]:
    """What the run is waiting for."""
    yield from _find_redeems(connection)
    yield from _find_opinions(connection, params)
    newest, train_ms = newest_version(connection), 1000 * params.train_s
    if newest >= params.steps:
        return
    if newest < 0:
        since_ms = cache.started_ms or now_ms
        yield Wait("first version", "the run", "the trainer to publish v0", since_ms, since_ms + train_ms)
        return
    if is_stopped := read_run(connection).stopped:
        yield Wait("stop", "the run", "the operator to resume it", last_command_time(connection))
    for place, step in enumerate(list_steps(connection, "open")):
        stage = StepStage(is_first=not place, is_next=step.step == newest + 1)
        yield from _find_step_waits(connection, cache, params, step, now_ms, stage, is_stopped=is_stopped)
    for step in list_steps(connection, "cut"):
        if step.step == newest + 1:
            goal, since_ms = f"the trainer to publish v{step.step}", step.cut_ms
            yield Wait("training", f"step {step.step}", goal, since_ms, max(since_ms, cache.started_ms) + train_ms)
    yield from _find_files(connection)
    if queued := count_queued(connection):
        since_ms, goal = oldest_queued(connection), f"validators to judge {count_things(queued, 'submission')}"
        yield Wait("validation", "the queue", goal, since_ms, since_ms + 1000 * params.opinion_s)


def find_alarms(connection: Connection, params: RunParams, now_ms: int, started_ms: int) -> Iterator[str]:
    """Problems that need the operator's attention."""
    yield from (_describe_missed(canary) for canary in list_missed(connection, _MAX_NAMED))
    quiet_ms = now_ms - max(last_caught(connection), started_ms)
    if params.canary_every_s and quiet_ms > 1000 * params.canary_every_s:
        yield f"no canary was caught for {quiet_ms // 1000} s; plant one: shoal canary plant"
    yield from _find_shortages(connection, params)


def _find_shortages(connection: Connection, params: RunParams) -> Iterator[str]:
    """Room for files that is used up, for all owners or for those without accepted work."""
    total, most = find_total_room(connection), limit_lease_file(params, params.most_per_lease)
    first = limit_lease_file(params, params.groups_per_lease or 1)
    if total.stored + most > params.store_bytes:
        used = f"{format_bytes(total.stored)} of {format_bytes(params.store_bytes)} are used"
        yield f"the store has no room for a further file, so there are no leases: {used} (parameter store_bytes)"
    elif POOL_PART * (total.over + first) > params.store_bytes:
        yield "the room for files of owners without accepted work is used up, so new owners get no leases"


def _describe_clock(ahead_ms: int) -> list[str]:
    if abs(ahead_ms) <= _MAX_SKEW_MS:
        return []
    way = "ahead of" if ahead_ms > 0 else "behind"
    return [f"ledger time is {abs(ahead_ms) // 1000} s {way} the system clock (the clock was wrong before, or is now)"]


def read_leaders(connection: Connection, limit: int) -> list[LeaderLine]:
    """Owners by accepted tokens."""
    rows, scopes = list_leaders(connection, limit), list_scopes(connection, limit)
    return [
        build_from(LeaderLine, row, standing=Standing(row.standing), scopes=tuple(sorted(scopes.get(row.owner, ()))))
        for row in rows
    ]


def find_key(connection: Connection, prefix: str) -> KeyAnswer:
    """The owners whose key, or whose node's key, begins with a prefix."""
    return KeyAnswer(
        owners=tuple(_describe_owner(connection, row, prefix) for row in list_matching(connection, prefix, MAX_OWNERS))
    )


def _describe_owner(connection: Connection, row: OwnerRow, prefix: str) -> OwnerLine:
    nodes = [
        build_from(NodeLine, node, scopes=tuple(node.scopes.split(",")), ban=_describe_ban(connection, node.node))
        for node in list_owned(connection, row.owner, prefix, MAX_NODES)
    ]
    rejections = tuple(list_rejected(connection, row.owner, MAX_REJECTIONS))
    standing, ban = Standing(row.standing), _describe_ban(connection, row.owner)
    return build_from(OwnerLine, row, standing=standing, ban=ban, nodes=tuple(nodes), rejections=rejections)


def _describe_ban(connection: Connection, key: str) -> str:
    ban = find_ban(connection, key, key)
    return "" if ban is None else f"{ban.reason or 'by the operator, without a reason'} (event {ban.seq})"


def read_account(connection: Connection, owner: str) -> OwnerAccount | None:
    """The record and the credit of an owner; None if it never joined."""
    row = find_owner(connection, owner)
    if row is None:
        return None
    balances = read_accounts(connection, owner, "stake", "pending", "avail", "unbond", "redeeming")
    return build_from(OwnerAccount, row, standing=Standing(row.standing), **balances)


def _list_watched(connection: Connection) -> Iterator[str]:
    rows = list_watched(connection, _MAX_NAMED)
    yield from (f"owner {row.owner[:8]}: {describe_watch(row)}" for row in rows)
    if len(rows) == _MAX_NAMED and (more := count_watched(connection) - _MAX_NAMED):
        yield f"{more} more"


def _describe_missed(canary: CanaryRow) -> str:
    names = ", ".join(f"validator {name[:8]}" for name in canary.validators)
    trained = f"; step {canary.trained} was trained on it" if canary.trained else ""
    said = "rejected though it is good" if canary.good else "accepted"
    trained = "" if canary.good else trained
    return f"{canary.submission} of a canary was {said} by {names}: it lies, or its checks are broken{trained}"


def _find_redeems(connection: Connection) -> Iterator[Wait]:
    """Credit that its owners wait for and the operator has to pay out."""
    rows = list_redeems(connection, _MAX_NAMED)
    for row in rows:
        goal = f"the operator to pay out {row.amount} micro-credits"
        how = f"shoal admin redeemed or unredeemed, request {row.request}"
        yield Wait("redeem", f"owner {row.owner[:8]}", goal, row.asked_ms, detail=how)
    if (more := count_redeems(connection) - len(rows)) > 0:
        since_ms = rows[-1].asked_ms
        yield Wait("redeem", f"{more} more", "the operator to pay out redeemed credit", since_ms)


def _find_files(connection: Connection) -> Iterator[Wait]:
    """Announced files; the first that does not arrive in time is given up."""
    count, since_ms, due_ms = count_awaited(connection, _MAX_COUNTED)
    if count:
        yield Wait("files", "the run", "files that nodes announced", since_ms, due_ms + _GRACE_MS, _count(count))


def _find_opinions(connection: Connection, params: RunParams) -> Iterator[Wait]:
    """Submissions that are judged again: in doubt, or because their owner appealed."""
    for is_appeal, goal in ((False, "a second verdict on disputed submissions"), (True, "validators to judge appeals")):
        count, since_ms = count_awaiting_opinion(connection, is_appeal=is_appeal, most=_MAX_COUNTED)
        if count:
            deadline_ms = since_ms + 1000 * params.opinion_s + _GRACE_MS
            yield Wait("appeal" if is_appeal else "opinion", "the queue", goal, since_ms, deadline_ms, _count(count))


def _count(number: int) -> str:
    return f"{number} or more" if number == _MAX_COUNTED else f"{number} of them"


def _describe_step(params: RunParams, step: StepRow) -> StepInfo:
    return build_from(StepInfo, step, needed=params.groups_per_batch, accepted=step.signal, judged=step.delivered)


def _find_step_waits(
    connection: Connection,
    cache: RunCache,
    params: RunParams,
    step: StepRow,
    now_ms: int,
    stage: StepStage,
    *,
    is_stopped: bool,
) -> Iterator[Wait]:
    """What a step is waiting for."""
    lacking = params.groups_per_batch - step.signal
    name = f"step {step.step}"
    version = find_version(connection, max(0, step.step - 1 - params.async_level))
    since_ms = step.opened_ms if version is None else max(step.opened_ms, version.published_ms)
    if lacking == 0 or is_exhausted(params, step.on_their_way, step.next_index):
        whole_ms = max(since_ms, step.delivered_ms, cache.started_ms)
        deadline_ms = whole_ms + 1000 * params.train_s if stage.is_next else 0
        yield Wait("cut", name, "the trainer to assemble the batch", since_ms, deadline_ms)
        return
    if is_stopped:  # nobody is asked for groups
        return
    leases = list_oldest(connection, step.step, _MAX_NAMED)
    holders = "; ".join(_describe_holder(cache, params, lease, now_ms) for lease in leases)
    patience_ms = progress_time(params, list_group_times(connection))
    deadline_ms = max(since_ms, step.delivered_ms) + patience_ms if stage.is_first else 0
    yield Wait("groups", name, f"{lacking} of {params.groups_per_batch} groups", since_ms, deadline_ms, holders)
    if step.offered:
        offered_ms = oldest_offer(connection, step.step)
        deadline_ms = max(offered_ms, cache.started_ms) + patience_ms if stage.is_first else 0
        yield Wait(
            "offer", name, f"a worker to take {count_things(step.offered, 'offered group')}", offered_ms, deadline_ms
        )


def _describe_holder(cache: RunCache, params: RunParams, lease: LeaseRow, now_ms: int) -> str:
    silent_s, left_s = (now_ms - cache.last_seen(lease.node)) // 1000, (lease.deadline_ms - now_ms) // 1000
    silence = f", silent {silent_s} s" if silent_s > params.stale_s else ""
    return f"node {lease.node[:8]} has {lease.lease} for {left_s} s more{silence}"
