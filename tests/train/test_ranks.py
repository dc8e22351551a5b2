"""`shoal train --nproc`: real processes over gloo, stopped, killed, and resumed with other numbers of ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.paths import ROOT, TINY

from shoal.learner.checkpoint import find_newest, read_state
from shoal.policy.model import open_policy
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.train.rank_calls import decode_groups, encode_groups
from shoal.train.report import read_metrics

PATIENCE_S = 180.0
ENDED_S = 30.0
EXACT = 1e-6


def start(out: Path, nproc: int, *overrides: str, torchrun: bool = False) -> subprocess.Popen[str]:
    """Start a training; `nproc` 0 is a plain process."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    runner = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m", "shoal")
    words = (*runner, "train") if torchrun else ("shoal", "train", *(("--nproc", str(nproc)) if nproc else ()))
    options = (f"out={out}", "threads=1", "checkpoint.every=1", "checkpoint.keep=9", *overrides)
    return subprocess.Popen(
        [sys.executable, "-m", *words, str(TINY), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(out: Path, nproc: int, *overrides: str, torchrun: bool = False) -> str:
    """Train to the end; what was printed."""
    process = start(out, nproc, *overrides, torchrun=torchrun)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, printed
    return printed


def find_weights(out: Path, step: int) -> Path:
    return out / "tiny-seed0" / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"


def measure_difference(one: Path, other: Path) -> float:
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[n].double() - theirs[n].double()).norm() / mine[n].double().norm()) for n in mine)


def wait_until(test: Callable[[], bool], process: subprocess.Popen[str], text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not test():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def has_step(out: Path, step: int) -> bool:
    path = out / "tiny-seed0" / "metrics.jsonl"
    return path.exists() and any(line["step"] >= step for line in read_metrics(path))


def list_ranks(parent: int) -> list[int]:
    """Process ids of the ranks that a process started, by rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = {}
    for child in children:
        names = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((name for name in names if name.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank[5:])] = int(child)
    return [found[rank] for rank in sorted(found)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one plain process, and its SFT."""
    out = tmp_path_factory.mktemp("plain")
    train(out, 0)
    return out


@pytest.fixture
def out(plain: Path, tmp_path: Path) -> Path:
    """A folder for another run that starts from the same weights."""
    shutil.copytree(plain / "sft", tmp_path / "sft")
    return tmp_path


@pytest.fixture(scope="module")
def pair(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of two ranks."""
    out = tmp_path_factory.mktemp("pair")
    shutil.copytree(plain / "sft", out / "sft")
    train(out, 2)
    return out


def test_two_ranks_train_the_weights_of_one_process(plain: Path, pair: Path) -> None:
    assert measure_difference(find_weights(plain, 3), find_weights(pair, 3)) < EXACT
    one, other = (open_policy(find_weights(out, 3).parent).model.config.to_dict() for out in (plain, pair))
    one.pop("_name_or_path"), other.pop("_name_or_path")
    assert one == other


def test_a_run_continues_with_another_number_of_ranks(plain: Path, out: Path) -> None:
    train(out, 2, "steps=1")
    assert (find_weights(out, 1).parents[1] / "optimizer").is_dir()
    train(out, 0, "steps=2")
    assert (find_weights(out, 2).parents[1] / "optimizer.safetensors").is_file()
    assert "resuming after step 2" in train(out, 4, "steps=3", torchrun=True)
    assert measure_difference(find_weights(plain, 3), find_weights(out, 3)) < EXACT


def test_ranks_that_resume_compute_the_same_bits(pair: Path, out: Path) -> None:
    for steps in (2, 3):
        train(out, 2, f"steps={steps}")
    assert find_weights(pair, 3).read_bytes() == find_weights(out, 3).read_bytes()
    for path in (find_weights(pair, 3).parents[1] / "optimizer").iterdir():
        mine, theirs = load_file(path), load_file(find_weights(out, 3).parents[1] / "optimizer" / path.name)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_supervised_fine_tuning_in_ranks_is_that_of_one_process(plain: Path, tmp_path: Path) -> None:
    train(tmp_path, 2, "steps=0")
    (mine,), (theirs,) = (list((root / "sft").glob("*/policy/model.safetensors")) for root in (tmp_path, plain))
    assert measure_difference(theirs, mine) < 1e-5
    assert json.loads((mine.parent / "sft.json").read_text())["heldout_loss"].keys() == {"10", "20", "30"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_resumes(plain: Path, out: Path, rank: int) -> None:
    process = start(out, 2, "steps=500")
    wait_until(lambda: has_step(out, 2), process, "no step")
    ranks = list_ranks(process.pid)
    os.kill(ranks[rank], signal.SIGKILL)
    process.communicate(timeout=ENDED_S)
    assert process.returncode != 0
    assert not any(is_alive(pid) for pid in ranks)
    newest = find_newest(out / "tiny-seed0" / "checkpoints")
    assert newest is not None
    done = read_state(newest).step
    assert f"resuming after step {done}" in train(out, 2, f"steps={done + 1}")
    if done <= 3:
        assert measure_difference(find_weights(plain, done), find_weights(out, done)) < EXACT


def test_a_signal_to_the_parent_ends_all_ranks(out: Path) -> None:
    process = start(out, 2, "steps=500")
    wait_until(lambda: has_step(out, 1), process, "no step")
    ranks = list_ranks(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=ENDED_S)
    assert process.returncode != 0
    assert not any(is_alive(pid) for pid in ranks)


def test_ranks_do_not_outlive_a_killed_parent(out: Path) -> None:
    process = start(out, 2, "steps=500")
    wait_until(lambda: has_step(out, 1), process, "no step")
    ranks = list_ranks(process.pid)
    process.kill()
    process.communicate(timeout=ENDED_S)
    deadline = time.monotonic() + ENDED_S
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_mistake_is_one_sentence_and_exit_code_2(out: Path) -> None:
    process = start(out, 2, "engine.max_tokens=9000")
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert printed.count("shoal: engine.max_tokens") == 1 and "Traceback" not in printed


def test_groups_survive_the_way_to_another_rank() -> None:
    def make(index: int, sizes: tuple[int, ...]) -> Group:
        rng = np.random.default_rng(index)
        rollouts = tuple(
            Rollout(
                id=f"{index}.{n}",
                prompt_ids=rng.integers(0, 99, 3 + index, dtype=np.int32),
                token_ids=rng.integers(0, 99, size, dtype=np.int32),
                logprobs=-rng.random(size, dtype=np.float32),
                finish=Finish.STOP if n else Finish.LENGTH,
                versions=(VersionRange(3, 0, 1), VersionRange(4, 1, size)),
                temperature=0.7,
                seed=2**63 + n,
            )
            for n, size in enumerate(sizes)
        )
        scores = tuple(Score(0.1 * n, "é") for n in range(len(sizes)))
        return Group(index=index, task_id="a\nb", rollouts=rollouts, scores=scores)

    groups = [make(0, (1, 5)), make(4, (2, 3, 4))]
    found = decode_groups(encode_groups(groups))
    assert [(g.index, g.task_id, g.scores) for g in found] == [(g.index, g.task_id, g.scores) for g in groups]
    pairs = zip(*([r for group in part for r in group.rollouts] for part in (found, groups)), strict=True)
    for mine, theirs in pairs:
        for name in ("prompt_ids", "token_ids", "logprobs"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
        names = ("id", "finish", "versions", "temperature", "seed")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
    assert decode_groups(encode_groups([])) == []


def test_adapters_of_two_ranks_are_those_of_one_process_and_resume_there(tmp_path: Path) -> None:
    lora = ("policy.lora.rank=3", "sft.steps=0", "batch.filter=false", "learner.loss.entropy=0.01")
    options = (*lora, "learner.lr=1e-2", "learner.micro_tokens=40")
    train(tmp_path / "one", 0, *options, "steps=3")
    train(tmp_path / "two", 2, *options, "steps=2")
    train(tmp_path / "two", 0, *options, "steps=3")
    for step in (1, 2, 3):
        one, two = (
            find_weights(tmp_path / name, step).with_name("adapter_model.safetensors") for name in ("one", "two")
        )
        assert measure_difference(one, two) < 1e-4
    assert not find_weights(tmp_path / "two", 3).exists()
    bases = [tmp_path / name / "tiny-seed0/checkpoints/v000000/model.safetensors" for name in ("one", "two")]
    assert bases[0].read_bytes() == bases[1].read_bytes()
