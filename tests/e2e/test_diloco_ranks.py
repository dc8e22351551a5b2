"""A DiLoCo site whose model is sharded over ranks computes what a site of one process does, and resumes as one."""

import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.diloco.test_site import serve_run
from tests.diloco.test_train import SMALL

from shoal.config.run import build_config
from shoal.diloco.settings import DilocoConfig
from shoal.learner.checkpoint import find_newest

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

EXACT = 1e-6
WORDS = (*SMALL, "steps=18", "fragments=2", "rules.codec=fp32")
"""without rounding in the codec: a code that a rounding error tips over would hide how close the steps are"""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def join(warm: Warm, book: Path, out: Path, url: str, *more: object) -> Running:
    out.mkdir(exist_ok=True)
    words = ("diloco", "join", url, f"data.source={book}", f"out={out}", *WORDS, "threads=1", *more)
    return warm.start(*words, out=out / "printed.txt", err=out / "printed.txt")


def train(warm: Warm, book: Path, out: Path, *more: object) -> dict[str, torch.Tensor]:
    """Train as the only site of a run, to its end; the trained weights."""
    config = build_config(DilocoConfig, {}, [f"data.source={book}", f"out={out}", *WORDS])
    with serve_run(config, out / "reducer") as (_, url, reducer):
        code = join(warm, book, out, url, "--reducer", reducer, *more).wait()
        assert code == 0, (out / "printed.txt").read_text()
    return load_file(out / "diloco-site0" / "policy" / "model.safetensors")


def measure_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).norm() / one[n].double().norm()) for n in one)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_train_the_weights_of_one_process(warm: Warm, book: Path, tmp_path: Path, nproc: int) -> None:
    """Three ranks share four rows unevenly."""
    alone = train(warm, book, tmp_path / "alone")
    assert measure_difference(alone, train(warm, book, tmp_path / "ranks", "--nproc", nproc)) < EXACT
    other = train(warm, book, tmp_path / "other", "data.batch=3")
    assert measure_difference(alone, other) > 1e-3


def test_a_killed_site_resumes_with_another_number_of_ranks(warm: Warm, book: Path, tmp_path: Path) -> None:
    """Its optimizer comes from its disk, in the form that the ranks wrote; the rest from the run."""
    out, words = tmp_path / "ranks", ("save_every=1", "steps=24")
    config = build_config(DilocoConfig, {}, [f"data.source={book}", f"out={out}", *WORDS, *words])
    with serve_run(config, out / "reducer") as (_, url, reducer):
        for nproc in (2, 0):
            before = find_newest(out / "diloco-site0" / "checkpoints")
            ranks = ("--nproc", nproc) if nproc else ()
            site = join(warm, book, out, url, "--reducer", reducer, *words, *ranks)
            while (newest := find_newest(out / "diloco-site0" / "checkpoints")) in (None, before):
                assert site.poll() is None, (out / "printed.txt").read_text()
                time.sleep(0.01)
            site.kill()
            site.wait()
            (saved,) = (newest / "peers").iterdir()
            assert (saved / "optimizer").is_dir() == bool(nproc)
            assert (saved / "optimizer.safetensors").is_file() == (not nproc)
        assert join(warm, book, out, url, "--reducer", reducer, *words, "--nproc", 2).wait() == 0
    assert (out / "printed.txt").read_text().count("resuming at step") == 2
    assert (out / "diloco-site0" / "policy" / "model.safetensors").exists()
