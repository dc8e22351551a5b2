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
class Wreck:
    """A relay and its clients after their origin died in the middle of a publish."""

    first: Path
    version: int
    address: str
    relay: Any
    follower: Any
    second: Path | None = None
    """the final version"""


@pytest.fixture(scope="module")
def wreck(stage: Any, wait_until: Callable[..., None]) -> Wreck:
    """Created by the first test of the file and used by later ones: it takes a while until a version is given up."""
    first = stage.make_checkpoint("v1", MB)
    origin = stage.origin(first)
    relay = stage.relay("relay", origin.url)
    address = origin.address
    relay.await_complete(1)
    follower = stage.pull(relay.url, out="follower", flags=("--follow",))
    follower.await_text(str(stage.data / "follower" / "v1"))
    version = kill_mid_publish(stage, origin, wait_until)
    return Wreck(first, version, address, relay, follower)


def kill_mid_publish(stage: Any, origin: Any, wait_until: Callable[..., None]) -> int:
    """Hand a version over and kill the origin after its head has reached a relay, before its end; returns the version.

    If it was published before this process got its turn, the next one is larger.
    """
    for version in range(2, 6):
        path = stage.make_checkpoint(f"hole{version}", HOLE << (version - 2), holes=True)
        asking = stage.hand_over(path, version)
        wait_until(partial(has_head, stage.data / "relay", version), lambda: "head at the relay")
        origin.kill()
        (manifest,) = (stage.data / "origin").glob(f"v{version}-*/manifest.ndjson")
        if '"kind":"end"' not in manifest.read_text():
            assert "exited before publishing" in asking.fail(2)
            return version
        asking.finish()
        origin.start()
    pytest.fail("every version was published before its origin could be killed")


def has_head(data: Path, version: int) -> bool:
    return any(data.glob(f"v{version}-*/manifest.ndjson"))


def test_an_origin_can_be_killed_in_the_middle_of_a_publish(wreck: Wreck) -> None:
    assert wreck.version >= 2 and wreck.relay.process.poll() is None


def test_a_relay_and_a_client_killed_at_once_go_on_where_they_were(cast: Any) -> None:
    path = cast.make_checkpoint("v1", SIZE)
    origin = cast.origin(path, 1, *SLOW)
    relay = cast.relay("relay", origin.url)
    client = cast.pull(relay.url)
    relay.await_sent(SIZE // 3)
    for actor in (relay, client):
        actor.kill()
    assert not (cast.data / "out" / "v1").exists()
    for actor in (relay, client):
        actor.start()
    client.finish()
    cast.check_same(path, 1)
    assert origin.sent_bytes < 1.5 * SIZE and relay.sent_bytes < SIZE


def test_an_origin_killed_while_it_sends_goes_on_where_its_clients_know_it(cast: Any) -> None:
    path = cast.make_checkpoint("v1", SIZE)
    origin = cast.origin(path, 1, *SLOW)
    client = cast.pull(origin.url)
    origin.await_sent(SIZE // 3)
    origin.kill()
    origin.start("--rate", "1GB")
    client.finish()
    cast.check_same(path, 1)
    assert origin.sent_bytes < SIZE


@pytest.mark.parametrize("seed", range(2))
def test_processes_killed_at_random_moments_lose_nothing(seed: int, cast: Any, wait_until: Callable[..., None]) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    first = cast.make_checkpoint("v1", 4 * MB)
    second = cast.change_bytes(first, "v2", MB, b"changed")
    flags = ("--rate", "8MB", "--shard-size", "256KiB")
    origin = cast.origin(first, 1, *flags)
    flags += ("--listen", origin.address)
    relay = cast.relay("relay", f"http://{origin.address}")
    client = cast.pull(f"http://{relay.address}", flags=("--follow",))
    actors = [origin, relay, client]
    for turn in range(6):
        time.sleep(rng.uniform(0.05, 0.6))
        if turn == 3:
            origin.kill()
            actors[0] = cast.origin(second, 2, *flags, name="next")
        victim = rng.choice(actors)
        victim.kill()
        victim.start()
    wait_until((cast.data / "out" / "v2").is_dir, lambda: f"version with seed {seed}:\n{client.log.read_text()}")
    cast.check_same(second, 2)


def test_a_stalled_relay_does_not_hold_up_a_client_that_has_another(cast: Any) -> None:
    path = cast.make_checkpoint("v1", SIZE)
    origin = cast.origin(path, 1, "--shard-size", "256KiB")
    relays = [cast.relay(f"relay{index}", origin.url, flags=("--rate", "3MB")) for index in range(2)]
    client = cast.pull(*(relay.url for relay in relays))
    relays[0].await_sent(SIZE // 8)
    relays[0].kill(signal.SIGSTOP)
    client.finish()
    cast.check_same(path, 1)


def test_late_joiners_get_the_newest_version_that_can_be_finished(
    wreck: Wreck, stage: Any, wait_until: Callable[..., None]
) -> None:
    wait_until(
        lambda: len(wreck.relay.ask("/versions").splitlines()) == 1, lambda: "relay that lists only what it can serve"
    )
    sources = {"late": [wreck.relay.url], "later": [wreck.relay.url, f"http://{wreck.address}"]}
    clients = {out: stage.pull(*urls, out=out) for out, urls in sources.items()}
    for out, client in clients.items():
        client.finish()
        stage.check_same(wreck.first, 1, out)


def test_a_version_that_had_no_end_arrives_once_it_is_published_again(wreck: Wreck, stage: Any) -> None:
    wreck.second = stage.make_checkpoint("v2", 2 * MB)
    again = stage.origin(wreck.second, wreck.version, "--listen", wreck.address, name="again")
    again.await_text(f"published v{wreck.version}")
    wreck.relay.kill()  # otherwise it would wait before looking for its origin
    wreck.relay.start()
    wreck.relay.await_complete(wreck.version)
    stage.pull(wreck.relay.url, out="late", name="late-again").finish()
    stage.check_same(wreck.second, wreck.version, "late")


def test_a_client_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(disk: Disk, cast: Any) -> None:
    path = cast.make_checkpoint("v1", LARGE)
    origin = cast.origin(path, 1, "--shard-size", "1MiB")
    client = cast.pull(origin.url, out=disk.folder / "out")
    assert "cannot be written (No space left on device)" in client.fail(1)
    assert not (disk.folder / "out" / "v1").exists()
    disk.grow()
    client.start()
    client.finish()
    cast.check_same(path, 1, disk.folder / "out")


def test_a_relay_whose_disk_is_full_serves_what_it_has_and_goes_on_later(disk: Disk, cast: Any) -> None:
    small, large = cast.make_checkpoint("v1", 2 * MB), cast.make_checkpoint("v2", LARGE)
    origin = cast.origin(small)
    relay = cast.relay("relay", origin.url, data=disk.folder / "relay")
    relay.await_complete(1)
    cast.hand_over(large, 2).finish()
    relay.await_text("No space left on device")
    clients = [
        cast.pull(relay.url, origin.url, out="both"),
        cast.pull(relay.url, out="first", flags=("--version", "1")),
    ]
    clients[0].finish()
    cast.check_same(large, 2, "both")
    clients[1].finish()
    cast.check_same(small, 1, "first")
    assert relay.process.poll() is None
    disk.grow()
    relay.kill()
    relay.start()
    relay.await_complete(2)
    cast.pull(relay.url, out="below").finish()
    cast.check_same(large, 2, "below")


def test_a_relay_and_a_client_that_may_write_only_small_files_say_so(cast: Any) -> None:
    # As above, for machines on which no disk can be mounted: a limit on the file size.
    small, large = cast.make_checkpoint("v1", 2 * MB), cast.make_checkpoint("v2", LARGE)
    origin = cast.origin(small)
    relay = cast.relay("relay", origin.url, limit=LARGE // 2)
    relay.await_complete(1)
    cast.hand_over(large, 2).finish()
    relay.await_text("File too large")
    limited = cast.pull(relay.url, origin.url, name="limited", limit=LARGE // 2)
    old = cast.pull(relay.url, out="old", flags=("--version", "1"))
    assert "cannot be written (File too large)" in limited.fail(1)
    assert not (cast.data / "out" / "v2").exists()
    cast.pull(relay.url, origin.url).finish()
    cast.check_same(large, 2)
    old.finish()
    cast.check_same(small, 1, "old")
    assert relay.process.poll() is None


def test_an_origin_whose_publish_fails_for_a_full_disk_goes_on_serving(disk: Disk, cast: Any) -> None:
    first, second = cast.make_checkpoint("v1", MB), cast.make_checkpoint("v2", MB)
    origin = cast.origin(first, 1, data=disk.folder / "origin")
    origin.await_text("published v1")
    disk.fill(spare_bytes=PAGE)  # a version needs two pages; the link and its log line need none
    asking = cast.hand_over(second, 2, data=disk.folder / "origin")
    assert "No space left on device" in asking.fail(1)
    check_still_serving(cast, origin, first)
    disk.grow()
    asking.start()
    assert "published v2" in asking.finish()
    cast.pull(origin.url, name="later").finish()
    cast.check_same(second, 2)


def test_an_origin_that_may_write_only_small_files_goes_on_serving(cast: Any) -> None:
    first, second = cast.make_checkpoint("v1", MB), cast.make_checkpoint("v2", LARGE)
    origin = cast.origin(first, 1, "--shard-size", "64KiB", limit=8192)  # smaller than the hashes of the second version
    origin.await_text("published v1")
    assert "File too large" in cast.hand_over(second, 2).fail(1)
    check_still_serving(cast, origin, first)


def check_still_serving(cast: Any, origin: Any, path: Path) -> None:
    """The origin is alive and serves its first version; the second one does not exist anywhere."""
    cast.pull(origin.url, name="client").finish()
    cast.check_same(path, 1)
    assert origin.process.poll() is None
    assert len(origin.ask("/versions").splitlines()) == 1


def test_who_was_waiting_for_a_version_without_end_has_it_too(wreck: Wreck, stage: Any) -> None:
    wreck.follower.await_text(str(stage.data / "follower" / f"v{wreck.version}"))
    assert wreck.second is not None, "published by an earlier test"
    stage.check_same(wreck.second, wreck.version, "follower")
