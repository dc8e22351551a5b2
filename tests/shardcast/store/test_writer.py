"""Writing shards: they count when their hash is verified, whatever happens before."""

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.shards import write_bytes

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.store import writer as writer_module
from shoal.shardcast.store.blob import TAIL_BYTES, Blob
from shoal.shardcast.store.store import NUM_THREADS
from shoal.util.aio import run_blocking

SIZE = 1 << 18
DATA = os.urandom(2 * SIZE + 1000)
FILES = {"weights": DATA}
FIRST = DATA[:SIZE]


@contextlib.asynccontextmanager
async def open_entry(maker: Any, lines: int | None = None) -> Any:
    store = await maker.open_store()
    try:
        yield await maker.add_lines(store, maker.make_lines(1, FILES, shard_size=SIZE, portion=1)[:lines])
    finally:
        await store.close()


def read_shard(blob: Blob, index: int) -> bytes:
    with blob.locate(index) as (descriptor, offset, size):
        return os.pread(descriptor, size, offset)


class SlowDisk:
    """Blocks writes of one process until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        write = writer_module.write_at

        def write_slowly(*args: Any) -> None:
            self.began.set()
            assert self.go_on.wait(10)
            write(*args)

        monkeypatch.setattr(writer_module, "write_at", write_slowly)

    async def wait_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 10)


@pytest.mark.parametrize("step", [1000, 1 << 15, SIZE])
def test_a_shard_in_pieces_of_any_size_is_verified_and_there(run: Callable[..., Any], maker: Any, step: int) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(0) as writer:
                for start in range(0, SIZE, step):
                    await write_bytes(writer, FIRST[start : start + step])
                assert not entry.full.has(0)
                await writer.finish()
            assert entry.full.has(0) and entry.full.ready(0) == SIZE and entry.full.have_bytes == SIZE
            assert list(entry.full.missing()) == [1, 2] and entry.full.num_missing == 2
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_bytes_are_shown_as_they_come_but_the_tail_only_when_the_hash_held(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            seen = []
            with entry.full.start(0) as writer:
                for start in range(0, SIZE, 1 << 16):
                    woken = entry.full.claims.progress(0).wait()
                    await write_bytes(writer, FIRST[start : start + (1 << 16)])
                    await woken
                    seen.append(entry.full.ready(0))
                woken = entry.full.claims.progress(0).wait()
                await writer.finish()
                await woken
            assert seen == [1 << 16, 2 << 16, 3 << 16, SIZE - TAIL_BYTES]
            assert entry.full.ready(0) == SIZE

    run(work)


def test_a_small_shard_shows_nothing_before_it_is_verified(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(2) as writer:
                await write_bytes(writer, DATA[2 * SIZE :])
                assert entry.full.ready(2) == 0
                await writer.finish()
            assert entry.full.ready(2) == 1000

    run(work)


@pytest.mark.parametrize("position", [0, SIZE // 2, SIZE - 1])
def test_a_flipped_bit_anywhere_is_a_shard_error_and_nothing_is_kept(
    run: Callable[..., Any], maker: Any, position: int
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            bad = bytearray(FIRST)
            bad[position] ^= 1
            woken = entry.full.claims.progress(0).wait()
            with entry.full.start(0) as writer:
                await write_bytes(writer, bad)
                with pytest.raises(ShardError, match="does not match its hash"):
                    await writer.finish()
            await woken
            assert entry.full.ready(0) == 0 and not entry.full.has(0)
            await maker.fill_shard(entry.full, 0, FILES)
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_too_few_bytes_are_a_shard_error_and_too_many_are_not_taken(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(0) as writer:
                await write_bytes(writer, FIRST[:-1])
                with pytest.raises(ShardError, match=f"{SIZE - 1} of {SIZE} bytes"):
                    await writer.finish()
            await maker.fill_shard(entry.full, 1, FILES)
            with entry.full.start(0) as writer:
                await write_bytes(writer, FIRST + b"x")
                assert writer.written == SIZE
            assert not entry.full.has(0) and read_shard(entry.full, 1) == DATA[SIZE : 2 * SIZE]

    run(work)


def test_a_writer_that_has_ended_accepts_nothing_more(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(0) as writer:
                await write_bytes(writer, FIRST[:10])
            for late in (write_bytes(writer, b"x"), writer.finish()):
                with pytest.raises(StaleError):
                    await late
            writer.abort()

    run(work)


def test_finish_waits_for_the_hash_that_the_manifest_does_not_have_yet(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        lines = maker.make_lines(1, FILES, shard_size=SIZE, portion=1)
        async with open_entry(maker, lines=1) as entry:
            with entry.full.start(1) as writer:
                await write_bytes(writer, DATA[SIZE : 2 * SIZE])
                waiting = asyncio.create_task(writer.finish())
                await asyncio.sleep(0.01)
                await entry.append(lines[1])
                await asyncio.sleep(0.01)
                assert not waiting.done() and entry.full.ready(1) == SIZE - TAIL_BYTES
                await entry.append(lines[2])
                await waiting
            assert entry.full.has(1)

    run(work)


def test_a_deadline_on_finish_gives_the_shard_up(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker, lines=1) as entry:
            with entry.full.start(1) as writer:
                await write_bytes(writer, DATA[SIZE : 2 * SIZE])
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(writer.finish(), 0.01)
            assert entry.full.ready(1) == 0
            entry.full.start(1).abort()

    run(work)


def test_every_start_is_another_attempt(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            assert entry.full.claims.attempt(0) == 0
            for number in (1, 2):
                with entry.full.start(0):
                    assert entry.full.claims.attempt(0) == number
            assert entry.full.claims.attempt(1) == 0

    run(work)


def test_a_cancelled_write_returns_when_the_buffer_is_free_and_gives_up(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            disk = SlowDisk(monkeypatch)
            writer = entry.full.start(0)
            task = asyncio.create_task(write_bytes(writer, FIRST))
            await disk.wait_begun()
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            disk.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StaleError):
                await writer.finish()

    run(work)


def test_the_next_writer_waits_for_the_thread_of_one_that_gave_up(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late byte of the first must not overwrite what the second verified."""

    async def work() -> None:
        async with open_entry(maker) as entry:
            disk = SlowDisk(monkeypatch)
            first = entry.full.start(0)
            late = asyncio.create_task(write_bytes(first, bytes(SIZE)))
            await disk.wait_begun()
            first.abort()
            monkeypatch.undo()
            second = asyncio.create_task(maker.fill_shard(entry.full, 0, FILES))
            await asyncio.sleep(0.02)
            assert not second.done()
            disk.go_on.set()
            with pytest.raises(StaleError):
                await late
            await second
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_a_disk_that_refuses_ends_the_writer_with_its_own_error(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def work() -> None:
        async with open_entry(maker) as entry:
            with monkeypatch.context() as patch:
                patch.setattr(writer_module, "write_at", refuse)
                with entry.full.start(0) as writer, pytest.raises(OSError, match="full"):
                    await write_bytes(writer, FIRST)
            await maker.fill_shard(entry.full, 0, FILES)

    run(work)


def test_a_spare_that_is_first_takes_the_place_of_the_slow_one(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            slow = entry.full.start(0)
            await write_bytes(slow, bytes(SIZE // 2))
            attempt = entry.full.claims.attempt(0)
            with entry.full.start(0, spare=True) as spare:
                await write_bytes(spare, FIRST)
                assert entry.full.ready(0) == SIZE // 2 and entry.full.claims.attempt(0) == attempt
                await spare.finish()
            assert entry.full.has(0) and entry.full.claims.attempt(0) > attempt
            assert read_shard(entry.full, 0) == FIRST
            with pytest.raises(StaleError):
                await write_bytes(slow, bytes(SIZE // 2))
            assert read_shard(entry.full, 0) == FIRST
            assert not list(entry.folder.glob("*spare*"))

    run(work)


def test_a_spare_waits_for_the_thread_of_the_slow_one(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            disk = SlowDisk(monkeypatch)
            slow = asyncio.create_task(write_bytes(entry.full.start(0), bytes(SIZE)))
            await disk.wait_begun()
            monkeypatch.undo()
            spare = entry.full.start(0, spare=True)
            await write_bytes(spare, FIRST)
            finishing = asyncio.create_task(spare.finish())
            await asyncio.sleep(0.02)
            assert not finishing.done() and not entry.full.has(0)
            disk.go_on.set()
            await finishing
            with pytest.raises(StaleError):
                await slow
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_a_spare_that_is_late_or_wrong_leaves_the_first_one_alone(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            first = entry.full.start(0)
            await write_bytes(first, FIRST)
            with entry.full.start(0, spare=True) as wrong:
                await write_bytes(wrong, bytes(SIZE))
                with pytest.raises(ShardError, match="does not match its hash"):
                    await wrong.finish()
            with entry.full.start(0, spare=True) as late:
                await write_bytes(late, FIRST)
                await first.finish()
                with pytest.raises(StaleError, match="another writer"):
                    await late.finish()
            assert read_shard(entry.full, 0) == FIRST
            assert not list(entry.folder.glob("*spare*"))

    run(work)


def test_dropping_the_entry_ends_its_writers(run: Callable[..., Any], maker: Any, tmp_path: Path) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(1, FILES, shard_size=SIZE)
        entry = await store.adopt(lines[0])
        writers = [entry.full.start(0), entry.full.start(1), entry.full.start(1, spare=True)]
        await write_bytes(writers[0], FIRST)
        waiting = asyncio.create_task(writers[0].finish())
        await write_bytes(writers[2], FIRST)
        await asyncio.sleep(0)
        await store.drop(entry)
        new = entry.full.start(2)
        for late in (waiting, *(write_bytes(writer, b"x") for writer in (writers[1], writers[2], new))):
            with pytest.raises(StaleError):
                await late
        await store.close()
        assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["store.json", "store.lock"]

    run(work)


def count_open(folder: Path, name: str) -> int:
    """Descriptors of files whose path contains a word; those that vanish meanwhile are not ours."""
    count = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found = path.readlink()
            count += found.is_relative_to(folder) and name in str(found.relative_to(folder))
    return count


def test_no_descriptor_is_left_open(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            await maker.fill_shard(entry.full, 0, FILES)
            with entry.full.start(1) as writer, entry.full.start(1, spare=True) as spare:
                await write_bytes(writer, b"x")
                await write_bytes(spare, b"x")
                assert count_open(maker.folder, "spare") == 1
            assert count_open(maker.folder, "spare") == 0 and count_open(maker.folder, "full.part") > 0
            assert count_open(maker.folder, "store.lock") == 1
        assert count_open(maker.folder, "") == 0

    run(work)


def slow_copy(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Blocks a spare in the middle of putting its bytes in place: (it has arrived, it may continue)."""
    began, go_on = threading.Event(), threading.Event()
    copy = writer_module.copy_range

    def copy_slowly(*args: Any) -> None:
        began.set()
        assert go_on.wait(10)
        copy(*args)

    monkeypatch.setattr(writer_module, "copy_range", copy_slowly)
    return began, go_on


@pytest.mark.parametrize("copied", [True, False])
def test_a_writer_started_while_a_spare_takes_the_place_waits_for_it(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            began, go_on = slow_copy(monkeypatch)
            spare = entry.full.start(0, spare=True)
            await write_bytes(spare, FIRST)
            finishing = asyncio.create_task(spare.finish())
            assert await asyncio.to_thread(began.wait, 10)
            writer = entry.full.start(0)
            second = asyncio.create_task(write_bytes(writer, FIRST))
            await asyncio.sleep(0.02)
            assert not second.done() and entry.full.ready(0) == 0
            if not copied:
                finishing.cancel()
            go_on.set()
            if copied:
                await finishing
                with pytest.raises(StaleError, match="another writer"):
                    await second
            else:
                with pytest.raises(asyncio.CancelledError):
                    await finishing
                await second
                assert entry.full.ready(0) == SIZE - TAIL_BYTES, "it has the place now"
                await writer.finish()
            assert entry.full.has(0) and read_shard(entry.full, 0) == FIRST

    run(work)


def test_giving_up_while_waiting_for_a_spare_stops_neither(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            began, go_on = slow_copy(monkeypatch)
            spare = entry.full.start(0, spare=True)
            await write_bytes(spare, FIRST)
            finishing = asyncio.create_task(spare.finish())
            assert await asyncio.to_thread(began.wait, 10)
            waiting = entry.full.start(0)
            writing = asyncio.create_task(write_bytes(waiting, FIRST))
            await asyncio.sleep(0.01)
            waiting.abort()
            with pytest.raises(StaleError):
                await writing
            go_on.set()
            await finishing
            assert read_shard(entry.full, 0) == FIRST

    run(work)


class ByteSource:
    """A source of bytes controlled by a test: returns its pieces one by one, and records its callers."""

    def __init__(self, *pieces: bytes, ended: bool = False) -> None:
        self.pieces = list(pieces)
        self.ended = ended
        self.num_calls = 0
        self.asked = threading.Event()

    def pull(self, view: memoryview) -> int | None:
        self.num_calls += 1
        self.asked.set()
        if not self.pieces:
            if not self.ended:
                time.sleep(0.001)
            return 0 if self.ended else None
        piece = self.pieces.pop(0)
        view[: len(piece)] = piece
        return len(piece)

    async def wait_dry(self) -> None:
        """Wait until all its bytes are in place, which shows when it is asked for more."""
        while self.pieces:
            await asyncio.sleep(0.001)
        self.asked.clear()
        assert await asyncio.to_thread(self.asked.wait, 10)


def cut(data: bytes, step: int) -> list[bytes]:
    return [data[start : start + step] for start in range(0, len(data), step)]


@pytest.mark.parametrize("step", [1000, 1 << 15, SIZE])
def test_a_shard_received_in_pieces_of_any_size_is_verified_and_there(
    run: Callable[..., Any], maker: Any, step: int
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(1) as writer:
                await writer.receive(ByteSource(*cut(DATA[SIZE : 2 * SIZE], step)).pull)
                assert writer.written == SIZE and not entry.full.has(1)
                await writer.finish()
            assert read_shard(entry.full, 1) == DATA[SIZE : 2 * SIZE]

    run(work)


def test_a_source_that_ends_early_is_continued_by_the_next_one(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            with entry.full.start(0) as writer:
                await writer.receive(ByteSource(FIRST[:5000], ended=True).pull)
                assert writer.written == 5000 and not writer.over
                await write_bytes(writer, FIRST[5000:6000])
                await writer.receive(ByteSource(FIRST[6000:]).pull)
                await writer.finish()
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_who_waits_for_bytes_is_woken_by_each_piece_but_not_shown_the_tail(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            blob, byte_source, seen = entry.full, ByteSource(), [0]
            with blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(byte_source.pull))
                for piece in cut(FIRST[:-TAIL_BYTES], 30_000):
                    assert blob.ready(0) == seen[-1]
                    woken = blob.claims.progress(0).wait()
                    byte_source.pieces.append(piece)
                    await woken
                    seen.append(blob.ready(0))
                assert seen == [*range(0, SIZE - TAIL_BYTES, 30_000), SIZE - TAIL_BYTES]
                byte_source.pieces.append(FIRST[-TAIL_BYTES:])
                await receiving
                assert blob.ready(0) == SIZE - TAIL_BYTES
                await writer.finish()
            assert blob.ready(0) == SIZE

    run(work)


def test_who_waited_before_there_was_a_writer_is_woken_by_the_first_piece(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            assert entry.full.ready(0) == 0
            woken = entry.full.claims.progress(0).wait()
            with entry.full.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(ByteSource(FIRST[:100]).pull))
                await woken
                assert entry.full.ready(0) == 100 and not receiving.done()
                receiving.cancel()
                await asyncio.wait([receiving])

    run(work)


def test_no_notification_is_sent_for_bytes_that_nobody_waits_for(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            notified = []
            monkeypatch.setattr(entry.full.claims, "notify", notified.append)
            with entry.full.start(0) as writer:
                await writer.receive(ByteSource(*cut(FIRST, 1000)).pull)
                assert len(notified) <= 2, "after the first piece, and at the end"

    run(work)


def test_a_cancelled_receiver_returns_when_its_thread_has_let_go(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            byte_source, writer = ByteSource(FIRST[:5000]), entry.full.start(0)
            receiving = asyncio.create_task(writer.receive(byte_source.pull))
            await byte_source.wait_dry()
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            num_calls = byte_source.num_calls
            await asyncio.sleep(0.02)
            assert byte_source.num_calls == num_calls and writer.over
            await maker.fill_shard(entry.full, 0, FILES)

    run(work)


def test_the_next_writer_waits_for_the_thread_of_a_receiver_that_gave_up(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            disk = SlowDisk(monkeypatch)
            first = entry.full.start(0)
            late = asyncio.create_task(first.receive(ByteSource(bytes(SIZE // 2), bytes(SIZE // 2)).pull))
            await disk.wait_begun()
            first.abort()
            monkeypatch.undo()
            second = asyncio.create_task(maker.fill_shard(entry.full, 0, FILES))
            await asyncio.sleep(0.02)
            assert not second.done()
            disk.go_on.set()
            with pytest.raises(StaleError):
                await late
            await second
            assert read_shard(entry.full, 0) == FIRST

    run(work)


def test_a_receiver_that_lost_gets_an_error_whichever_writer_won(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            taps = [ByteSource(bytes(100)), ByteSource(FIRST[:100])]
            slow, late = entry.full.start(0), entry.full.start(0, spare=True)
            losers = [
                asyncio.create_task(writer.receive(byte_source.pull))
                for writer, byte_source in zip((slow, late), taps, strict=True)
            ]
            for byte_source in taps:
                await byte_source.wait_dry()
            with entry.full.start(0, spare=True) as winner:
                await winner.receive(ByteSource(FIRST).pull)
                await winner.finish()
            for loser in losers:
                with pytest.raises(StaleError):
                    await loser
            late.abort()
            assert read_shard(entry.full, 0) == FIRST and not list(entry.folder.glob("*spare*"))

    run(work)


def test_a_disk_that_refuses_ends_a_receiver_with_its_own_error(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def work() -> None:
        async with open_entry(maker) as entry:
            with monkeypatch.context() as patch:
                patch.setattr(writer_module, "write_at", refuse)
                writer = entry.full.start(0)
                with pytest.raises(OSError, match="full"):
                    await writer.receive(ByteSource(FIRST).pull)
                assert writer.over
            await maker.fill_shard(entry.full, 0, FILES)

    run(work)


def test_receivers_that_wait_take_no_thread_from_other_work(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_entry(maker) as entry:
            taps = [ByteSource(b"x") for _ in range(3 * NUM_THREADS)]
            waiting = [
                asyncio.create_task(entry.full.start(0, spare=True).receive(byte_source.pull)) for byte_source in taps
            ]
            for byte_source in taps:
                await byte_source.wait_dry()
            assert await run_blocking(entry.full.pool, lambda: "done") == "done"
            await maker.fill_shard(entry.full, 1, FILES)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    run(work)
