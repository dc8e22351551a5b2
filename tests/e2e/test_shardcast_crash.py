"""Origin, relays and clients that are killed (SIGKILL), stopped, or run out of disk space.

Fetched data is not fetched again, nothing incomplete is ever visible, failures give one-line errors, and honest peers
finish.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

MB = 1_000_000
SIZE = 6 * MB
SLOW = ("--rate", "3MB", "--shard-size", "256KiB")
"""Makes transfers long enough to interfere with."""
HOLE = 256 * MB
LARGE = 12 * MB
"""Twice the size of the small disk."""
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Disk:
    """A small separate disk."""

    folder: Path

    def grow(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=120m", self.folder], check=True)

    def fill(self, spare_bytes: int) -> None:
        """Leave only that much free space."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        os.truncate(ballast, ballast.stat().st_size // PAGE * PAGE - spare_bytes)


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """With room for half a version. A test requests it before its processes, which end before the disk is removed."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "shoal-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@dataclass
class CrashedOrigin:
    """A relay and its clients after their origin died in the middle of a publish."""

    first: Path
    version: int
    address: str
    relay: Any
    follower: Any
    second: Path | None = None
    """the final version"""


@pytest.fixture(scope="module")
def crashed_origin(shared_processes: Any, wait_until: Callable[..., None]) -> CrashedOrigin:
    """Created by the first test of the file and used by later ones: it takes a while until a version is given up."""
    first = shared_processes.make_checkpoint("v1", MB)
    origin = shared_processes.origin(first)
    relay = shared_processes.relay("relay", origin.url)
    address = origin.address
    relay.await_complete(1)
    follower = shared_processes.pull(relay.url, out="follower", flags=("--follow",))
    follower.await_text(str(shared_processes.data / "follower" / "v1"))
    version = kill_mid_publish(shared_processes, origin, wait_until)
    return CrashedOrigin(first, version, address, relay, follower)


def kill_mid_publish(shared_processes: Any, origin: Any, wait_until: Callable[..., None]) -> int:
    """Hand a version over and kill the origin after its head has reached a relay, before its end; returns the version.

    If it was published before this process got its turn, the next one is larger.
    """
    for version in range(2, 6):
        path = shared_processes.make_checkpoint(f"hole{version}", HOLE << (version - 2), holes=True)
        asking = shared_processes.hand_over(path, version)
        wait_until(partial(has_head, shared_processes.data / "relay", version), lambda: "head at the relay")
        origin.kill()
        (manifest,) = (shared_processes.data / "origin").glob(f"v{version}-*/manifest.ndjson")
        if '"kind":"end"' not in manifest.read_text():
            assert "exited before publishing" in asking.fail(2)
            return version
        asking.finish()
        origin.start()
    pytest.fail("every version was published before its origin could be killed")


def has_head(data: Path, version: int) -> bool:
    return any(data.glob(f"v{version}-*/manifest.ndjson"))


def test_an_origin_can_be_killed_in_the_middle_of_a_publish(crashed_origin: CrashedOrigin) -> None:
    assert crashed_origin.version >= 2 and crashed_origin.relay.process.poll() is None


def test_a_relay_and_a_client_killed_at_once_go_on_where_they_were(processes: Any) -> None:
    path = processes.make_checkpoint("v1", SIZE)
    origin = processes.origin(path, 1, *SLOW)
    relay = processes.relay("relay", origin.url)
    client = processes.pull(relay.url)
    relay.await_sent(SIZE // 3)
    for child in (relay, client):
        child.kill()
    assert not (processes.data / "out" / "v1").exists()
    for child in (relay, client):
        child.start()
    client.finish()
    processes.check_same(path, 1)
    assert origin.sent_bytes < 1.5 * SIZE and relay.sent_bytes < SIZE


def test_an_origin_killed_while_it_sends_goes_on_where_its_clients_know_it(processes: Any) -> None:
    path = processes.make_checkpoint("v1", SIZE)
    origin = processes.origin(path, 1, *SLOW)
    client = processes.pull(origin.url)
    origin.await_sent(SIZE // 3)
    origin.kill()
    origin.start("--rate", "1GB")
    client.finish()
    processes.check_same(path, 1)
    assert origin.sent_bytes < SIZE


@pytest.mark.parametrize("seed", range(2))
def test_processes_killed_at_random_moments_lose_nothing(
    seed: int, processes: Any, wait_until: Callable[..., None]
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    first = processes.make_checkpoint("v1", 4 * MB)
    second = processes.change_bytes(first, "v2", MB, b"changed")
    flags = ("--rate", "8MB", "--shard-size", "256KiB")
    origin = processes.origin(first, 1, *flags)
    flags += ("--listen", origin.address)
    relay = processes.relay("relay", f"http://{origin.address}")
    client = processes.pull(f"http://{relay.address}", flags=("--follow",))
    children = [origin, relay, client]
    for turn in range(6):
        time.sleep(rng.uniform(0.05, 0.6))
        if turn == 3:
            origin.kill()
            children[0] = processes.origin(second, 2, *flags, name="next")
        victim = rng.choice(children)
        victim.kill()
        victim.start()
    wait_until((processes.data / "out" / "v2").is_dir, lambda: f"version with seed {seed}:\n{client.log.read_text()}")
    processes.check_same(second, 2)


def test_a_stalled_relay_does_not_hold_up_a_client_that_has_another(processes: Any) -> None:
    path = processes.make_checkpoint("v1", SIZE)
    origin = processes.origin(path, 1, "--shard-size", "256KiB")
    relays = [processes.relay(f"relay{index}", origin.url, flags=("--rate", "3MB")) for index in range(2)]
    client = processes.pull(*(relay.url for relay in relays))
    relays[0].await_sent(SIZE // 8)
    relays[0].kill(signal.SIGSTOP)
    client.finish()
    processes.check_same(path, 1)


def test_late_joiners_get_the_newest_version_that_can_be_finished(
    crashed_origin: CrashedOrigin, shared_processes: Any, wait_until: Callable[..., None]
) -> None:
    wait_until(
        lambda: len(crashed_origin.relay.ask("/versions").splitlines()) == 1,
        lambda: "relay that lists only what it can serve",
    )
    sources = {
        "late": [crashed_origin.relay.url],
        "later": [crashed_origin.relay.url, f"http://{crashed_origin.address}"],
    }
    clients = {out: shared_processes.pull(*urls, out=out) for out, urls in sources.items()}
    for out, client in clients.items():
        client.finish()
        shared_processes.check_same(crashed_origin.first, 1, out)


def test_a_version_that_had_no_end_arrives_once_it_is_published_again(
    crashed_origin: CrashedOrigin, shared_processes: Any
) -> None:
    crashed_origin.second = shared_processes.make_checkpoint("v2", 2 * MB)
    again = shared_processes.origin(
        crashed_origin.second, crashed_origin.version, "--listen", crashed_origin.address, name="again"
    )
    again.await_text(f"published v{crashed_origin.version}")
    crashed_origin.relay.kill()  # otherwise it would wait before looking for its origin
    crashed_origin.relay.start()
    crashed_origin.relay.await_complete(crashed_origin.version)
    shared_processes.pull(crashed_origin.relay.url, out="late", name="late-again").finish()
    shared_processes.check_same(crashed_origin.second, crashed_origin.version, "late")


def test_a_client_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(disk: Disk, processes: Any) -> None:
    path = processes.make_checkpoint("v1", LARGE)
    origin = processes.origin(path, 1, "--shard-size", "1MiB")
    client = processes.pull(origin.url, out=disk.folder / "out")
    assert "cannot be written (No space left on device)" in client.fail(1)
    assert not (disk.folder / "out" / "v1").exists()
    disk.grow()
    client.start()
    client.finish()
    processes.check_same(path, 1, disk.folder / "out")


def test_a_relay_whose_disk_is_full_serves_what_it_has_and_goes_on_later(disk: Disk, processes: Any) -> None:
    small, large = processes.make_checkpoint("v1", 2 * MB), processes.make_checkpoint("v2", LARGE)
    origin = processes.origin(small)
    relay = processes.relay("relay", origin.url, data=disk.folder / "relay")
    relay.await_complete(1)
    processes.hand_over(large, 2).finish()
    relay.await_text("No space left on device")
    clients = [
        processes.pull(relay.url, origin.url, out="both"),
        processes.pull(relay.url, out="first", flags=("--version", "1")),
    ]
    clients[0].finish()
    processes.check_same(large, 2, "both")
    clients[1].finish()
    processes.check_same(small, 1, "first")
    assert relay.process.poll() is None
    disk.grow()
    relay.kill()
    relay.start()
    relay.await_complete(2)
    processes.pull(relay.url, out="below").finish()
    processes.check_same(large, 2, "below")


def test_a_relay_and_a_client_that_may_write_only_small_files_say_so(processes: Any) -> None:
    # As above, for machines on which no disk can be mounted: a limit on the file size.
    small, large = processes.make_checkpoint("v1", 2 * MB), processes.make_checkpoint("v2", LARGE)
    origin = processes.origin(small)
    relay = processes.relay("relay", origin.url, limit=LARGE // 2)
    relay.await_complete(1)
    processes.hand_over(large, 2).finish()
    relay.await_text("File too large")
    limited = processes.pull(relay.url, origin.url, name="limited", limit=LARGE // 2)
    old = processes.pull(relay.url, out="old", flags=("--version", "1"))
    assert "cannot be written (File too large)" in limited.fail(1)
    assert not (processes.data / "out" / "v2").exists()
    processes.pull(relay.url, origin.url).finish()
    processes.check_same(large, 2)
    old.finish()
    processes.check_same(small, 1, "old")
    assert relay.process.poll() is None


def test_an_origin_whose_publish_fails_for_a_full_disk_goes_on_serving(disk: Disk, processes: Any) -> None:
    first, second = processes.make_checkpoint("v1", MB), processes.make_checkpoint("v2", MB)
    origin = processes.origin(first, 1, data=disk.folder / "origin")
    origin.await_text("published v1")
    disk.fill(spare_bytes=PAGE)  # a version needs two pages; the link and its log line need none
    asking = processes.hand_over(second, 2, data=disk.folder / "origin")
    assert "No space left on device" in asking.fail(1)
    check_still_serving(processes, origin, first)
    disk.grow()
    asking.start()
    assert "published v2" in asking.finish()
    processes.pull(origin.url, name="later").finish()
    processes.check_same(second, 2)


def test_an_origin_that_may_write_only_small_files_goes_on_serving(processes: Any) -> None:
    first, second = processes.make_checkpoint("v1", MB), processes.make_checkpoint("v2", LARGE)
    origin = processes.origin(
        first, 1, "--shard-size", "64KiB", limit=8192
    )  # smaller than the hashes of the second version
    origin.await_text("published v1")
    assert "File too large" in processes.hand_over(second, 2).fail(1)
    check_still_serving(processes, origin, first)


def check_still_serving(processes: Any, origin: Any, path: Path) -> None:
    """The origin is alive and serves its first version; the second one does not exist anywhere."""
    processes.pull(origin.url, name="client").finish()
    processes.check_same(path, 1)
    assert origin.process.poll() is None
    assert len(origin.ask("/versions").splitlines()) == 1


def test_who_was_waiting_for_a_version_without_end_has_it_too(
    crashed_origin: CrashedOrigin, shared_processes: Any
) -> None:
    crashed_origin.follower.await_text(str(shared_processes.data / "follower" / f"v{crashed_origin.version}"))
    assert crashed_origin.second is not None, "published by an earlier test"
    shared_processes.check_same(crashed_origin.second, crashed_origin.version, "follower")
