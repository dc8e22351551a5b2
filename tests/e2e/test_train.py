"""Whole runs of `shoal train`: short ones, killed ones, resumed ones."""

import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.paths import TINY

from shoal.cli import main
from shoal.config.run import load_config
from shoal.learner.checkpoint import find_newest, list_checkpoints, read_state
from shoal.learner.filter import has_signal
from shoal.rollout import Group
from shoal.tasks.registry import load_family
from shoal.tasks.split import Split, split_task
from shoal.train.eval import draw_tasks
from shoal.train.report import read_metrics
from shoal.train.rollout_files import read_groups
from shoal.util.console import PASS_RATE, REWARD, TOKENS_RATE
from shoal.util.files import hash_file

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

PATIENCE_S = 120.0
_tuned: list[Path] = []

Line = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _start(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The SFT that most runs here start from."""
    out = tmp_path_factory.mktemp("start")
    assert main(["train", str(TINY), f"out={out}", "steps=0"]) == 0
    _tuned.append(out / "sft")


def train(out: Path, *overrides: str, cached: bool = True) -> Path:
    """Train in this process and return the run directory; with `cached`, a new run finds its SFT done."""
    if cached and not (out / "tiny-seed0").exists() and not (out / "sft").exists():
        shutil.copytree(_tuned[-1], out / "sft")
    assert main(["train", str(TINY), f"out={out}", *overrides]) == 0
    return out / "tiny-seed0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the settings of the file; tests only read it."""
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    """The stderr of such a command."""
    return tmp_path / "errors"


def await_step(process: Running, errors: Path, run: Path, step: int) -> None:
    """Wait until the metrics of a step exist."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and any(line["step"] >= step for line in read_metrics(metrics)):
            return
        if (code := process.poll()) is not None:
            pytest.fail(f"ended with {code}: {errors.read_text()}")
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no step {step} within {PATIENCE_S} s")


def hash_weights(run: Path) -> str:
    checkpoint = find_newest(run / "checkpoints")
    assert checkpoint is not None
    return read_state(checkpoint).sha256["policy/model.safetensors"]


def list_results(run: Path) -> list[Line]:
    """The metrics without values that differ between computations of the same numbers."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: line[name] for name in line if name != "time" and "perf/" not in name} for line in lines]


def list_steps(run: Path, metric: str) -> list[int]:
    return [line["step"] for line in list_results(run) if metric in line]


def read_rollouts(run: Path) -> list[Group]:
    return [group for file in sorted((run / "rollouts").iterdir()) for group in read_groups(file)]


def assert_same_run(one: Path, other: Path, *, evaluations: bool = True) -> None:
    """Equal weights, rollouts and metrics, including those of evaluations if they were made at the same steps."""
    assert hash_weights(one) == hash_weights(other)
    mine, theirs = ([line for line in list_results(run) if evaluations or REWARD in line] for run in (one, other))
    assert mine == theirs
    names = [sorted(file.name for file in (run / "rollouts").iterdir()) for run in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        assert hash_file(one / "rollouts" / name) == hash_file(other / "rollouts" / name)


@pytest.mark.parametrize(
    ("steps", "level"), [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]
)
def test_a_short_run_ends_and_leaves_all_its_parts(tmp_path: Path, steps: int, level: int) -> None:
    run = train(tmp_path, f"steps={steps}", f"async_level={level}")
    assert load_config(run / "config.toml") == load_config(
        TINY, [f"out={tmp_path}", f"steps={steps}", f"async_level={level}"]
    )
    assert (tmp_path / "latest").resolve() == run.resolve()
    assert f"{steps} steps" in (run / "report.md").read_text()
    assert f"eval at step {steps}" in (run / "log.txt").read_text()
    assert list_checkpoints(run / "checkpoints")[-1][0] == steps
    assert [file.name for file in sorted((run / "rollouts").iterdir())] == [
        f"step-{step:06d}.parquet" for step in range(1, steps + 1)
    ]
    assert list_steps(run, REWARD) == list(range(1, steps + 1))
    assert list_steps(run, PASS_RATE) == sorted({0, steps})
    lags = [line["off_policy/lag"] for line in list_results(run) if REWARD in line]
    assert lags == [min(step - 1, level) for step in range(1, steps + 1)]


def test_the_console_finds_its_figures_among_the_metrics(whole: Path) -> None:
    first, step, *_ = read_metrics(whole / "metrics.jsonl")
    assert PASS_RATE in first
    assert {REWARD, TOKENS_RATE} <= step.keys()


def test_evaluations_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    run = train(tmp_path, "steps=5", "eval.every=2", "checkpoint.every=2", "checkpoint.keep=9")
    assert list_steps(run, PASS_RATE) == [0, 2, 4, 5]
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [0, 2, 4, 5]


def test_a_checkpoint_is_written_after_all_that_is_recorded_of_its_step(tmp_path: Path) -> None:
    run = train(tmp_path, "steps=2", "eval.every=1", "checkpoint.every=1", "checkpoint.keep=9")
    for step, path in list_checkpoints(run / "checkpoints"):
        saved_s = (path / "state.json").stat().st_mtime
        recorded_s = [line["time"] for line in read_metrics(run / "metrics.jsonl") if line["step"] == step]
        assert max(recorded_s) <= saved_s + 0.001  # times in the file are rounded


@pytest.mark.parametrize("level", [0, 2])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, warm: Warm, errors: Path, level: int) -> None:
    killed = tmp_path / "killed" / "tiny-seed0"
    settings = (f"out={tmp_path / 'killed'}", "steps=1000000", f"async_level={level}")
    process = warm.start("train", TINY, *settings, err=errors)
    await_step(process, errors, killed, 4)
    # while it lives, no other process may use the directory
    assert main(["train", str(TINY), f"out={tmp_path / 'killed'}", f"async_level={level}"]) == 2
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = list_checkpoints(killed / "checkpoints")[-1][0]
    assert done >= 2
    settings = (f"steps={done + 3}", f"async_level={level}")
    train(tmp_path / "killed", *settings)
    assert_same_run(killed, train(tmp_path / "whole", *settings))
    assert list_steps(killed, REWARD) == list(range(1, done + 4))


def test_a_run_killed_at_every_kind_of_write_resumes_to_the_same_bits(tmp_path: Path, warm: Warm, errors: Path) -> None:
    args = ["steps=5", "checkpoint.every=1", "async_level=1", "eval.every=2"]
    # each process is killed at its n-th fsync or rename, in SFT, checkpoints, rollouts and metrics; the last survives
    points = [2, 16, 30, 40, 8, 15, 18, 22, 12, 19, 25, 20, 1_000_000]
    command = ["train", TINY, f"out={tmp_path / 'killed'}", *args]
    codes = [warm.start(*command, err=errors, dies_at=point).wait() for point in points]
    assert set(codes) <= {0, -signal.SIGKILL} and codes.count(-signal.SIGKILL) >= 8, errors.read_text()
    assert codes[-1] == 0
    assert_same_run(tmp_path / "killed" / "tiny-seed0", train(tmp_path / "whole", *args))
    hidden = [path for path in (tmp_path / "killed").rglob(".*") if path.name != ".lock"]
    assert hidden == []


def test_more_steps_continue_a_finished_run(tmp_path: Path, whole: Path) -> None:
    train(tmp_path, "steps=1")
    run = train(tmp_path, "steps=3")
    assert_same_run(run, whole, evaluations=False)
    assert list_steps(run, PASS_RATE) == [0, 1, 3]


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = train(tmp_path, "steps=1")
    before = (run / "metrics.jsonl").read_bytes(), hash_weights(run)
    train(tmp_path, "steps=1")
    train(tmp_path, "steps=0")
    assert ((run / "metrics.jsonl").read_bytes(), hash_weights(run)) == before


def test_another_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "steps=1")
    before = hash_weights(run)
    assert main(["train", str(TINY), f"out={tmp_path}", "learner.lr=0.5"]) == 2
    assert "learner.lr = 0.001" in capsys.readouterr().err
    assert hash_weights(run) == before


def test_a_damaged_checkpoint_is_refused_by_name_and_the_earlier_one_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "steps=3")
    whole = hash_weights(run)
    newest = run / "checkpoints" / "step-000003"
    weights = newest / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["train", str(TINY), f"out={tmp_path}"]) == 2
    assert f"shoal: {weights}: does not match its hash; remove {newest}" in capsys.readouterr().err
    shutil.rmtree(newest)
    train(tmp_path, "steps=3")
    assert hash_weights(run) == whole


def test_a_resumed_run_needs_no_sft(tmp_path: Path, whole: Path) -> None:
    train(tmp_path, "steps=1")
    shutil.rmtree(tmp_path / "sft")
    run = train(tmp_path)
    assert not (tmp_path / "sft").exists()
    assert_same_run(run, whole, evaluations=False)


def test_a_resumed_run_with_a_kl_term_finds_its_reference_again(tmp_path: Path) -> None:
    settings = ["learner.loss.kl=0.1", "learner.loss.entropy=0.01"]
    train(tmp_path / "a", "steps=2", *settings)
    shutil.rmtree(tmp_path / "a" / "sft")
    train(tmp_path / "a", "steps=3", *settings)
    whole = train(tmp_path / "b", "steps=3", *settings)
    assert_same_run(tmp_path / "a" / "tiny-seed0", whole, evaluations=False)
    assert list_results(whole)[-2]["loss/kl"] > 0


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path, whole: Path) -> None:
    assert_same_run(whole, train(tmp_path / "b", cached=False))
    assert main(["train", str(TINY), f"out={tmp_path}", "seed=1"]) == 0
    assert hash_weights(tmp_path / "tiny-seed1") != hash_weights(whole)


@pytest.mark.parametrize("slots", [3, 64])
def test_the_number_of_slots_does_not_change_a_bit(tmp_path: Path, whole: Path, slots: int) -> None:
    assert_same_run(whole, train(tmp_path, f"engine.slots={slots}"))


def test_held_out_tasks_are_never_trained(tmp_path: Path) -> None:
    run = train(tmp_path, "batch.filter=false", "batch.groups=16")
    config = load_config(run / "config.toml")
    trained = {group.task_id for group in read_rollouts(run)}
    family = load_family(config.tasks.name, config.tasks.options)
    every_task = [family.make_task(random.Random(seed)) for seed in range(10_000)]
    split = {task.id: split_task(task) for task in every_task}
    assert set(split.values()) == {Split.TRAIN, Split.HELDOUT}
    assert len(trained) > 20
    assert {split[name] for name in trained} == {Split.TRAIN}
    assert not trained & {task.id for task in draw_tasks(family, config)}


def test_with_the_filter_every_trained_group_has_signal(whole: Path) -> None:
    groups = read_rollouts(whole)
    assert groups and all(has_signal(group.rewards) for group in groups)
    lines = [line for line in list_results(whole) if REWARD in line]
    assert len(groups) == sum(line["batch/groups"] for line in lines)
    for line in lines:
        without = line["batch/all_right"] + line["batch/all_wrong"]
        assert line["batch/drawn"] == line["batch/groups"] + line["batch/surplus"] + without


def test_without_the_filter_the_first_groups_are_trained(tmp_path: Path) -> None:
    run = train(tmp_path, "batch.filter=false", "steps=2")
    assert [group.index for group in read_rollouts(run)] == [0, 1, 2, 3] * 2
    assert not all(has_signal(group.rewards) for group in read_rollouts(run))


def test_no_trained_rollout_is_older_than_the_async_level_allows(tmp_path: Path) -> None:
    run = train(tmp_path, "async_level=1", "steps=4")
    for step in range(1, 5):
        groups = read_groups(run / "rollouts" / f"step-{step:06d}.parquet")
        assert {rollout.version for group in groups for rollout in group.rollouts} == {max(0, step - 2)}


def test_a_task_without_any_signal_ends_properly(tmp_path: Path) -> None:
    # one token is never three letters
    run = train(tmp_path, "steps=2", "engine.max_tokens=1", "tasks.options.min_length=3", "eval.tasks=3")
    start_weights = hash_file(run / "checkpoints" / "step-000000" / "policy" / "model.safetensors")
    assert hash_weights(run) == start_weights
    for line in list_results(run):
        assert "nonfinite" not in line
        assert None not in line.values()
        if REWARD in line:
            assert (line[REWARD], line["batch/groups"], line["batch/drawn"]) == (0, 0, 16)
            assert line["optim/updates"] == 0
    assert read_rollouts(run) == []
    assert "step 2: only 0 of 4 groups have a learning signal" in (run / "log.txt").read_text()


def test_training_raises_the_reward(tmp_path: Path) -> None:
    easier = ["tasks.options.max_length=2", "tasks.options.letters=8", "eval.tasks=4", "sft.heldout=4"]
    run = train(tmp_path, "steps=30", "learner.lr=3e-3", "batch.groups=8", "rollouts=false", *easier)
    rewards = [line[REWARD] for line in list_results(run) if REWARD in line]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert list((run / "rollouts").iterdir()) == []


def test_too_few_held_out_tasks_are_reported_before_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), f"out={tmp_path}", "eval.tasks=5000"]) == 2
    message = "eval.tasks: is 5000, but reverse has only 38 different held-out tasks with these tasks.options"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sft").exists()


def test_an_interrupt_exits_with_130_and_the_run_resumes(tmp_path: Path, warm: Warm, errors: Path) -> None:
    run = tmp_path / "a" / "tiny-seed0"
    process = warm.start("train", TINY, f"out={tmp_path / 'a'}", "steps=1000000", err=errors)
    await_step(process, errors, run, 3)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert errors.read_text().endswith("\nshoal: interrupted; the same command resumes from the last checkpoint\n")
    steps = f"steps={list_checkpoints(run / 'checkpoints')[-1][0] + 1}"
    train(tmp_path / "a", steps)
    assert_same_run(run, train(tmp_path / "b", steps))


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path, warm: Warm, errors: Path) -> None:
    run = train(tmp_path / "a", "steps=2")
    before = hash_weights(run)
    limit = (run / "checkpoints" / "step-000002" / "optimizer.safetensors").stat().st_size - 1
    process = warm.start("train", TINY, f"out={tmp_path / 'a'}", "steps=4", err=errors, max_bytes=limit)
    assert process.wait() == 1
    said = errors.read_text().splitlines()
    assert said[-1].startswith(f"shoal: {run}: cannot be written (File too large); ")
    assert all(" train " in line for line in said[:-1]), "log lines while it trains, and one error"
    assert (list_checkpoints(run / "checkpoints")[-1][0], hash_weights(run)) == (2, before)
    train(tmp_path / "a", "steps=4")
    assert_same_run(run, train(tmp_path / "b", "steps=4"), evaluations=False)
