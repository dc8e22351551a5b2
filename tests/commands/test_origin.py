"""`shoal weights publish` as real processes: what an origin serves, what is handed over to it, and what it survives."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.identity.keys import Key
from shoal.shardcast.store.lock import LOCK

PATIENCE_S = 30.0


class Shell:
    """Runs `shoal` commands in a folder, and stops those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = Key.generate()
        self.key.save(folder / "key")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, name: str, *args: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "shoal", *args]
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, text=True)
        self._started.append(process)
        return process

    def publish(self, name: str, version: int, *flags: str, path: str | None = None) -> subprocess.Popen[str]:
        return self.start(name, "weights", "publish", *self.prepare(version, path), *flags)

    def prepare(self, version: int, path: str | None = None) -> list[str]:
        """Files of a version, unless there are any, and the arguments to publish it."""
        folder = self.folder / (path or f"c{version}")
        folder.mkdir(exist_ok=True)
        if not list(folder.iterdir()):
            (folder / "w").write_bytes(bytes(range(256)) * 400 + b"%d" % version)
        return [folder.name, "--version", str(version), "--run", "demo", "--key", "key", "--data", "data"]

    def serve(self, *flags: str) -> subprocess.Popen[str]:
        """An origin that has published its first version."""
        process = self.publish("origin", 1, "--listen", "127.0.0.1:0", *flags)
        self.wait_text("origin", "published v1")
        return process

    def finish(self, process: subprocess.Popen[str]) -> int:
        return process.wait(PATIENCE_S)

    def read(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_text(self, name: str, text: str) -> None:
        self.wait_true(lambda: text in self.read(name), f"{text!r} of {name}")

    def wait_true(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited for {what}"
            time.sleep(0.01)

    def list_requests(self) -> list[Path]:
        return list((self.folder / "data" / "versions").glob("*"))

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    yield opened
    opened.close()


def test_a_version_is_handed_over_with_the_command_that_started_the_origin(shell: Shell) -> None:
    flags = ("--keep", "3", "--shard-size", "64KiB", "--rate", "100MB")
    origin = shell.serve(*flags)
    asker = shell.publish("second", 2, "--listen", "127.0.0.1:0", *flags)
    assert shell.finish(asker) == 0
    assert re.search(r"^published v2 [0-9a-f]{64}$", shell.read("second"), re.MULTILINE)
    shell.wait_text("origin", "published v2")
    assert shell.finish(shell.publish("third", 3)) == 0, "defaults are not compared"
    origin.send_signal(signal.SIGTERM)
    assert shell.finish(origin) == 0 and "Traceback" not in shell.read("origin")


def test_a_flag_that_the_origin_would_ignore_is_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.serve()
    monkeypatch.chdir(shell.folder)
    for flags in (
        ("--keep", "4"),
        ("--shard-size", "1MiB"),
        ("--anchor-every", "2"),
        ("--listen", "127.0.0.1:9"),
        ("--rate", "1MB"),
        ("--peer-rate", "1MB"),
        ("--tickets",),
        ("--behind-proxy",),
    ):
        assert main(["weights", "publish", *shell.prepare(2), *flags]) == 2
        expected = f"shoal: {flags[0]}: the origin serving this folder was started with a different value"
        assert expected in capsys.readouterr().err
    assert shell.finish(shell.publish("third", 3)) == 0
    assert "published v2" not in shell.read("origin")


def limit_files(process: subprocess.Popen[str], num_bytes: int) -> None:
    """Limit the size of files that a process can write, which looks like a full disk to it."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_a_failed_publish_is_answered_and_the_origin_continues(shell: Shell) -> None:
    origin = shell.serve()
    (shell.folder / "bad" / "sub").mkdir(parents=True)
    assert shell.finish(shell.publish("second", 2, path="bad")) == 2
    assert "bad/sub: subfolders cannot be published" in shell.read("second")
    limit_files(origin, 900)  # enough for a log line, not for a manifest
    assert shell.finish(shell.publish("third", 3)) == 1
    assert "c3: not published (File too large)" in shell.read("third")
    limit_files(origin, 1)
    assert shell.finish(shell.publish("fourth", 4)) == 1
    assert "data: the origin could not record the result; see its log for the reason" in shell.read("fourth")
    limit_files(origin, resource.RLIM_INFINITY)
    assert shell.finish(shell.publish("fifth", 5)) == 0 and origin.poll() is None


def test_a_disk_without_room_for_a_delta_still_gets_the_version_out(shell: Shell) -> None:
    origin = shell.serve("--shard-size", "64KiB")
    half = os.urandom(200_000)
    for version in (2, 3):
        (shell.folder / f"c{version}").mkdir()
        (shell.folder / f"c{version}" / "w").write_bytes(half + os.urandom(200_000))
    assert shell.finish(shell.publish("second", 2)) == 0
    limit_files(origin, 50_000)
    assert shell.finish(shell.publish("third", 3)) == 0
    shell.wait_text("origin", "published v3")
    assert "version 3 has no delta: no room for it" in shell.read("origin") and origin.poll() is None


def test_the_folder_of_a_relay_is_refused(shell: Shell) -> None:
    args = ("--publisher", shell.key.public, "--run", "demo", "--data", "data", "--listen", "127.0.0.1:0")
    relay = shell.start("relay", "relay", "http://127.0.0.1:9", *args)
    shell.wait_text("relay", "serving run demo")
    assert shell.finish(shell.publish("second", 2)) == 2
    expected = f"shoal: data: in use by process {relay.pid} (relay), which cannot publish; choose another folder\n"
    assert shell.read("second") == expected


def test_an_interrupted_hand_over_is_withdrawn_and_has_its_own_exit_code(shell: Shell) -> None:
    origin = shell.serve()
    origin.send_signal(signal.SIGSTOP)
    asker = shell.publish("second", 2)
    shell.wait_true(shell.list_requests, "a request")
    time.sleep(0.2)
    asker.send_signal(signal.SIGINT)
    assert shell.finish(asker) == 130 and shell.read("second").endswith("shoal: stopped\n")
    assert shell.list_requests() == []
    origin.send_signal(signal.SIGCONT)
    assert shell.finish(shell.publish("third", 3)) == 0
    assert "published v2" not in shell.read("origin")


def test_an_origin_interrupted_before_it_published_has_its_own_exit_code(shell: Shell) -> None:
    folder = shell.folder / "c1"
    folder.mkdir()
    with (folder / "w").open("wb") as file:
        file.truncate(20 << 30)  # sparse: takes time to read, but no disk space
    origin = shell.publish("origin", 1, "--listen", "127.0.0.1:0")
    shell.wait_true(lambda: list((shell.folder / "data").glob("v1-*")), "a head")
    origin.send_signal(signal.SIGINT)
    assert shell.finish(origin) == 130


def test_what_was_asked_of_an_origin_that_was_killed_is_not_carried_out_by_the_next(shell: Shell) -> None:
    origin = shell.serve()
    origin.send_signal(signal.SIGSTOP)
    asker = shell.publish("second", 2)
    shell.wait_true(shell.list_requests, "a request")
    asker.kill()
    asker.wait()
    origin.kill()
    origin.wait()
    assert shell.list_requests()
    shell.publish("again", 3, "--listen", "127.0.0.1:0")
    shell.wait_text("again", "published v3")
    assert shell.finish(shell.publish("fourth", 4)) == 0
    assert "published v2" not in shell.read("again") and shell.list_requests() == []


def test_a_lock_file_full_of_garbage_is_no_traceback(shell: Shell) -> None:
    (shell.folder / "data").mkdir()
    (shell.folder / "data" / LOCK).write_bytes(os.urandom(100))
    origin = shell.serve()
    (shell.folder / "data" / LOCK).write_bytes(b"garbage")
    assert shell.finish(shell.publish("second", 2)) == 2
    assert "data: in use by another process, which cannot publish" in shell.read("second")
    assert origin.poll() is None
