"""`shoal train --nproc`: real processes over gloo, stopped, killed, and resumed with other numbers of ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.paths import ROOT, TINY, WIDE

from shoal.learner.checkpoint import find_newest, read_state
from shoal.policy.model import open_policy
from shoal.train.report import read_metrics

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

PATIENCE_S = 180.0
ENDED_S = 30.0
EXACT = 1e-6
PRINTED = "printed.txt"
OPTIONS = ("threads=1", "checkpoint.every=1", "checkpoint.keep=9")


@dataclass(frozen=True)
class Trainer:
    """Trains in a folder."""

    warm: Warm
    out: Path

    def start(self, nproc: int, *overrides: str) -> Running:
        """Start a training; `nproc` 0 is a plain process."""
        self.out.mkdir(exist_ok=True)
        ranks = ("--nproc", nproc) if nproc else ()
        printed = self.out / PRINTED
        printed.unlink(missing_ok=True)
        return self.warm.start("train", *ranks, TINY, f"out={self.out}", *OPTIONS, *overrides, out=printed, err=printed)

    def train(self, nproc: int, *overrides: str) -> str:
        """Train to the end; what was printed."""
        code = self.start(nproc, *overrides).wait(PATIENCE_S)
        assert code == 0, self.read_printed()
        return self.read_printed()

    def train_with_torchrun(self, nproc: int, *overrides: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        runner = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m", "shoal", "train")
        command = [sys.executable, "-m", *runner, str(TINY), f"out={self.out}", *OPTIONS, *overrides]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def read_printed(self) -> str:
        return (self.out / PRINTED).read_text()


def find_weights(out: Path, step: int) -> Path:
    return out / "tiny-seed0" / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"


def measure_difference(one: Path, other: Path) -> float:
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[n].double() - theirs[n].double()).norm() / mine[n].double().norm()) for n in mine)


def wait_for_step(trainer: Trainer, step: int, process: Running) -> list[int]:
    """Wait until a step is done; the process ids of the ranks, by rank."""
    path = trainer.out / "tiny-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and any(line["step"] >= step for line in read_metrics(path))):
        assert process.poll() is None, trainer.read_printed()
        assert time.monotonic() < deadline, trainer.read_printed()
        time.sleep(0.02)
    return sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def plain(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one plain process, and its SFT."""
    trainer = Trainer(warm, tmp_path_factory.mktemp("plain"))
    trainer.train(0)
    return trainer.out


@pytest.fixture
def trainer(warm: Warm, plain: Path, tmp_path: Path) -> Trainer:
    """Another run that starts from the same weights."""
    shutil.copytree(plain / "sft", tmp_path / "sft")
    return Trainer(warm, tmp_path)


@pytest.fixture(scope="module")
def pair(warm: Warm, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of two ranks."""
    trainer = Trainer(warm, tmp_path_factory.mktemp("pair"))
    shutil.copytree(plain / "sft", trainer.out / "sft")
    trainer.train(2)
    return trainer.out


def test_two_ranks_train_the_weights_of_one_process(plain: Path, pair: Path) -> None:
    assert measure_difference(find_weights(plain, 3), find_weights(pair, 3)) < EXACT
    one, other = (open_policy(find_weights(out, 3).parent).model.config.to_dict() for out in (plain, pair))
    one.pop("_name_or_path"), other.pop("_name_or_path")
    assert one == other


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_continues_with_another_number_of_ranks(plain: Path, trainer: Trainer, torchrun: bool) -> None:
    trainer.train(2, "steps=1")
    assert (find_weights(trainer.out, 1).parents[1] / "optimizer").is_dir()
    trainer.train(0, "steps=2")
    assert (find_weights(trainer.out, 2).parents[1] / "optimizer.safetensors").is_file()
    train = trainer.train_with_torchrun if torchrun else trainer.train
    assert "resuming after step 2" in train(3, "steps=3")
    assert measure_difference(find_weights(plain, 3), find_weights(trainer.out, 3)) < EXACT


def test_ranks_that_resume_compute_the_same_bits(pair: Path, trainer: Trainer) -> None:
    for steps in (2, 3):
        trainer.train(2, f"steps={steps}")
    assert find_weights(pair, 3).read_bytes() == find_weights(trainer.out, 3).read_bytes()
    for path in (find_weights(pair, 3).parents[1] / "optimizer").iterdir():
        mine, theirs = load_file(path), load_file(find_weights(trainer.out, 3).parents[1] / "optimizer" / path.name)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_supervised_fine_tuning_in_ranks_is_that_of_one_process(warm: Warm, plain: Path, tmp_path: Path) -> None:
    Trainer(warm, tmp_path).train(2, "steps=0")
    (mine,), (theirs,) = (list((root / "sft").glob("*/policy/model.safetensors")) for root in (tmp_path, plain))
    assert measure_difference(theirs, mine) < 1e-5
    assert json.loads((mine.parent / "sft.json").read_text())["heldout_loss"].keys() == {"10", "20", "30"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_resumes(plain: Path, trainer: Trainer, rank: int) -> None:
    process = trainer.start(2, "steps=500")
    ranks = wait_for_step(trainer, 2, process)
    os.kill(ranks[rank], signal.SIGKILL)
    assert process.wait(ENDED_S) != 0
    assert not any(is_alive(pid) for pid in ranks)
    newest = find_newest(trainer.out / "tiny-seed0" / "checkpoints")
    assert newest is not None
    done = read_state(newest).step
    assert f"resuming after step {done}" in trainer.train(2, f"steps={done + 1}")
    if done <= 3:
        assert measure_difference(find_weights(plain, done), find_weights(trainer.out, done)) < EXACT


def test_a_signal_to_the_parent_ends_all_ranks(trainer: Trainer) -> None:
    process = trainer.start(2, "steps=500")
    ranks = wait_for_step(trainer, 1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(ENDED_S) != 0
    assert not any(is_alive(pid) for pid in ranks)


def test_ranks_do_not_outlive_a_killed_parent(trainer: Trainer) -> None:
    process = trainer.start(2, "steps=500")
    ranks = wait_for_step(trainer, 1, process)
    process.kill()
    process.wait(ENDED_S)
    deadline = time.monotonic() + ENDED_S
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_mistake_is_one_sentence_and_exit_code_2(trainer: Trainer) -> None:
    assert trainer.start(2, "engine.max_tokens=9000").wait(PATIENCE_S) == 2
    printed = trainer.read_printed()
    assert printed.count("shoal: engine.max_tokens") == 1 and "Traceback" not in printed


def test_adapters_of_two_ranks_are_those_of_one_process_and_resume_there(warm: Warm, tmp_path: Path) -> None:
    lora = ("policy.lora.rank=3", "sft.steps=0", "batch.filter=false", "learner.loss.entropy=0.01")
    options = (*lora, "learner.lr=1e-2", "learner.micro_tokens=40")
    one, two = (Trainer(warm, tmp_path / name) for name in ("one", "two"))
    one.train(0, *options, "steps=3")
    two.train(2, *options, "steps=2")
    two.train(0, *options, "steps=3")
    for step in (1, 2, 3):
        adapters = [find_weights(own.out, step).with_name("adapter_model.safetensors") for own in (one, two)]
        assert measure_difference(*adapters) < 1e-4
    assert not find_weights(two.out, 3).exists()
    bases = [own.out / "tiny-seed0/checkpoints/v000000/model.safetensors" for own in (one, two)]
    assert bases[0].read_bytes() == bases[1].read_bytes()


def test_a_swarm_whose_trainer_has_two_ranks_publishes_adapters(warm: Warm, tmp_path: Path) -> None:
    options = ("swarm.trainer_ranks=2", "policy.lora.rank=3", "learner.lr=1e-2", "batch.filter=false", "eval.every=0")
    entropy = "learner.loss.entropy=0.01"  # so that every step has a gradient, whatever the rewards are
    small = ("swarm.calibration=64", "swarm.workers=1", "swarm.validators=1", WIDE)
    printed = tmp_path / PRINTED
    for command in ("prepare", "run"):
        words = (command, TINY, f"out={tmp_path}", *options, entropy, *small)
        assert warm.start(*words, out=printed, err=printed).wait(PATIENCE_S) == 0, printed.read_text()
    assert "the ledger holds" in printed.read_text()
    versions = tmp_path / "tiny-seed0" / "versions"
    assert (versions / "v000000" / "model.safetensors").exists()
    adapters = [load_file(versions / f"v{step:06d}" / "adapter_model.safetensors") for step in (1, 2, 3)]
    assert all(adapters[0].keys() == other.keys() for other in adapters)
    assert not all(torch.equal(adapters[0][name], adapters[2][name]) for name in adapters[0])
    written = [json.loads(line) for line in (versions / "written.jsonl").read_text().splitlines()]
    assert {line["devices"] for line in written} == {"cpu x 2"}
