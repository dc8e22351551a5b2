"""Batches and versions: what a step trains on, and what opens when it is trained.

v0 opens steps 1 .. 1 + k;   batch n is cut once;   v{n} trains step n and opens step n + 1 + k, if the run has one
"""

from shoal.swarm.callers import require_trainer
from shoal.swarm.ending import end_lease
from shoal.swarm.event import Kind
from shoal.swarm.messages import (
    Batch,
    BatchAnswer,
    Message,
    Number,
    SignedVersion,
    VersionAnswer,
    VersionStatement,
)
from shoal.swarm.refusal import AuthError
from shoal.swarm.rules.age import is_allowed, open_steps
from shoal.swarm.rules.batch import hash_batch, is_exhausted
from shoal.swarm.state.leases import list_active, list_on_step
from shoal.swarm.state.spans import list_batch, list_entries
from shoal.swarm.state.steps import StepRow, find_step, find_version, newest_version
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn
from shoal.swarm.watching import watch_owners

_RETRY_S = 2


class BatchRecord(Message):
    """Body of a batch's document."""

    run: str
    step: Number
    hash: str
    groups: Number
    time_ms: Number


def cut_batch(turn: Turn, *, node: str, step: int) -> BatchAnswer:
    """Fix what a step trains on; the second call gets the same batch."""
    require_trainer(turn, node)
    row = _find_step(turn, step)
    if isinstance(row, BatchAnswer):
        return row
    if row.state != "open":
        return _answer_batch(turn, row)
    params = turn.params
    entries = list_entries(turn.connection, step, params.groups_per_batch)
    if len(entries) < params.groups_per_batch and not is_exhausted(params, row.on_their_way, row.next_index):
        return _refuse_batch(f"step {step} has {len(entries)} of {params.groups_per_batch} groups with a signal")
    assert all(is_allowed(step, entry.version, params.async_level) for entry in entries), (
        "no group older than the bound"
    )
    turn.append(Kind.BATCH_CUT, f"step-{step}", {"groups": len(entries), "hash": hash_batch(entries), "step": step})
    for lease in list_on_step(turn.connection, step):
        end_lease(turn, lease, "cancelled", f"the batch of step {step} is complete")
    watch_owners(turn)
    cut = find_step(turn.connection, step)
    assert cut is not None, "it was cut"
    return _answer_batch(turn, cut)


def show_batch(turn: Turn, *, node: str, step: int) -> BatchAnswer:
    """A batch that was cut."""
    require_trainer(turn, node)
    row = _find_step(turn, step)
    if isinstance(row, BatchAnswer):
        return row
    return _refuse_batch(f"the batch of step {step} is not cut") if row.state == "open" else _answer_batch(turn, row)


def publish_version(turn: Turn, *, node: str, signed: SignedVersion) -> VersionAnswer:
    """Record a version and open what it opens; the same version again gets the same answer."""
    require_trainer(turn, node)
    said, newest = signed.version, newest_version(turn.connection)
    known = find_version(turn.connection, said.version)
    if known is not None:
        if (known.root, known.manifest, known.batch) != (said.root, said.manifest, said.batch):
            raise AuthError(409, "published", f"v{said.version} was published with other hashes")
        return _answer_version(turn, said.version)
    if said.version != newest + 1:
        raise AuthError(409, "version_order", f"the next version is v{newest + 1}")
    statement = turn.open_message(node, said, signed.signature)
    _check_batch(turn, said)
    turn.record(statement)
    _open_steps(turn, said.version)
    return _answer_version(turn, said.version)


def _find_step(turn: Turn, step: int) -> StepRow | BatchAnswer:
    if not 1 <= step <= turn.params.steps:
        raise AuthError(404, "unknown_step", f"this run has steps 1 to {turn.params.steps}")
    return find_step(turn.connection, step) or _refuse_batch(f"step {step} is not open yet")


def _check_batch(turn: Turn, said: VersionStatement) -> None:
    """Refuse a version that was not trained on its batch."""
    if said.version == 0:
        if said.batch:
            raise AuthError(400, "batch", "v0 is trained on no batch")
        return
    step = find_step(turn.connection, said.version)
    if step is None or step.state != "cut":
        raise AuthError(
            409, "not_cut", f"the batch of step {said.version} is not cut; cut it, train on it, then publish"
        )
    if step.batch != said.batch:
        raise AuthError(409, "other_batch", f"not the batch that was cut for step {said.version}")


def _open_steps(turn: Turn, trained: int) -> None:
    params = turn.params
    for step in open_steps(trained, params.async_level, params.steps):
        if find_step(turn.connection, step) is None:
            turn.append(Kind.STEP_OPEN, f"step-{step}", {"beacon": turn.setting.chain.reveal_step(step), "step": step})
    if trained == params.steps:
        for lease in list_active(turn.connection):
            end_lease(turn, lease, "cancelled", "the run is finished")
        turn.append(Kind.ADMIN, "", {"action": "finish", "secret": turn.setting.chain.reveal_secret()})


def _answer_batch(turn: Turn, row: StepRow) -> BatchAnswer:
    entries = list_batch(turn.connection, row.step)
    batch = Batch(run=turn.run, step=row.step, hash=row.batch, groups=tuple(entries))
    record = BatchRecord(run=turn.run, step=row.step, hash=row.batch, groups=len(entries), time_ms=row.cut_ms)
    return BatchAnswer(batch=batch, document=turn.sign(Tag.BATCH, record))


def _refuse_batch(reason: str) -> BatchAnswer:
    return BatchAnswer(batch=None, reason=reason, retry_after_s=_RETRY_S)


def _answer_version(turn: Turn, version: int) -> VersionAnswer:
    """What the version opened, whatever was cut or trained since."""
    params = turn.params
    steps = tuple(open_steps(version, params.async_level, params.steps))
    return VersionAnswer(version=version, open_steps=steps, finished=version >= params.steps)
