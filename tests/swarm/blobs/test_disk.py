"""Blobs on disk: whole or not at all, within their quota, whatever happens in between."""

import asyncio
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.swarm.blobs import disk
from shoal.swarm.blobs.base import FullError, MissingBlobError, WrongBlobError, check_name
from shoal.swarm.blobs.disk import DiskLimits, DiskStore

DATA = os.urandom(700_000)
NAME = hashlib.sha256(DATA).hexdigest()


async def pieces(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read_all(store: DiskStore, name: str) -> bytes:
    async with await store.open(name) as reader:
        data = b"".join([piece async for piece in reader])
        assert reader.size == len(data)
        return data


def run_store(folder: Path, work: Callable[[DiskStore], Any], **limits: int) -> None:
    async def run() -> None:
        store = DiskStore(folder, DiskLimits(**limits))
        try:
            async with asyncio.timeout(30):
                await work(store)
        finally:
            await store.close()

    asyncio.run(run())


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_a_blob_is_read_as_it_was_written_also_after_a_restart(tmp_path: Path) -> None:
    async def write(store: DiskStore) -> None:
        assert not await store.has(NAME)
        await store.put(NAME, len(DATA), pieces(DATA))
        assert await read_all(store, NAME) == DATA

    async def read(store: DiskStore) -> None:
        assert await store.has(NAME)
        assert (store.num_blobs, store.num_bytes) == (1, len(DATA))
        assert await read_all(store, NAME) == DATA

    run_store(tmp_path, write)
    run_store(tmp_path, read)
    assert list_files(tmp_path) == [f"{NAME[:2]}/{NAME}"]


def test_nobody_else_on_the_machine_can_read_or_list_blobs(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        await store.put(NAME, len(DATA), pieces(DATA))

    run_store(tmp_path / "blobs", check)
    for path in [tmp_path / "blobs", *(tmp_path / "blobs").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize(
    ("size", "data"),
    [
        (len(DATA), DATA[:-1]),
        (len(DATA), DATA + b"x"),
        (len(DATA), DATA[:-1] + b"x"),
        (len(DATA) - 1, DATA),
        (len(DATA) + 1, DATA),
        (0, b""),
        (2**30, DATA),
    ],
)
def test_other_bytes_than_announced_leave_nothing(tmp_path: Path, size: int, data: bytes) -> None:
    async def check(store: DiskStore) -> None:
        with pytest.raises(WrongBlobError):
            await store.put(NAME, size, pieces(data))
        assert not await store.has(NAME)
        assert (store.num_blobs, store.num_bytes, store.num_uploads) == (0, 0, 0)

    run_store(tmp_path, check)
    assert list_files(tmp_path) == []


def test_who_hands_in_a_blob_that_is_there_must_have_it_too(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        await store.put(NAME, len(DATA), pieces(DATA))
        await store.put(NAME, len(DATA), pieces(DATA))
        for claimed in (DATA[:-1], DATA[:-1] + b"x", DATA + b"x", b""):
            with pytest.raises(WrongBlobError):
                await store.put(NAME, len(DATA), pieces(claimed))
        assert (store.num_blobs, store.num_bytes) == (1, len(DATA))

    run_store(tmp_path, check)


def test_two_uploads_of_one_blob_at_once_make_one_blob(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        await asyncio.gather(*(store.put(NAME, len(DATA), pieces(DATA)) for _ in range(5)))
        assert (store.num_blobs, store.num_bytes, store.num_uploads) == (1, len(DATA), 0)
        assert await read_all(store, NAME) == DATA

    run_store(tmp_path, check)
    assert list_files(tmp_path) == [f"{NAME[:2]}/{NAME}"]


def test_uploads_side_by_side_never_pass_the_quota_together(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        blobs = [os.urandom(1000) for _ in range(10)]
        puts = [store.put(hashlib.sha256(data).hexdigest(), 1000, pieces(data, 100)) for data in blobs]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(result) for result in results].count(FullError) == 6
        assert (store.num_blobs, store.num_bytes) == (4, 4000)

    run_store(tmp_path, check, max_bytes=4500)


@pytest.mark.parametrize("limits", [{"max_blobs": 1}, {"max_bytes": 1500}, {"min_free_bytes": 2**60}])
def test_a_full_store_refuses_and_takes_again_when_there_is_room(tmp_path: Path, limits: dict[str, int]) -> None:
    first, second = b"a" * 1000, b"b" * 1000

    async def check(store: DiskStore) -> None:
        name = hashlib.sha256(first).hexdigest()
        if "min_free_bytes" not in limits:
            await store.put(name, 1000, pieces(first))
        with pytest.raises(FullError):
            await store.put(hashlib.sha256(second).hexdigest(), 1000, pieces(second))
        if "min_free_bytes" not in limits:
            await store.remove(name)
            await store.remove(name)  # a second time is no matter
            assert (store.num_blobs, store.num_bytes) == (0, 0)
            await store.put(hashlib.sha256(second).hexdigest(), 1000, pieces(second))

    run_store(tmp_path, check, **limits)


def test_no_more_uploads_at_a_time_than_allowed(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            await gate.wait()
            yield DATA

        first = asyncio.create_task(store.put(NAME, len(DATA), slow()))
        while not store.num_uploads:
            await asyncio.sleep(0.001)
        with pytest.raises(FullError):
            await store.put("0" * 64, 5, pieces(b"12345"))
        gate.set()
        await first

    run_store(tmp_path, check, max_uploads=1)


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            await store.put(NAME, len(DATA), pieces(DATA))
        assert (store.num_blobs, store.num_bytes, store.num_uploads) == (0, 0, 0)
        assert list_files(tmp_path) == []
        monkeypatch.undo()
        await store.put(NAME, len(DATA), pieces(DATA))
        assert await read_all(store, NAME) == DATA

    run_store(tmp_path, check)


def test_an_upload_that_is_given_up_at_any_moment_leaves_nothing_or_a_whole_blob(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        for turn in range(40):
            task = asyncio.create_task(store.put(NAME, len(DATA), pieces(DATA)))
            await asyncio.sleep(turn * 0.0003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while store.num_uploads:
                await asyncio.sleep(0.001)
            is_there = await store.has(NAME)
            assert (store.num_blobs, store.num_bytes) == ((1, len(DATA)) if is_there else (0, 0))
            assert list((tmp_path / "incoming").iterdir()) == []
            if is_there:
                assert await read_all(store, NAME) == DATA
                await store.remove(NAME)

    run_store(tmp_path, check)


def test_an_error_of_the_sender_passes_and_leaves_nothing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield DATA[:1000]
        raise ConnectionResetError("gone")

    async def check(store: DiskStore) -> None:
        with pytest.raises(ConnectionResetError):
            await store.put(NAME, len(DATA), broken())
        assert store.num_bytes == 0

    run_store(tmp_path, check)
    assert list_files(tmp_path) == []


@given(st.text(max_size=80) | st.sampled_from(["../" + "a" * 61, "/etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"]))
def test_nothing_but_a_hash_is_a_name(text: str) -> None:
    with pytest.raises(MissingBlobError):
        check_name(text)


@settings(max_examples=20)
@given(st.binary(min_size=1, max_size=2000), st.integers(1, 500))
def test_a_blob_is_the_same_in_whatever_pieces_it_came(tmp_path_factory: Any, data: bytes, size: int) -> None:
    name = hashlib.sha256(data).hexdigest()

    async def check(store: DiskStore) -> None:
        await store.put(name, len(data), pieces(data, size))
        assert await read_all(store, name) == data

    run_store(tmp_path_factory.mktemp("blobs"), check)


def test_a_name_that_is_no_hash_reaches_no_file(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        for name in ("../lock", "lock", "incoming", "", "a" * 65):
            for attempt in (store.has(name), store.open(name), store.remove(name), store.put(name, 1, pieces(b"a"))):
                with pytest.raises(MissingBlobError):
                    await attempt
        with pytest.raises(MissingBlobError):
            await store.open(NAME)

    run_store(tmp_path, check)


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    async def check(store: DiskStore) -> None:
        with pytest.raises(ConfigError, match="another process"):
            DiskStore(tmp_path)

    run_store(tmp_path, check)
    run_store(tmp_path, lambda store: store.has(NAME))


_VICTIM = """
import asyncio, hashlib, sys
from pathlib import Path
from shoal.swarm.blobs.disk import DiskStore

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
def test_kill_minus_nine_leaves_what_was_answered_and_nothing_half(tmp_path: Path, moment: str) -> None:
    data = bytes(range(256)) * 4096 * 8
    small, large = hashlib.sha256(data[:1000]).hexdigest(), hashlib.sha256(data).hexdigest()
    with subprocess.Popen([sys.executable, "-c", _VICTIM, str(tmp_path)], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            if line.decode().strip() == moment:
                break
        victim.send_signal(signal.SIGKILL)

    async def check(store: DiskStore) -> None:
        assert await read_all(store, small) == data[:1000]
        assert await store.has(large) == (moment == "whole")
        assert list((tmp_path / "incoming").iterdir()) == []
        await store.put(large, len(data), pieces(data, 65536))
        assert await read_all(store, large) == data
        assert (store.num_blobs, store.num_bytes) == (2, len(data) + 1000)

    run_store(tmp_path, check)
