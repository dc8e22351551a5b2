"""Blobs on disk, in addition to what all stores do: quota, folder, and what a kill leaves behind."""

import asyncio
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.blobs import disk
from shoal.coordinator.blobs.base import FullError, MissingBlobError, check_name
from shoal.coordinator.blobs.disk import DiskStore
from shoal.errors import UnavailableError

DATA = os.urandom(700_000)
NAME = hashlib.sha256(DATA).hexdigest()


def test_nobody_else_on_the_machine_can_read_or_list_blobs(disk_place: Any) -> None:
    async def check(store: DiskStore) -> None:
        await store.put(NAME, len(DATA), disk_place.send(DATA))

    disk_place.run(check)
    for path in [disk_place.blobs, *disk_place.blobs.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_uploads_side_by_side_never_pass_the_quota_together(disk_place: Any) -> None:
    async def check(store: DiskStore) -> None:
        blobs = [os.urandom(1000) for _ in range(10)]
        puts = [store.put(hashlib.sha256(data).hexdigest(), 1000, disk_place.send(data, 100)) for data in blobs]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(result) for result in results].count(FullError) == 6
        assert (store.num_blobs, store.num_bytes) == (4, 4000)

    disk_place.run(check, max_bytes=4500)


@pytest.mark.parametrize("limits", [{"max_blobs": 1}, {"max_bytes": 1500}, {"min_free_bytes": 2**60}])
def test_a_full_store_refuses_and_takes_again_when_there_is_room(disk_place: Any, limits: dict[str, int]) -> None:
    first, second = b"a" * 1000, b"b" * 1000

    async def check(store: DiskStore) -> None:
        name = hashlib.sha256(first).hexdigest()
        if "min_free_bytes" not in limits:
            await store.put(name, 1000, disk_place.send(first))
        with pytest.raises(FullError):
            await store.put(hashlib.sha256(second).hexdigest(), 1000, disk_place.send(second))
        if "min_free_bytes" not in limits:
            await store.remove(name)
            assert (store.num_blobs, store.num_bytes) == (0, 0)
            await store.put(hashlib.sha256(second).hexdigest(), 1000, disk_place.send(second))

    disk_place.run(check, **limits)


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_and_recovers(
    disk_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [300_000]

    def write(descriptor: int, data: Any) -> int:
        if len(data) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(data)
        return real(descriptor, data)

    async def check(store: DiskStore) -> None:
        monkeypatch.setattr(disk.os, "write", write)
        with pytest.raises(FullError):
            await store.put(NAME, len(DATA), disk_place.send(DATA))
        assert (store.num_blobs, store.num_bytes, store.num_uploads) == (0, 0, 0)
        assert disk_place.list_all() == []
        monkeypatch.undo()
        await store.put(NAME, len(DATA), disk_place.send(DATA))
        assert await disk_place.read(store, NAME) == DATA

    disk_place.run(check)


def test_an_upload_that_is_given_up_at_any_moment_leaves_nothing_or_a_whole_blob(disk_place: Any) -> None:
    async def check(store: DiskStore) -> None:
        for turn in range(40):
            task = asyncio.create_task(store.put(NAME, len(DATA), disk_place.send(DATA)))
            await asyncio.sleep(turn * 0.0003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while store.num_uploads:
                await asyncio.sleep(0.001)
            is_there = await store.has(NAME)
            assert (store.num_blobs, store.num_bytes) == ((1, len(DATA)) if is_there else (0, 0))
            assert list((disk_place.blobs / "incoming").iterdir()) == []
            if is_there:
                assert await disk_place.read(store, NAME) == DATA
                await store.remove(NAME)

    disk_place.run(check)


@given(st.text(max_size=80) | st.sampled_from(["../" + "a" * 61, "/etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"]))
def test_nothing_but_a_hash_is_a_name(text: str) -> None:
    with pytest.raises(MissingBlobError):
        check_name(text)


@settings(max_examples=20)
@given(st.binary(min_size=1, max_size=2000), st.integers(1, 500))
def test_a_blob_is_the_same_in_whatever_pieces_it_came(
    tmp_path_factory: Any, make_place: Any, data: bytes, size: int
) -> None:
    name, disk_place = hashlib.sha256(data).hexdigest(), make_place(tmp_path_factory.mktemp("blobs"))

    async def check(store: DiskStore) -> None:
        await store.put(name, len(data), disk_place.send(data, size))
        assert await disk_place.read(store, name) == data

    disk_place.run(check)


def test_a_folder_has_one_owner_at_a_time(disk_place: Any) -> None:
    async def check(store: DiskStore) -> None:
        with pytest.raises(UnavailableError, match="another process"):
            DiskStore(disk_place.blobs)

    disk_place.run(check)
    disk_place.run(lambda store: store.has(NAME))


_VICTIM = """
import asyncio, hashlib, sys
from pathlib import Path
from shoal.coordinator.blobs.disk import DiskStore

async def main():
    store = DiskStore(Path(sys.argv[1]))
    data = bytes(range(256)) * 4096 * 8
    done = hashlib.sha256(data[:1000]).hexdigest()

    async def small():
        yield data[:1000]

    async def chunks():
        for start in range(0, len(data), 65536):
            yield data[start:start + 65536]
            if start == 65536 * 64:
                print("half", flush=True)
            await asyncio.sleep(0.0005)

    await store.put(done, 1000, small())
    await store.put(hashlib.sha256(data).hexdigest(), len(data), chunks())
    print("whole", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["half", "whole"])
def test_kill_minus_nine_leaves_what_was_answered_and_nothing_half(disk_place: Any, moment: str) -> None:
    data = bytes(range(256)) * 4096 * 8
    small, large = hashlib.sha256(data[:1000]).hexdigest(), hashlib.sha256(data).hexdigest()
    with subprocess.Popen([sys.executable, "-c", _VICTIM, str(disk_place.blobs)], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            if line.decode().strip() == moment:
                break
        victim.send_signal(signal.SIGKILL)

    async def check(store: DiskStore) -> None:
        assert await disk_place.read(store, small) == data[:1000]
        assert await store.has(large) == (moment == "whole")
        assert list((disk_place.blobs / "incoming").iterdir()) == []
        await store.put(large, len(data), disk_place.send(data, 65536))
        assert await disk_place.read(store, large) == data
        assert (store.num_blobs, store.num_bytes) == (2, len(data) + 1000)

    disk_place.run(check)
