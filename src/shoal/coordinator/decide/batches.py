"""Batches and versions: what a step trains on, and which steps open when it is trained.

v0 opens steps 1 .. 1 + k;   batch n is cut once;   v{n} trains step n and opens step n + 1 + k, if the run has one
"""

from shoal.coordinator.decide.context import Decision, require_row, require_trainer
from shoal.coordinator.decide.drift_watch import watch_owners
from shoal.coordinator.decide.leases import end_lease
from shoal.coordinator.state.leases import list_active, list_batch, list_entries, list_on_step
from shoal.coordinator.state.run import StepRow, find_step, find_version, newest_version
from shoal.identity.documents import Tag
from shoal.net.api_error import ApiError
from shoal.protocol.events import BatchCut, RunFinish, StepOpen
from shoal.protocol.messages import Batch, BatchAnswer, Message, Number, SignedVersion, VersionAnswer, VersionStatement
from shoal.protocol.params import hash_batch, is_allowed, is_exhausted, open_steps

_RETRY_S = 2


class BatchRecord(Message):
    """Body of a batch's document."""

    run: str
    step: Number
    hash: str
    groups: Number
    time_ms: Number


def cut_batch(decision: Decision, node: str, step: int) -> BatchAnswer:
    """Fix the batch of a step; later calls get the same batch."""
    require_trainer(decision, node)
    row = _find_step(decision, step)
    if isinstance(row, BatchAnswer):
        return row
    if row.state != "open":
        return _answer_batch(decision, row)
    before = find_step(decision.connection, step - 1)
    if before is not None and before.state == "open":  # its beacon would follow from this one's
        return _refuse_batch(f"the batch of step {step - 1} is not cut; steps are cut in order")
    params = decision.params
    entries = list_entries(decision.connection, step, params.groups_per_batch)
    if len(entries) < params.groups_per_batch and not is_exhausted(params, row.on_their_way, row.next_index):
        return _refuse_batch(f"step {step} has {len(entries)} of {params.groups_per_batch} groups with a signal")
    assert all(is_allowed(step, entry.version, params.async_level) for entry in entries), (
        "all groups are within the async level"
    )
    beacon = decision.context.chain.reveal_step(step)
    decision.append(f"step-{step}", BatchCut(beacon=beacon, groups=len(entries), hash=hash_batch(entries), step=step))
    for lease in list_on_step(decision.connection, step):
        end_lease(decision, lease, "cancelled", f"the batch of step {step} is complete")
    watch_owners(decision)
    cut = require_row(find_step(decision.connection, step), "the batch was cut above")
    return _answer_batch(decision, cut)


def show_batch(decision: Decision, node: str, step: int) -> BatchAnswer:
    """A batch that was cut."""
    require_trainer(decision, node)
    row = _find_step(decision, step)
    if isinstance(row, BatchAnswer):
        return row
    return (
        _refuse_batch(f"the batch of step {step} is not cut") if row.state == "open" else _answer_batch(decision, row)
    )


def publish_version(decision: Decision, node: str, signed: SignedVersion) -> VersionAnswer:
    """Record a version and open the steps that it opens; the same version again gets the same answer."""
    require_trainer(decision, node)
    said, newest = signed.version, newest_version(decision.connection)
    known = find_version(decision.connection, said.version)
    if known is not None:
        if (known.root, known.manifest, known.batch) != (said.root, said.manifest, said.batch):
            raise ApiError(409, "published", f"v{said.version} was published with different hashes")
        return _answer_version(decision, said.version)
    if said.version != newest + 1:
        raise ApiError(409, "version_order", f"the next version is v{newest + 1}")
    statement = decision.open_message(node, said, signed.signature)
    _check_batch(decision, said)
    decision.record(statement)
    _open_steps(decision, said.version)
    return _answer_version(decision, said.version)


def _find_step(decision: Decision, step: int) -> StepRow | BatchAnswer:
    if not 1 <= step <= decision.params.steps:
        raise ApiError(404, "unknown_step", f"no such step: this run has steps 1 to {decision.params.steps}")
    return find_step(decision.connection, step) or _refuse_batch(f"step {step} is not open yet")


def _check_batch(decision: Decision, said: VersionStatement) -> None:
    """Reject a version that was not trained on its batch."""
    if said.version == 0:
        if said.batch:
            raise ApiError(400, "batch", "v0 must not name a batch")
        return
    step = find_step(decision.connection, said.version)
    if step is None or step.state != "cut":
        raise ApiError(
            409, "not_cut", f"the batch of step {said.version} is not cut; cut it and train on it before publishing"
        )
    if step.batch != said.batch:
        raise ApiError(409, "other_batch", f"different batch than was cut for step {said.version}")


def _open_steps(decision: Decision, trained: int) -> None:
    params = decision.params
    for step in open_steps(trained, params.async_level, params.steps):
        if find_step(decision.connection, step) is None:
            decision.append(f"step-{step}", StepOpen(step=step))
    if trained == params.steps:
        for lease in list_active(decision.connection):
            end_lease(decision, lease, "cancelled", "the run is finished")
        decision.append("", RunFinish(secret=decision.context.chain.reveal_secret()))


def _answer_batch(decision: Decision, row: StepRow) -> BatchAnswer:
    entries = list_batch(decision.connection, row.step)
    batch = Batch(run=decision.run, step=row.step, hash=row.batch, groups=tuple(entries))
    record = BatchRecord(run=decision.run, step=row.step, hash=row.batch, groups=len(entries), time_ms=row.cut_ms)
    return BatchAnswer(batch=batch, document=decision.sign(Tag.BATCH, record))


def _refuse_batch(reason: str) -> BatchAnswer:
    return BatchAnswer(batch=None, reason=reason, retry_after_s=_RETRY_S)


def _answer_version(decision: Decision, version: int) -> VersionAnswer:
    """The steps that the version opened, whatever was cut or trained since."""
    params = decision.params
    steps = tuple(open_steps(version, params.async_level, params.steps))
    return VersionAnswer(version=version, open_steps=steps, finished=version >= params.steps)
