"""`shoal worker` and `shoal validator`: user mistakes give one-line errors, and a folder is used by one process."""

import logging
import os
import signal
import subprocess
import sys
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
def test_a_missing_key_is_named_whether_or_not_the_coordinator_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    key, folder = tmp_path / "owner.key", tmp_path / "node"
    error = fail(capsys, command, "http://127.0.0.1:1", "--owner", str(key), "--folder", str(folder))
    assert f"{key}: cannot be read" in error and not folder.exists()


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
    assert f"in use by process {os.getpid()}; wait for it or choose another --folder" in error


def test_a_folder_in_use_is_reported_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from shoal.cli import main; from shoal.train.rundir import lock_dir\n"
        "lock = lock_dir(Path('node')); code = main(['worker', 'http://127.0.0.1:1', '--folder', 'node', '-q'])\n"
        "print(code, 'torch' in sys.modules, 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [b"2", b"False", b"False"], done.stderr


def test_a_task_set_that_is_not_there_is_reported_before_the_coordinator_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("http://127.0.0.1:1", "--folder", str(tmp_path / "node"))
    assert "nosuch.jsonl: cannot be read" in fail(capsys, "worker", *where, "--tasks", str(tmp_path / "nosuch.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_first_start_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fail(capsys, "worker", str(tmp_path / "nowhere.json"), "--folder", str(tmp_path / "node"))
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_scheme_is_not_taken_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["worker", "ftp://127.0.0.1:9"])
    assert end.value.code == 2
    assert "unknown scheme ftp://; expected http:// or https://" in capsys.readouterr().err
