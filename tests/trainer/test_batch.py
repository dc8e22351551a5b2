"""Which batches a trainer accepts, and which groups it leaves out."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_swarm import FakeSwarm, Life, make_config, run_life

from shoal.errors import TrainerError
from shoal.identity.keys import Key
from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import Batch, BatchEntry
from shoal.protocol.params import hash_batch
from shoal.rollout import Group, VersionRange
from shoal.submission.write import write_submission
from shoal.train.report import read_metrics
from shoal.train.rollout_files import read_groups
from shoal.trainer.batch import GroupSpec, TrainBatch, UnreadableError, pick_group

EXPECTED = GroupSpec(vocab_size=100, context=64, temperature=1.0)


def change_batch(swarm: FakeSwarm, **changes: Any) -> None:
    swarm.batches[1] = swarm.batches[1].model_copy(update=changes)


def reseal(batch: Batch, entries: list[BatchEntry]) -> Batch:
    return batch.model_copy(update={"groups": tuple(entries), "hash": hash_batch(entries)})


def read_first(config: Any, swarm: FakeSwarm) -> TrainBatch:
    async def read() -> TrainBatch:
        life = Life(config, swarm)
        try:
            (swarm.folder / "ledger.jsonl").write_text('{"version": 0}\n')
            return await life.batches.read_batch(1)
        finally:
            life.run.close()

    return asyncio.run(read())


def test_a_batch_is_its_groups_in_order(tmp_path: Path, swarm: FakeSwarm) -> None:
    batch = read_first(make_config(tmp_path), swarm)
    theirs = read_groups(swarm.reference / "rollouts" / "step-000001.parquet")
    assert [group.index for group in batch.groups] == [group.index for group in theirs]
    for mine, other in zip(batch.groups, theirs, strict=True):
        for one, two in zip(mine.rollouts, other.rollouts, strict=True):
            assert np.array_equal(one.token_ids, two.token_ids) and np.array_equal(one.logprobs, two.logprobs)
    record = json.loads((tmp_path / "tiny-seed0" / "batches" / "step-000001.json").read_text())
    assert (record["hash"], record["left_out"]) == (swarm.batches[1].hash, {})


def test_a_batch_of_other_entries_than_its_hash_says_is_not_trained(tmp_path: Path, swarm: FakeSwarm) -> None:
    change_batch(swarm, groups=swarm.batches[1].groups[1:])
    with pytest.raises(TrainerError, match="does not match its hash"):
        read_first(make_config(tmp_path), swarm)


def test_a_batch_out_of_order_is_not_trained(tmp_path: Path, swarm: FakeSwarm) -> None:
    change_batch(swarm, groups=swarm.batches[1].groups[::-1])
    with pytest.raises(TrainerError, match="does not match its hash"):
        read_first(make_config(tmp_path), swarm)


def test_a_batch_of_another_step_is_not_trained(tmp_path: Path, swarm: FakeSwarm) -> None:
    swarm.batches[1] = swarm.batches[2]
    with pytest.raises(TrainerError, match="different batch than that of step 1"):
        read_first(make_config(tmp_path), swarm)


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_with_a_version_outside_the_bound_is_not_trained(
    tmp_path: Path, swarm: FakeSwarm, version: int
) -> None:
    entries = [entry.model_copy(update={"version": version}) for entry in swarm.batches[1].groups]
    swarm.batches[1] = reseal(swarm.batches[1], entries)
    with pytest.raises(TrainerError, match="outside the staleness bound"):
        read_first(make_config(tmp_path), swarm)


def test_a_version_that_is_too_old_is_not_trained(tmp_path: Path, swarm: FakeSwarm) -> None:
    entries = [entry.model_copy(update={"version": 0}) for entry in swarm.batches[2].groups]
    swarm.batches[2] = reseal(swarm.batches[2], entries)
    with pytest.raises(TrainerError, match="of step 2 have versions outside the staleness bound"):
        run_life(make_config(tmp_path), swarm)
    assert len(swarm.announced) <= 2


def test_a_batch_that_another_key_signed_is_not_trained(tmp_path: Path, swarm: FakeSwarm) -> None:
    async def check() -> None:
        life = Life(make_config(tmp_path), swarm)
        swarm.key = Key.generate()
        await life.go()

    with pytest.raises(TrainerError, match="not signed by the coordinator"):
        asyncio.run(check())


def spoil_file(swarm: FakeSwarm, step: int) -> str:
    """Make one file of a batch unreadable; returns its submission."""
    entry = swarm.batches[step].groups[0]
    (swarm.folder / "blobs" / entry.submission).write_bytes(b"nonsense")
    return entry.submission


def test_a_file_that_cannot_be_read_costs_its_own_groups(tmp_path: Path, swarm: FakeSwarm) -> None:
    name = spoil_file(swarm, 1)
    lost = {entry.index for entry in swarm.batches[1].groups if entry.submission == name}
    assert 0 < len(lost) < len(swarm.batches[1].groups)
    batch = read_first(make_config(tmp_path), swarm)
    assert batch.left_out.keys() == lost
    assert {group.index for group in batch.groups} == {entry.index for entry in swarm.batches[1].groups} - lost


def test_groups_left_out_are_reported_and_a_repeated_step_leaves_out_the_same(tmp_path: Path, swarm: FakeSwarm) -> None:
    spoil_file(swarm, 4)
    run = run_life(make_config(tmp_path), swarm).run.path
    assert "is left out: not a Parquet file" in (run / "log.txt").read_text()
    assert read_metrics(run / "metrics.jsonl")[-1]["batch/left_out"] == 2
    record = run / "batches" / "step-000004.json"
    known = json.loads(record.read_text())
    assert len(known["left_out"]) == 2
    record.write_text(json.dumps(known | {"left_out": {}}))
    with pytest.raises(TrainerError, match="groups of step 4 that were readable before are not now"):
        asyncio.run(_read_again(run, swarm))


async def _read_again(run: Path, swarm: FakeSwarm, step: int = 4) -> TrainBatch:
    life = Life(make_config(run.parent), swarm)
    try:
        return await life.batches.read_batch(step)
    finally:
        life.run.close()


@pytest.mark.parametrize(
    "error",
    [
        InvalidDocumentError("other bytes than those of the submission"),
        RefusedError(ApiError(404, "not_found", "no such blob")),
    ],
)
def test_a_file_that_is_lost_costs_its_own_groups_then_and_when_it_is_found(
    tmp_path: Path, swarm: FakeSwarm, error: Exception
) -> None:
    name = swarm.batches[1].groups[0].submission
    swarm.lost[name] = error
    batch = read_first(make_config(tmp_path), swarm)
    lost = {entry.index for entry in swarm.batches[1].groups if entry.submission == name}
    assert batch.left_out.keys() == lost and len(batch.groups) == len(swarm.batches[1].groups) - len(lost)
    swarm.lost.clear()
    again = asyncio.run(_read_again(tmp_path / "tiny-seed0", swarm, 1))
    assert again.left_out == batch.left_out
    assert [group.index for group in again.groups] == [group.index for group in batch.groups]


def test_a_coordinator_that_will_not_give_files_ends_the_trainer(tmp_path: Path, swarm: FakeSwarm) -> None:
    swarm.lost[swarm.batches[1].groups[0].submission] = RefusedError(ApiError(403, "scope", "not a trainer"))
    with pytest.raises(RefusedError, match="not a trainer"):
        read_first(make_config(tmp_path), swarm)


def test_parameters_that_changed_since_the_start_cost_no_group(tmp_path: Path, swarm: FakeSwarm) -> None:
    """The operator may change how many groups a lease has, and how large a file may be, at any time."""
    swarm.params = swarm.params.model_copy(update={"groups_per_lease": 1, "blob_max_bytes": 1})
    assert max(entry.place for entry in swarm.batches[1].groups) == 1, "files of two groups"
    assert read_first(make_config(tmp_path), swarm).left_out == {}


def test_a_ledger_with_another_batch_than_before_ends_the_trainer(tmp_path: Path, swarm: FakeSwarm) -> None:
    config = make_config(tmp_path)
    read_first(config, swarm)
    swarm.batches[1] = reseal(swarm.batches[1], list(swarm.batches[1].groups[:2]))
    with pytest.raises(TrainerError, match="different batch for step 1 than before"):
        read_first(config, swarm)


def change_rollout(group: Group, **changes: Any) -> Group:
    first = replace(group.rollouts[0], **changes)
    return replace(group, rollouts=(first, *group.rollouts[1:]))


def make_long(group: Group, num: int) -> Group:
    tokens, logprobs = np.ones(num, dtype=np.int32), np.zeros(num, dtype=np.float32)
    return change_rollout(group, token_ids=tokens, logprobs=logprobs, versions=(VersionRange(0, 0, num),))


SPOILERS: dict[str, Any] = {
    "group 999 where": lambda group: replace(group, index=999),
    "rollouts of different prompts": lambda group: change_rollout(group, prompt_ids=np.array([1], dtype=np.int32)),
    "different version than v0": lambda group: change_rollout(group, versions=(VersionRange(1, 0, 1),)),
    "unknown target length": lambda group: replace(group, task_id=f"{group.task_id}@7"),
    "prompt and completion of": lambda group: make_long(group, 64),
    "invalid log-prob": lambda group: change_rollout(group, logprobs=group.rollouts[0].logprobs + 50.0),
    "sampled at temperature 0.5": lambda group: change_rollout(group, temperature=0.5),
}


@pytest.mark.parametrize("reason", SPOILERS)
def test_a_group_that_is_not_what_its_entry_says_is_not_picked(reference: Path, reason: str) -> None:
    group = read_groups(reference / "rollouts" / "step-000001.parquet")[0]
    entry = BatchEntry(index=group.index, submission="s1", place=0, version=0, blob="0" * 64)
    assert pick_group([group], entry, EXPECTED) is group
    with pytest.raises(UnreadableError, match=reason):
        pick_group([SPOILERS[reason](group)], entry, EXPECTED)


def test_a_place_beyond_the_file_and_a_prompt_beyond_the_context_are_not_picked(reference: Path) -> None:
    group = read_groups(reference / "rollouts" / "step-000001.parquet")[0]
    entry = BatchEntry(index=group.index, submission="s1", place=1, version=0, blob="0" * 64)
    with pytest.raises(UnreadableError, match="the file has 1 groups"):
        pick_group([group], entry, EXPECTED)
    with pytest.raises(UnreadableError, match="prompt and completion of"):
        pick_group([group], entry.model_copy(update={"place": 0}), replace(EXPECTED, context=2))


def test_a_group_with_a_false_token_is_left_out_though_its_file_can_be_read(tmp_path: Path, swarm: FakeSwarm) -> None:
    entry = swarm.batches[1].groups[0]
    groups = read_groups(swarm.reference / "rollouts" / "step-000001.parquet")[:2]
    spoiled = [change_rollout(groups[0], temperature=2.0), groups[1]]
    proofs: dict[str, tuple[bytes, ...]] = {rollout.id: () for group in spoiled for rollout in group.rollouts}
    write_submission(swarm.folder / "blobs" / entry.submission, spoiled, proofs)
    batch = read_first(make_config(tmp_path), swarm)
    assert batch.left_out == {entry.index: "sampled at temperature 2"}
