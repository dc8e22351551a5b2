"""`shoal worker` and `shoal validator`: user mistakes give one-line errors, and a folder is used by one process."""

import logging
import os
import signal
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.train.rundir import lock_dir


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one-line error of a user mistake."""
    assert main([*words, "-q"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("flag", ["--slots", "--memory"])
def test_an_engine_needs_room(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"{flag}: must be 1 or more" in fail(capsys, "worker", "http://127.0.0.1:1", flag, "0")


@pytest.mark.parametrize("command", ["worker", "validator"])
def test_a_descriptor_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "nowhere.json"
    error = fail(capsys, command, str(path), "--folder", str(tmp_path / "node"))
    assert f"{path}: cannot be read (no such file)" in error
    error = fail(capsys, command, str(tmp_path), "--folder", str(tmp_path / "node"))
    assert f"{tmp_path}: is a folder; give the coordinator's address" in error


@pytest.mark.parametrize("command", ["worker", "validator"])
def test_a_coordinator_that_is_away_is_waited_for_until_a_signal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    class Stop(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    waits, stop = logging.getLogger("shoal.util.waits"), Stop()
    waits.addHandler(stop)
    try:
        assert main([command, "http://127.0.0.1:9", "--folder", str(tmp_path / "node"), "-q"]) == 0
    finally:
        waits.removeHandler(stop)
    said, ended = capsys.readouterr().err.splitlines()
    assert "descriptor: no answer from the coordinator: http://127.0.0.1:9: no connection" in said
    assert ended == "shoal: stopped"


@pytest.mark.parametrize("command", ["worker", "validator"])
def test_an_invalid_coordinator_key_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    where = ("http://127.0.0.1:1", "--folder", str(tmp_path / "node"))
    assert "shoal: --coordinator: 'abc': not a public key" in fail(capsys, command, *where, "--coordinator", "abc")


@pytest.mark.parametrize("command", ["worker", "validator"])
def test_two_processes_cannot_be_one_node(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    lock = lock_dir(tmp_path / "node")
    try:
        error = fail(capsys, command, str(tmp_path / "run.json"), "--folder", str(tmp_path / "node"))
    finally:
        os.close(lock)
    assert f"in use by process {os.getpid()}" in error
