"""The trainer's loop with a swarm in a folder: the bits of `shoal train`, however it is stopped."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_swarm import (
    STEPS,
    CrashError,
    FakeSwarm,
    Life,
    assert_whole,
    hash_state,
    make_config,
    run_life,
    train_reference,
)

from shoal.errors import TrainerError
from shoal.learner.checkpoint import list_checkpoints
from shoal.protocol.params import hash_batch
from shoal.train.report import read_metrics
from shoal.trainer.evaluator import Evaluator, read_evals
from shoal.util.files import hash_file

EVALUATED = ("eval/pass_at_1", "eval/greedy")


def test_a_trainer_computes_what_shoal_train_does(tmp_path: Path, swarm: FakeSwarm) -> None:
    life = run_life(make_config(tmp_path), swarm)
    assert_whole(life.run.path, swarm)


def test_a_trainer_computes_what_shoal_train_does_with_older_rollouts(tmp_path: Path, lagging: Path) -> None:
    swarm = FakeSwarm(tmp_path / "swarm", lagging)
    life = run_life(make_config(tmp_path, "async_level=1"), swarm)
    assert_whole(life.run.path, swarm)
    lags = [line["off_policy/lag_max"] for line in read_metrics(life.run.metrics_path)]
    assert lags == [0, 1, 1, 1]


LORA = ("policy.lora.rank=2", "learner.lr=1e-2", "learner.loss.kl=0.01")


@pytest.mark.parametrize("crash", ["", "before hand-over", "after announcement"])
def test_adapters_are_those_of_shoal_train(tmp_path: Path, crash: str) -> None:
    """Versions after v0 are adapters, v0 is kept as their base, and the evaluator opens both."""
    swarm = FakeSwarm(tmp_path / "swarm", train_reference(make_config(tmp_path / "reference", *LORA)))
    swarm.crash, swarm.served_keep = crash, 1
    config = make_config(tmp_path, *LORA)
    if crash:
        with pytest.raises(CrashError):
            run_life(config, swarm)
    life = run_life(config, swarm)
    assert_whole(life.run.path, swarm)
    folders = {path.name: sorted(file.name for file in path.iterdir()) for path in life.versions.folder.glob("v*")}
    assert "model.safetensors" in folders.pop("v000000")
    assert folders[f"v{STEPS:06d}"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(files == folders[f"v{STEPS:06d}"] for files in folders.values())
    evaluator = Evaluator(config, life.run.path)
    while not evaluator.is_done:
        assert evaluator.evaluate_next() is not None
    theirs = {line["step"]: line for line in read_metrics(swarm.reference / "metrics.jsonl") if "eval/greedy" in line}
    for line in read_evals(life.run.path):
        assert {name: line[name] for name in EVALUATED} == {name: theirs[line["step"]][name] for name in EVALUATED}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_end(tmp_path: Path, steps: int) -> None:
    swarm = FakeSwarm(tmp_path / "swarm", train_reference(make_config(tmp_path / "reference", f"steps={steps}")))
    life = run_life(make_config(tmp_path, f"steps={steps}"), swarm)
    assert hash_state(life.run.path) == hash_state(swarm.reference)
    assert len(swarm.announced) == steps + 1


def test_metrics_are_those_of_shoal_train_and_more(tmp_path: Path, swarm: FakeSwarm) -> None:
    run = run_life(make_config(tmp_path), swarm).run.path
    lines = read_metrics(run / "metrics.jsonl")
    theirs = [line for line in read_metrics(swarm.reference / "metrics.jsonl") if "train/tokens" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    missing = {"batch/drawn", "batch/all_right", "batch/all_wrong", "batch/surplus", "perf/sample_s"}
    assert theirs[0].keys() - lines[0].keys() == missing
    assert {"perf/wait_s", "perf/write_s", "off_policy/lag_max", "batch/left_out"} <= lines[0].keys()
    for mine, other in zip(lines, theirs, strict=True):
        assert mine["batch/groups"] == other["batch/groups"]
        assert mine["train/tokens"] == other["train/tokens"] == mine["train/generated_tokens"]
    names = [sorted(path.name for path in (folder / "rollouts").iterdir()) for folder in (run, swarm.reference)]
    assert names[0] == names[1]
    for name in names[0]:
        assert hash_file(run / "rollouts" / name) == hash_file(swarm.reference / "rollouts" / name)


def test_an_empty_batch_moves_nothing_and_is_a_step_all_the_same(tmp_path: Path) -> None:
    # One token is never three letters: no group has a signal, and the bound on sampling is reached.
    dull = ["steps=2", "engine.max_tokens=1", "tasks.options.min_length=3", "eval.tasks=3"]
    swarm = FakeSwarm(tmp_path / "swarm", train_reference(make_config(tmp_path / "reference", *dull)))
    assert [batch.groups for batch in swarm.batches.values()] == [(), ()]
    run = run_life(make_config(tmp_path, *dull), swarm).run.path
    assert hash_state(run) == hash_state(swarm.reference)
    weights = [hash_file(run / "versions" / f"v{version:06d}" / "model.safetensors") for version in (0, 2)]
    assert weights[0] == weights[1]
    assert len(swarm.announced) == 3
    assert "step 2: only 0 of 4 groups have a learning signal" in (run / "log.txt").read_text()
    assert all("nonfinite" not in line and line["batch/groups"] == 0 for line in read_metrics(run / "metrics.jsonl"))


def test_a_trainer_that_is_stopped_saves_where_it_is_and_goes_on_from_there(tmp_path: Path, swarm: FakeSwarm) -> None:
    config = make_config(tmp_path, "checkpoint.every=100")

    async def stop_after(step: int) -> Life:
        life = Life(config, swarm)
        record = life.trainer._record

        def stop(*args: Any) -> None:
            record(*args)
            if life.trainer.step == step:
                life.stopping.set()

        life.trainer._record = stop  # type: ignore[method-assign]
        await life.go()
        return life

    life = asyncio.run(stop_after(2))
    assert life.trainer.step == 2
    assert [step for step, _ in list_checkpoints(life.run.checkpoints_path)] == [0, 2]
    assert len(swarm.announced) == 3
    assert_whole(run_life(config, swarm).run.path, swarm)


def test_a_trainer_that_waits_for_a_batch_stops_at_once(tmp_path: Path, swarm: FakeSwarm) -> None:
    async def check() -> None:
        life = Life(make_config(tmp_path), swarm)
        del swarm.batches[3]
        swarm.async_level = -10  # nothing opens
        going = asyncio.create_task(life.go())
        while life.waits.longest() is None or life.waits.longest().name != "batch":  # type: ignore[union-attr]
            assert not going.done(), going.exception()
            await asyncio.sleep(0.01)
        life.stopping.set()
        await going
        assert life.trainer.step == 0

    asyncio.run(check())


def test_a_trainer_that_is_stopped_while_it_waits_saves_its_newest_step(tmp_path: Path, swarm: FakeSwarm) -> None:
    config = make_config(tmp_path, "checkpoint.every=100")
    batch = swarm.batches.pop(3)

    async def stop() -> Life:
        life = Life(config, swarm)
        going = asyncio.create_task(life.go())
        while not (life.trainer.step == 2 and life.waits.longest() is not None):
            assert not going.done(), going.exception()
            await asyncio.sleep(0.01)
        assert [step for step, _ in list_checkpoints(life.run.checkpoints_path)] == [0]
        life.stopping.set()
        await going
        return life

    life = asyncio.run(stop())
    assert [step for step, _ in list_checkpoints(life.run.checkpoints_path)] == [0, 2]
    swarm.batches[3] = batch
    assert_whole(run_life(config, swarm).run.path, swarm)


def test_a_trainer_that_is_stopped_while_the_origin_is_away_ends(
    tmp_path: Path, swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.trainer.publish.LEAVE_S", 0.1)
    config = make_config(tmp_path)
    hand_over = swarm.hand_over

    async def go() -> None:
        life = Life(config, swarm)

        async def stay_away(path: Path, version: int) -> Any:
            if version == STEPS:
                life.stopping.set()
                await asyncio.Event().wait()
            return await hand_over(path, version)

        swarm.hand_over = stay_away  # type: ignore[method-assign]
        await life.go()

    asyncio.run(go())
    assert [line["version"] for line in swarm.announced] == list(range(STEPS))
    swarm.hand_over = hand_over  # type: ignore[method-assign]
    assert_whole(run_life(config, swarm).run.path, swarm)


def test_the_next_batch_is_read_while_a_step_is_trained(tmp_path: Path, lagging: Path) -> None:
    swarm = FakeSwarm(tmp_path / "swarm", lagging)
    seen: list[int] = []

    async def check() -> None:
        life = Life(make_config(tmp_path, "async_level=1"), swarm)
        loop, train = asyncio.get_running_loop(), life.trainer._state.learner.train_step

        def train_watched(groups: Any) -> Any:
            # Runs in the trainer's thread; the loop continues, and reads batch n + 1 while this one waits for it.
            step, looks = life.trainer.step + 2, 3000
            while step <= STEPS and not asyncio.run_coroutine_threadsafe(has_read(step), loop).result(60):
                looks -= 1
                assert looks, f"batch {step} is not read while step {step - 1} is trained"
            seen.append(step - 1)
            return train(groups)

        async def has_read(step: int) -> bool:
            await asyncio.sleep(0.01)
            reading = life.trainer._ahead
            return reading is not None and reading[0] == step and reading[1].done()

        life.trainer._state.learner.train_step = train_watched  # type: ignore[method-assign]
        await life.go()

    asyncio.run(check())
    assert seen == [1, 2, 3, 4]


def test_other_weights_under_a_number_that_is_published_end_the_trainer(tmp_path: Path, swarm: FakeSwarm) -> None:
    config = make_config(tmp_path, "checkpoint.every=100")
    swarm.crash = ""
    met = 0

    def die(name: str) -> None:
        nonlocal met
        met += name == "after announcement"
        if met == 3:
            raise CrashError(name)

    swarm.reach = die  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        run_life(config, swarm)
    del swarm.reach
    swarm.batches[1] = swarm.batches[1].model_copy(update={"groups": swarm.batches[1].groups[:1]})
    for record in (tmp_path / "tiny-seed0" / "batches").glob("*.json"):
        record.unlink()
    swarm.batches[1] = swarm.batches[1].model_copy(update={"hash": hash_batch(swarm.batches[1].groups)})
    with pytest.raises(TrainerError, match="v1 was computed again with different weights"):
        run_life(config, swarm)


def test_a_ledger_with_other_hashes_ends_the_trainer(tmp_path: Path, swarm: FakeSwarm) -> None:
    line = {"version": 0, "root": "0" * 64, "manifest": "0" * 64, "batch": ""}
    (swarm.folder / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(TrainerError, match="the coordinator refused v0: published with different hashes"):
        run_life(make_config(tmp_path), swarm)


def test_a_trainer_without_its_folder_computes_the_ledgers_versions_again(
    tmp_path: Path, swarm: FakeSwarm, log
) -> None:
    run_life(make_config(tmp_path / "first"), swarm)
    assert_whole(run_life(make_config(tmp_path / "second"), swarm).run.path, swarm)
    assert "v4 was published: the steps after 0 are repeated from the ledger" in log.messages


def test_versions_go_when_nobody_needs_them(tmp_path: Path, swarm: FakeSwarm) -> None:
    run = run_life(make_config(tmp_path, "eval.every=0"), swarm).run.path
    # v0 and v4 are still to be evaluated, v3 and v4 are served.
    assert sorted(path.name for path in (run / "versions").iterdir() if path.is_dir()) == [
        "v000000",
        "v000003",
        "v000004",
    ]
    assert list((run / "batches" / "files").iterdir()) == []


def test_an_origin_that_lost_its_store_gets_the_newest_version_again(
    tmp_path: Path, swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    run_life(config, swarm)
    hand_over, handed = swarm.hand_over, []

    async def publish_again(path: Path, version: int) -> Any:
        handed.append(version)
        return replace(await hand_over(path, version), manifest="f" * 64)  # the same bytes, signed at another time

    monkeypatch.setattr(swarm, "hand_over", publish_again)
    before = swarm.announced
    run_life(config, swarm)
    assert handed == [STEPS]
    assert swarm.announced == before


def test_versions_that_were_written_and_not_announced_get_out_in_order(tmp_path: Path, lagging: Path) -> None:
    swarm = FakeSwarm(tmp_path / "swarm", lagging)
    config = make_config(tmp_path, "async_level=1")
    hand_over, saved = swarm.hand_over, tmp_path / "tiny-seed0" / "checkpoints" / "step-000002"

    async def die_late(path: Path, version: int) -> Any:
        while version == 1 and not saved.exists():
            await asyncio.sleep(0.01)
        if version == 1:
            raise CrashError("v1 and v2 are written, and neither is out")
        return await hand_over(path, version)

    swarm.hand_over = die_late  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        run_life(config, swarm)
    assert [line["version"] for line in swarm.announced] == [0]
    swarm.hand_over = hand_over  # type: ignore[method-assign]
    assert_whole(run_life(config, swarm).run.path, swarm)
