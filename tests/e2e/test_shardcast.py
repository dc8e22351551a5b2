"""Origin, relays and clients as the processes that users start: killed, stalled, starved, two at once.

Whatever is done to them, nothing wrong is ever accepted, what was fetched is not fetched again, and honest peers
finish.
"""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.keys import Key

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 90.0
MB = 1_000_000
SIZE = 24 * MB
SLOW = "12MB"
"""A second: a transfer then takes two, which leaves time to be hostile in."""


class Actor:
    """One process of `shoal`, and what it printed."""

    def __init__(self, log: Path, *args: str | Path) -> None:
        self.log = log
        self._args = [str(arg) for arg in args]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal", *self._args],
                env=os.environ | {"PYTHONPATH": str(SOURCE)},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def url(self) -> str:
        """Its address, once it serves."""
        self.await_text("serving run")
        return re.findall(r"serving run \S+ at (http://\S+?)(?:,|$)", self.text, re.MULTILINE)[-1]

    def await_text(self, text: str, times: int = 1) -> None:
        await_true(lambda: self.text.count(text) >= times, f"{text!r} in {self.log.name}")

    def finish(self, code: int = 0) -> str:
        assert self.process.wait(PATIENCE_S) == code, self.text
        return self.text

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(PATIENCE_S)

    def count_sent(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            found = re.search(r"^shoal_sent_bytes_total (\d+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return int(found[1])


class Cast:
    """The actors of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.actors: list[Actor] = []
        key = Key.generate()
        key.save(folder / "key")
        self.publisher = key.public

    def make_checkpoint(self, seed: int, size: int = SIZE) -> Path:
        path = self.folder / f"checkpoint{seed}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(random.Random(seed).randbytes(size))
        (path / "config.json").write_text(f'{{"seed": {seed}}}\n')
        return path

    def origin(self, path: Path, version: int = 1, *flags: str) -> Actor:
        return self._add("origin", "publish", path, "--version", version, "--key", self.folder / "key", *flags)

    def relay(self, name: str, *upstreams: str, flags: tuple[str, ...] = (), data: Path | None = None) -> Actor:
        return self._add(name, "relay", *upstreams, "--publisher", self.publisher, *flags, data=data)

    def pull(self, *sources: str, out: str | Path = "out", flags: tuple[str, ...] = ()) -> Actor:
        target = self.folder / out
        log = self.folder / f"{target.name}.log"
        args = ["pull", *sources, "--publisher", self.publisher, "--run", "test", "--out", str(target), *flags]
        return self._start(log, *args)

    def check_same(self, path: Path, version: int, out: str | Path = "out") -> None:
        found = self.folder / out / f"v{version}"
        assert sorted(file.name for file in found.iterdir()) == sorted(file.name for file in path.iterdir())
        for file in path.iterdir():
            assert (found / file.name).read_bytes() == file.read_bytes()

    def close(self) -> None:
        for actor in self.actors:
            if actor.process.poll() is None:
                actor.process.kill()
                actor.process.wait(PATIENCE_S)

    def _add(self, name: str, command: str, *args: object, data: Path | None = None) -> Actor:
        folder = data or self.folder / name
        common = ["--run", "test", "--data", str(folder), "--listen", "127.0.0.1:0"]
        return self._start(self.folder / f"{name}.log", command, *common, *map(str, args))

    def _start(self, log: Path, *args: str) -> Actor:
        self.actors.append(actor := Actor(log, *args))
        return actor


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(tmp_path)
    try:
        yield cast
    finally:
        cast.close()


def await_true(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def await_bytes(cast: Cast, actor: Actor, count: int) -> None:
    """Until a server has sent so many bytes."""
    await_true(lambda: actor.count_sent() >= count, f"{count} bytes from {actor.log.name}")


def test_a_version_goes_through_a_relay_and_the_next_one_as_a_delta(cast: Cast) -> None:
    first = cast.make_checkpoint(1)
    origin = cast.origin(first)
    relay = cast.relay("relay", origin.url)
    assert str(cast.folder / "out" / "v1") in cast.pull(relay.url).finish()
    cast.check_same(first, 1)
    second = cast.folder / "second"
    shutil.copytree(first, second)
    with (second / "model.safetensors").open("r+b") as file:
        file.seek(5 * MB)
        file.write(b"changed")
    before = origin.count_sent()
    again = cast.origin(second, 2)
    assert "published v2 " in again.finish()
    origin.await_text("published v2")
    cast.pull(relay.url).finish()
    cast.check_same(second, 2)
    assert origin.count_sent() - before < MB, "seven bytes differ"
    for actor in (origin, relay):
        actor.kill(signal.SIGTERM)
        assert "shoal: stopped" in actor.finish()


def test_a_killed_client_goes_on_where_it_was(cast: Cast) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--rate", SLOW, "--shard-size", "1MiB")
    client = cast.pull(origin.url)
    await_bytes(cast, origin, SIZE // 2)
    client.kill()
    assert not (cast.folder / "out" / "v1").exists()
    cast.pull(origin.url).finish()
    cast.check_same(path, 1)
    assert origin.count_sent() < 1.5 * SIZE


def test_a_killed_relay_goes_on_where_it_was_and_its_client_does_not_notice(cast: Cast) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--rate", SLOW, "--shard-size", "1MiB")
    relay = cast.relay("relay", origin.url)
    port = relay.url.rpartition(":")[2]
    client = cast.pull(relay.url)
    await_bytes(cast, origin, SIZE // 2)
    relay.kill()
    # the same port again, where the client knows it
    again = cast.relay("relay", origin.url, flags=("--listen", f"127.0.0.1:{port}"))
    again.await_text("serving run", times=2)
    client.finish()
    cast.check_same(path, 1)
    assert origin.count_sent() < 1.5 * SIZE


def test_an_origin_killed_while_it_publishes_publishes_again(cast: Cast) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--rate", SLOW, "--shard-size", "1MiB")
    port = origin.url.rpartition(":")[2]
    client = cast.pull(origin.url)
    await_bytes(cast, origin, SIZE // 4)
    origin.kill()
    again = cast.origin(path, 1, "--shard-size", "1MiB", "--listen", f"127.0.0.1:{port}")
    client.finish()
    cast.check_same(path, 1)
    assert again.count_sent() < SIZE


@pytest.mark.parametrize("seed", range(3))
def test_processes_killed_at_random_moments_lose_nothing(cast: Cast, seed: int) -> None:
    rng = random.Random(seed)
    path = cast.make_checkpoint(seed, 8 * MB)
    ports = [find_port(), find_port()]
    origin = cast.origin(path, 1, "--rate", "16MB", "--shard-size", "256KiB", "--listen", f"127.0.0.1:{ports[0]}")
    relay = cast.relay("relay", f"http://127.0.0.1:{ports[0]}", flags=("--listen", f"127.0.0.1:{ports[1]}"))
    client = cast.pull(f"http://127.0.0.1:{ports[1]}", flags=("--follow",))
    actors = [origin, relay, client]
    for _ in range(6):
        time.sleep(rng.uniform(0.05, 0.6))
        victim = rng.choice(actors)
        victim.kill()
        victim.start()
    await_true((cast.folder / "out" / "v1").is_dir, f"version with seed {seed}")
    cast.check_same(path, 1)
    for actor in actors:
        assert "Traceback" not in actor.text


def test_a_stalled_relay_does_not_hold_up_a_client_that_has_another(cast: Cast) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--shard-size", "1MiB")
    relays = [cast.relay(f"relay{index}", origin.url, flags=("--rate", SLOW)) for index in range(2)]
    client = cast.pull(*(relay.url for relay in relays))
    await_bytes(cast, relays[0], SIZE // 8)
    relays[0].kill(signal.SIGSTOP)
    try:
        client.finish()
    finally:
        relays[0].kill(signal.SIGCONT)
    cast.check_same(path, 1)


def test_idle_sockets_by_the_thousand_do_not_keep_an_honest_client_waiting(cast: Cast) -> None:
    path = cast.make_checkpoint(1, 4 * MB)
    origin = cast.origin(path)
    host, port = origin.url.removeprefix("http://").split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with contextlib.ExitStack() as stack:
        for index in range(2000):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            if index % 2:
                with contextlib.suppress(OSError):  # pushed out already
                    sock.send(b"GET /v")
        cast.pull(origin.url).finish()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    cast.check_same(path, 1)


def test_twenty_clients_on_one_host_all_finish(cast: Cast) -> None:
    path = cast.make_checkpoint(1, 2 * MB)
    origin = cast.origin(path)
    relay = cast.relay("relay", origin.url)
    origin.await_text("published v1")
    relay.await_text("serving run")
    for turn in range(4):
        clients = [cast.pull(relay.url, origin.url, out=f"out{turn}-{index}") for index in range(5)]
        for index, client in enumerate(clients):
            client.finish()
            cast.check_same(path, 1, f"out{turn}-{index}")


def test_two_clients_in_one_folder_are_one_too_many(cast: Cast) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--rate", SLOW)
    first = cast.pull(origin.url)
    await_true((cast.folder / "out" / ".shardcast" / "store.lock").exists, "lock")
    second = Actor(cast.folder / "second.log", "pull", origin.url, "--publisher", cast.publisher, "--run", "test",
                   "--out", cast.folder / "out")  # fmt: skip
    assert "in use by process" in second.finish(2) and second.text.count("\n") == 1
    first.finish()
    cast.check_same(path, 1)


def test_a_version_published_anew_while_it_is_fetched_arrives_as_the_new_one(cast: Cast) -> None:
    old, new = cast.make_checkpoint(1), cast.make_checkpoint(2)
    origin = cast.origin(old, 1, "--rate", SLOW, "--shard-size", "1MiB")
    client = cast.pull(origin.url)
    await_bytes(cast, origin, SIZE // 4)
    cast.origin(new, 1, "--shard-size", "1MiB").finish()
    client.finish()
    cast.check_same(new, 1)


def test_a_version_that_was_deleted_is_not_waited_for(cast: Cast) -> None:
    origin = cast.origin(cast.make_checkpoint(1, MB), 1, "--keep", "1")
    origin.await_text("published v1")
    cast.origin(cast.make_checkpoint(2, MB), 2).finish()
    text = cast.pull(origin.url, flags=("--version", "1")).finish(2)
    assert "shoal: version 1: " in text and "Traceback" not in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with room for half a version."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "shoal-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=120m", disk], check=True)


def test_a_client_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(cast: Cast, small_disk: Path) -> None:
    path = cast.make_checkpoint(1)
    origin = cast.origin(path, 1, "--shard-size", "1MiB")
    text = cast.pull(origin.url, out=small_disk / "out").finish(1)
    assert "cannot be written (No space left on device)" in text and "Traceback" not in text
    assert not (small_disk / "out" / "v1").exists()
    grow(small_disk)
    cast.pull(origin.url, out=small_disk / "out").finish()
    cast.check_same(path, 1, small_disk / "out")


def test_a_relay_whose_disk_is_full_serves_what_it_has_and_goes_on_later(cast: Cast, small_disk: Path) -> None:
    small, large = cast.make_checkpoint(1, 4 * MB), cast.make_checkpoint(2)
    origin = cast.origin(small)
    relay = cast.relay("relay", origin.url, data=small_disk / "relay")
    cast.pull(relay.url).finish()
    cast.origin(large, 2).finish()
    relay.await_text("No space left on device")
    client = cast.pull(relay.url, origin.url)
    client.finish()
    cast.check_same(large, 2)
    assert relay.process.poll() is None and "Traceback" not in relay.text


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
