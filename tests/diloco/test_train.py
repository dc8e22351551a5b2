"""`shoal diloco train`: the local engine end to end on a text."""

import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.diloco.settings import DilocoConfig
from shoal.diloco.train import LocalRun, open_folder
from shoal.policy.model import open_policy

SMALL = [
    "steps=24",
    "peers=3",
    "rules.interval=6",
    "data.length=16",
    "data.batch=4",
    "data.held_out=8",
    "data.lanes=8",
    "policy.tiny.width=16",
    "policy.tiny.context=32",
]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat; the dog sat on the log. " * 120)
    return path


def train(book: Path, out: str, *more: str) -> int:
    return main(["diloco", "train", f"data.source={book}", f"out={book.parent / out}", *SMALL, *more])


def read_losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["held_out_loss"]) for line in lines]


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_stopped_run_goes_on_and_ends_as_if_it_never_stopped(
    book: Path, num_fragments: int, capsys: pytest.CaptureFixture[str], log
) -> None:
    fragments = f"fragments={num_fragments}"
    assert train(book, "whole", fragments) == 0
    policy = Path(capsys.readouterr().out.strip())
    open_policy(policy)
    config = DilocoConfig.model_validate(_nest(book, "cut", fragments))
    with open_folder(book.parent / "cut" / "diloco-seed0", config):
        run = LocalRun(config, book.parent / "cut" / "diloco-seed0")
        log.on_message = _stop_at(13)
        with pytest.raises(_StopError):
            run.train()
    log.on_message = lambda text: None
    assert train(book, "cut", fragments) == 0
    assert "resuming at step" in capsys.readouterr().err
    whole, cut = (book.parent / name / "diloco-seed0" for name in ("whole", "cut"))
    assert read_losses(whole) == read_losses(cut)
    weights = [(folder / "policy" / "model.safetensors").read_bytes() for folder in (whole, cut)]
    assert weights[0] == weights[1]
    losses = [loss for _, loss in read_losses(whole)]
    assert losses[-1] < losses[0]


def test_other_settings_for_a_run_that_began_are_refused(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(book, "runs", "steps=6") == 0
    assert train(book, "runs", "steps=6", "inner.lr=0.1") == 2
    assert "inner.lr = 0.003" in capsys.readouterr().err
    assert train(book, "runs", "steps=6", "keep=1") == 0


def test_a_dry_run_prints_the_settings_and_writes_nothing(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(book, "runs", "--dry-run") == 0
    assert "interval = 6" in capsys.readouterr().out
    assert not (book.parent / "runs").exists()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("steps=25", "multiple"),
        ("fragments=9", "rules.interval"),
        ("peers=9", "lanes"),
        ("data.length=99", "context"),
        ("rules.codec=int2", "rules.codec"),
        ("data.source=", "set the text to train on"),
        ("data.source=nowhere.txt", "no such file"),
        ("data.held_out=500", "too few"),
        ("name=../up", "name"),
    ],
)
def test_a_mistake_is_one_sentence(book: Path, flag: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(book, "runs", flag, "-q") == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("shoal: ")


def test_few_rounds_without_a_ramp_are_warned_of(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(book, "runs", "steps=6", "rules.outer.ramp=0") == 0
    assert "WARNING 1 rounds from random weights" in capsys.readouterr().err


class _StopError(Exception):
    pass


def _stop_at(step: int):  # type: ignore[no-untyped-def]
    def note(text: str) -> None:
        if text.startswith("step ") and int(text.split()[1].rstrip(":")) >= step:
            raise _StopError

    return note


def _nest(book: Path, out: str, *more: str) -> dict[str, object]:
    from shoal.config.run import lay_override

    data: dict[str, object] = {}
    for override in (f"data.source={book}", f"out={book.parent / out}", *SMALL, *more):
        lay_override(DilocoConfig, data, override)
    return data
