"""`shoal canary`: user mistakes give one-line errors."""

import inspect
import re
from pathlib import Path

import pytest

from shoal.cli import build_parser, main
from shoal.commands import roles
from shoal.identity.keys import Key
from shoal.redteam.canary import CanarySet

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Key.generate().save(Path("operator.key"))


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one-line error of a user mistake."""
    assert main(["canary", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["seal", NOBODY, "--key", "nowhere.key"], "nowhere.key: cannot be read"),
        (["seal", NOBODY, "--key", "operator.key", "--count", "0"], "--count: must be 1 or more"),
        (["seal", NOBODY, "--key", "operator.key", "--count", "65"], "--count: at most 64"),
        (["plant", NOBODY, "--key", "operator.key", "--attack", "bribe"], "unknown attack; available: adapter"),
        (["plant", NOBODY, "--key", "operator.key", "--wait", "0"], "--wait: must be 1 or more"),
        (["plant", NOBODY, "--key", "operator.key", "--slots", "0"], "--slots: must be 1 or more"),
        (["list"], "canaries: no canaries found"),
    ],
)
def test_mistakes_are_one_line_errors(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert text in fail(capsys, *words)


def test_planting_has_every_flag_that_its_worker_reads() -> None:
    read = set(re.findall(r"\bargs\.([a-z_]+)", inspect.getsource(roles.write_work)))
    args = build_parser().parse_args(["canary", "plant", NOBODY, "--key", "operator.key"])
    assert {"tasks", "slots", "memory"} <= read <= set(vars(args))


def test_the_stock_is_listed_without_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    nest = CanarySet(Path("canaries"), "demo")
    nest.end_sealing(nest.begin_sealing(2))
    with nest.hold_planted() as path:
        pass
    assert main(["canary", "list"]) == 0
    assert capsys.readouterr().out == f"run demo: 1 sealed and unused\n  {path.name}  planted, not revealed\n"
