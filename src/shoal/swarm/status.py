"""The run at a glance: open steps, the queue, who waits for whom in words, and what is wrong."""

from collections.abc import Iterator

from sqlalchemy import Connection

from shoal.swarm.messages import LeaderLine, Standing, Status, StepInfo
from shoal.swarm.mirror import Mirror
from shoal.swarm.params import RunParams
from shoal.swarm.rules.batch import is_exhausted
from shoal.swarm.state.credit import last_caught, list_missed
from shoal.swarm.state.leases import LeaseRow, list_on_step
from shoal.swarm.state.nodes import list_owners
from shoal.swarm.state.queue import count_queued, oldest_queued
from shoal.swarm.state.run import read_run
from shoal.swarm.state.spans import count_groups, oldest_offer
from shoal.swarm.state.steps import StepRow, find_version, list_steps, newest_version
from shoal.swarm.turn import Setting
from shoal.swarm.waits import Wait, WaitBook

_MAX_NAMED = 8
"""leases that are named in a sentence"""


def build_status(connection: Connection, setting: Setting, book: WaitBook, now_ms: int) -> Status:
    """The run as it is on disk."""
    state, mirror = read_run(connection), setting.mirror
    params, newest = state.params, newest_version(connection)
    live, stale, gone = mirror.count_alive(now_ms)
    waits = [*find_waits(connection, mirror, params, now_ms), *mirror.list_waits(now_ms), *book.list_waits()]
    described = [wait.describe(now_ms) for wait in waits]
    overdue = [f"overdue: {info.text}" for info in described if info.overdue]
    return Status(
        run=setting.run,
        server_time_ms=now_ms,
        finished=newest >= params.steps,
        stopped=state.stopped,
        steps=params.steps,
        trained=max(0, newest),
        newest_version=newest,
        open_steps=tuple(_describe_step(connection, params, step) for step in list_steps(connection, "open")),
        queue=count_queued(connection),
        nodes_live=live,
        nodes_stale=stale,
        nodes_gone=gone,
        waits=tuple(described),
        alarms=(*find_alarms(connection, params, now_ms, mirror.started_ms), *overdue),
    )


def find_waits(connection: Connection, mirror: Mirror, params: RunParams, now_ms: int) -> Iterator[Wait]:
    """What the run waits for."""
    newest = newest_version(connection)
    if newest >= params.steps:
        return
    if newest < 0:
        yield Wait("first version", "the run", "its trainer to publish v0", mirror.started_ms or now_ms)
        return
    for step in list_steps(connection, "open"):
        yield from _find_step_waits(connection, mirror, params, step, now_ms)
    for step in list_steps(connection, "cut"):
        if step.step == newest + 1:
            yield Wait("training", f"step {step.step}", f"its trainer to publish v{step.step}", step.cut_ms)
    if queued := count_queued(connection):
        since_ms, number = oldest_queued(connection), "1 submission" if queued == 1 else f"{queued} submissions"
        deadline_ms = since_ms + 1000 * params.opinion_s
        yield Wait("validation", "the queue", f"validators to judge {number}", since_ms, deadline_ms)


def find_alarms(connection: Connection, params: RunParams, now_ms: int, started_ms: int) -> Iterator[str]:
    """What an operator must look at."""
    for canary in list_missed(connection):
        yield f"the planted submission {canary.submission} was accepted: punishment does not work, or a validator lies"
    quiet_ms = now_ms - max(last_caught(connection), started_ms)
    if params.canary_every_s and quiet_ms > 1000 * params.canary_every_s:
        yield f"no planted submission was rejected for {quiet_ms // 1000} s"


def read_leaders(connection: Connection, limit: int) -> list[LeaderLine]:
    """Owners by accepted tokens."""
    owners = sorted(list_owners(connection), key=lambda row: (-row.tokens, row.owner))[:limit]
    return [
        LeaderLine(
            owner=row.owner,
            standing=Standing(row.standing),
            accepted=row.accepted,
            rejected=row.rejected,
            tokens=row.tokens,
            earned=row.earned,
        )
        for row in owners
    ]


def _describe_step(connection: Connection, params: RunParams, step: StepRow) -> StepInfo:
    groups = count_groups(connection, step.step)
    return StepInfo(
        step=step.step,
        state=step.state,
        needed=params.groups_per_batch,
        accepted=groups.signal,
        dull=groups.dull,
        leased=groups.leased,
        offered=groups.offered,
        judged=groups.delivered,
    )


def _find_step_waits(
    connection: Connection, mirror: Mirror, params: RunParams, step: StepRow, now_ms: int
) -> Iterator[Wait]:
    groups = count_groups(connection, step.step)
    lacking = params.groups_per_batch - groups.signal
    name = f"step {step.step}"
    version = find_version(connection, max(0, step.step - 1 - params.async_level))
    since_ms = step.opened_ms if version is None else max(step.opened_ms, version.published_ms)
    if lacking == 0 or is_exhausted(params, groups.on_their_way, groups.next_index):
        yield Wait("cut", name, "its trainer to cut the batch", since_ms)
        return
    leases = list_on_step(connection, step.step)
    holders = "; ".join(_describe_holder(mirror, params, lease, now_ms) for lease in leases[:_MAX_NAMED])
    yield Wait("groups", name, f"{lacking} of {params.groups_per_batch} groups", since_ms, detail=holders)
    if groups.offered:
        yield Wait(
            "offer", name, f"a worker to take {groups.offered} offered groups", oldest_offer(connection, step.step)
        )


def _describe_holder(mirror: Mirror, params: RunParams, lease: LeaseRow, now_ms: int) -> str:
    silent_s, left_s = (now_ms - mirror.last_seen(lease.node)) // 1000, (lease.deadline_ms - now_ms) // 1000
    silence = f", silent {silent_s} s" if silent_s > params.stale_s else ""
    return f"node {lease.node[:8]} has {lease.lease} for {left_s} s more{silence}"
