"""What every blob store does, on disk and in a bucket: a blob is stored completely or not at all."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.coordinator.blobs.base import FullError, MissingBlobError, WrongBlobError

DATA = os.urandom(700_000)
NAME = hashlib.sha256(DATA).hexdigest()


def test_a_blob_is_read_as_it_was_written_also_after_a_restart(place: Any) -> None:
    async def write(store: Any) -> None:
        assert not await store.has(NAME)
        await store.put(NAME, len(DATA), place.send(DATA))
        assert await place.read(store, NAME) == DATA

    async def read(store: Any) -> None:
        assert await store.has(NAME)
        place.check_counts(store, 1, len(DATA))
        assert await place.read(store, NAME) == DATA

    place.run(write)
    place.run(read)
    assert place.list_all() == [f"{NAME[:2]}/{NAME}"]


@pytest.mark.parametrize("size", [1, 8 * 2**20, 8 * 2**20 + 1, 20 * 2**20])
def test_blobs_of_one_part_and_of_several_come_back(place: Any, size: int) -> None:
    data = os.urandom(size)
    name = hashlib.sha256(data).hexdigest()

    async def check(store: Any) -> None:
        await store.put(name, size, place.send(data, 2**20))
        assert hashlib.sha256(await place.read(store, name)).hexdigest() == name

    place.run(check)


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
    ids=["short", "long", "other", "announced-short", "announced-long", "empty", "too-large"],
)
def test_other_bytes_than_announced_leave_nothing(place: Any, size: int, data: bytes) -> None:
    async def check(store: Any) -> None:
        with pytest.raises(WrongBlobError):
            await store.put(NAME, size, place.send(data))
        assert not await store.has(NAME)
        place.check_counts(store, 0, 0)

    place.run(check)
    assert place.list_all() == []


def test_uploading_an_existing_blob_requires_having_it(place: Any) -> None:
    async def check(store: Any) -> None:
        await store.put(NAME, len(DATA), place.send(DATA))
        await store.put(NAME, len(DATA), place.send(DATA))
        for claimed in (DATA[:-1], DATA[:-1] + b"x", DATA + b"x", b""):
            with pytest.raises(WrongBlobError):
                await store.put(NAME, len(DATA), place.send(claimed))
        place.check_counts(store, 1, len(DATA))
        assert await place.read(store, NAME) == DATA

    place.run(check)


def test_two_uploads_of_one_blob_at_once_make_one_blob(place: Any) -> None:
    async def check(store: Any) -> None:
        await asyncio.gather(*(store.put(NAME, len(DATA), place.send(DATA)) for _ in range(5)))
        place.check_counts(store, 1, len(DATA))
        assert await place.read(store, NAME) == DATA

    place.run(check)
    assert place.list_all() == [f"{NAME[:2]}/{NAME}"]


def test_no_more_uploads_at_a_time_than_allowed(place: Any) -> None:
    async def check(store: Any) -> None:
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            await gate.wait()
            yield DATA

        first = asyncio.create_task(store.put(NAME, len(DATA), slow()))
        while not store.num_uploads:
            await asyncio.sleep(0.001)
        with pytest.raises(FullError):
            await store.put("0" * 64, 5, place.send(b"12345"))
        gate.set()
        await first
        assert await store.has(NAME)

    place.run(check, max_uploads=1)


def test_an_upload_that_is_given_up_leaves_nothing_and_its_place_is_free(place: Any) -> None:
    async def check(store: Any) -> None:
        is_under_way = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield DATA[:300_000]
            is_under_way.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(store.put(NAME, len(DATA), endless()))
        await is_under_way.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while store.num_uploads:
            await asyncio.sleep(0.001)
        assert not await store.has(NAME)

    place.run(check, max_uploads=1)
    assert place.list_all() == []


def test_an_error_of_the_sender_passes_and_leaves_nothing(place: Any) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield DATA[:1000]
        raise ConnectionResetError("gone")

    async def check(store: Any) -> None:
        with pytest.raises(ConnectionResetError):
            await store.put(NAME, len(DATA), broken())
        assert not await store.has(NAME)
        place.check_counts(store, 0, 0)

    place.run(check)
    assert place.list_all() == []


def test_a_blob_that_was_removed_is_gone_and_may_come_again(place: Any) -> None:
    async def check(store: Any) -> None:
        await store.put(NAME, len(DATA), place.send(DATA))
        await store.remove(NAME)
        await store.remove(NAME)  # removing it twice is allowed
        assert not await store.has(NAME)
        with pytest.raises(MissingBlobError):
            await store.open(NAME)
        await store.put(NAME, len(DATA), place.send(DATA))
        assert await store.has(NAME)

    place.run(check)


def test_a_name_that_is_no_hash_reaches_nothing(place: Any) -> None:
    async def check(store: Any) -> None:
        for name in ("../lock", "lock", "incoming", "", "a" * 65, "A" * 64, f"{'a' * 63}/"):
            for attempt in (
                store.has(name),
                store.open(name),
                store.remove(name),
                store.put(name, 1, place.send(b"a")),
            ):
                with pytest.raises(MissingBlobError):
                    await attempt
        with pytest.raises(MissingBlobError):
            await store.open(NAME)

    place.run(check)
    assert place.list_all() == []
