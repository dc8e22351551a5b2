"""The origin: one pass, no copy, and a version that ends only if its files are complete and unchanged."""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.shards import write_bytes

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.shardcast import origin as publish_module
from shoal.shardcast.delta import delta as delta_module
from shoal.shardcast.delta.delta import apply_chain
from shoal.shardcast.errors import ShardError
from shoal.shardcast.format import hashing as hashing_module
from shoal.shardcast.format.manifest import DELTA, FULL
from shoal.shardcast.origin import Origin
from shoal.shardcast.store import store as store_module

SIZE = 1 << 16
DATA = os.urandom(40 * SIZE)


@contextlib.asynccontextmanager
async def open_origin(maker: Any, *, anchor_every: int = 8, **settings: Any) -> AsyncIterator[Origin]:
    store = await maker.open_store(**settings)
    try:
        yield Origin(store, maker.key, shard_size=SIZE, anchor_every=anchor_every)
    finally:
        await store.close()


def write_checkpoint(maker: Any, name: str, **files: bytes) -> Path:
    folder: Path = maker.folder / name
    folder.mkdir()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


def change_some(data: bytes) -> bytes:
    """The same size, with different content in a few places."""
    changed = bytearray(data)
    for position in range(0, len(data), SIZE):
        changed[position] ^= 1
    return bytes(changed)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def copy_version(maker: Any, entry: Any, store: Any) -> Any:
    """Fetch a version into another store, as a client would."""
    copy = await maker.add_lines(store, list(entry.log.lines))
    for blob, source in ((copy.full, entry.full), (copy.delta, entry.delta)):
        for index in list(blob.missing()) if blob is not None else []:
            with source.locate(index) as (descriptor, offset, size), blob.start(index) as writer:
                await write_bytes(writer, os.pread(descriptor, size, offset))
                await writer.finish()
    if copy.delta is not None:
        await copy.delta.settle()
    await copy.full.settle()
    return copy


def test_a_published_folder_can_be_fetched_and_is_not_copied(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        files = {"model": DATA[: 20 * SIZE + 5], "config": b"{}", "empty": b""}
        folder = write_checkpoint(maker, "ckpt", **files)
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder, 4)
            assert entry.complete and entry.log.ended and entry.log.head.anchor and entry.log.head.parent is None
            assert origin.store.used_bytes == 0 and list_names(entry.folder) == ["manifest.ndjson", "source.json"]
            other = await maker.open_store("client")
            copy = await copy_version(maker, entry, other)
            assert {path.name: path.read_bytes() for path in copy.full.folder.iterdir()} == files
            await other.close()

    run(work)


def test_a_single_file_is_published_under_its_name(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA, other=b"x")
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder / "model", 0)
            assert [file.name for file in entry.log.full.files] == ["model"]
            assert entry.full.path_of("model") == folder / "model"

    run(work)


def test_a_version_is_there_and_can_be_read_while_it_is_still_being_hashed(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    hash_shards = hashing_module.hash_shards

    def hash_slowly(path: Path, shards: Any) -> list[bytes]:
        assert shards[0].index == 0 or go_on.wait(10)
        return hash_shards(path, shards)

    async def work() -> None:
        monkeypatch.setattr(hashing_module, "hash_shards", hash_slowly)
        monkeypatch.setattr(hashing_module, "GROUP_BYTES", SIZE)
        monkeypatch.setattr(publish_module, "FLUSH_BYTES", SIZE)
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker) as origin:
            task = asyncio.create_task(origin.publish(folder, 1))
            while not origin.store.entries() or not origin.store.entries()[0].log.num_hashes:
                await origin.store.changed.wait()
            (entry,) = origin.store.entries()
            assert entry.log.num_hashes == 1 and not entry.complete and entry.full.ready(39) == SIZE
            with entry.full.locate(39) as (descriptor, offset, size):
                assert os.pread(descriptor, size, offset) == DATA[39 * SIZE :]
            go_on.set()
            assert await task is entry and entry.complete

    run(work)


def test_hashes_come_in_portions_that_fit_into_lines(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(publish_module, "MAX_LINE_HASHES", 7)
        monkeypatch.setattr(publish_module, "FLUSH_S", 1000)
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder, 1)
            assert len(entry.log.lines) == 1 + 6 + 1

    run(work)


def test_a_line_with_as_many_hashes_as_allowed_fits() -> None:
    record = publish_module.Hashes(1 << 20, (bytes(32),) * publish_module.MAX_LINE_HASHES)
    delta = publish_module.Delta(1 << 44, bytes(32), record.hashes)
    for each in (record, delta):
        line = publish_module.sign_record(Key.generate(), "0" * 64, 1 << 20, each)
        assert len(line) <= publish_module.records.MAX_LINE_BYTES


def test_the_same_content_again_is_the_same_entry(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder, 1)
            assert await origin.publish(folder, 1) is entry
            os.utime(folder / "model", ns=(0, 0))  # rewritten with the same bytes
            assert await origin.publish(folder, 1) is entry
            assert entry.full.has(0) and len(origin.store.entries()) == 1
            with entry.full.locate(0):
                pass
        async with open_origin(maker) as origin:
            (entry,) = origin.store.entries()
            assert await origin.publish(folder, 1) is entry

    run(work)


def test_the_same_content_elsewhere_is_served_from_there(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        moved = write_checkpoint(maker, "moved", model=DATA)
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder, 1)
            with entry.full.locate(0):
                pass
            assert await origin.publish(moved, 1) is entry
            shutil.rmtree(folder)
            with entry.full.locate(3) as (descriptor, offset, size):
                assert os.pread(descriptor, size, offset) == DATA[3 * SIZE : 4 * SIZE]
        async with open_origin(maker) as origin:
            assert [entry.version for entry in origin.store.entries()] == [1]

    run(work)


@pytest.mark.parametrize("other", [change_some(DATA), DATA[:-1], DATA + b"x"])
def test_other_content_replaces_the_version_with_a_larger_serial(
    run: Callable[..., Any], maker: Any, other: bytes
) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        second = write_checkpoint(maker, "second", model=other)
        async with open_origin(maker) as origin:
            first = await origin.publish(folder, 1)
            entry = await origin.publish(second, 1)
            assert entry is not first and first.gone and entry.serial > first.serial and entry.complete
            assert origin.store.entries() == [entry]
            store = await maker.open_store("client")
            copy = await copy_version(maker, entry, store)
            assert copy.full.path_of("model").read_bytes() == other
            await store.close()

    run(work)


def test_serials_grow_though_the_clock_does_not(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=b"x")
        serials = []
        for start in (0, 2):
            store = await maker.open_store()
            origin = Origin(store, maker.key, clock_ns=lambda start=start: 1000 - start)
            for version in (start, start + 1):
                serials.append((await origin.publish(folder, version)).serial)
            await store.close()
        assert serials == [1000, 1001, 1002, 1003]

    run(work)


def test_serials_grow_though_the_version_before_was_dropped(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=b"x")
        store = await maker.open_store()
        origin = Origin(store, maker.key, clock_ns=lambda: 1000)
        first = await origin.publish(folder, 1)
        await store.drop(first)
        assert (await origin.publish(folder, 1)).serial == first.serial + 1
        await store.close()

    run(work)


def test_a_delta_against_the_newest_version_gives_the_same_bytes(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        old = {"model": DATA, "config": b"old"}
        new = {"model": change_some(DATA), "config": b"new!", "more": b"added"}
        folders = [write_checkpoint(maker, name, **files) for name, files in (("old", old), ("new", new))]
        async with open_origin(maker) as origin:
            first = await origin.publish(folders[0], 1)
            entry = await origin.publish(folders[1], 3)
            assert (entry.log.head.parent, entry.log.head.anchor) == (1, False)
            assert entry.log.parent_root == first.log.root and entry.delta is not None
            assert entry.delta.complete and entry.delta.settled and entry.delta.layout.total < len(DATA) // 10
            assert origin.store.used_bytes == entry.delta.layout.total
            apply_chain(first.full.folder, [entry.delta.folder], maker.folder / "built")
            assert {path.name: path.read_bytes() for path in (maker.folder / "built").iterdir()} == new
            other = await maker.open_store("client")
            copy = await copy_version(maker, entry, other)
            assert copy.delta.folder.read_bytes() == entry.delta.folder.read_bytes()
            await other.close()
        async with open_origin(maker) as origin:  # everything is restored after a restart
            assert [entry.version for entry in origin.store.entries()] == [1, 3]
            assert origin.store.entries()[1].delta.settled

    run(work)


def test_single_files_of_different_names_have_a_delta_from_file_to_file(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", step1=DATA, step2=change_some(DATA), other=b"x")
        alone = write_checkpoint(maker, "alone", step3=DATA)
        async with open_origin(maker) as origin:
            await origin.publish(folder / "step1", 1)
            entry = await origin.publish(folder / "step2", 2)
            apply_chain(folder / "step1", [entry.delta.folder], maker.folder / "built")
            assert (maker.folder / "built").read_bytes() == change_some(DATA)
            assert (await origin.publish(alone, 3)).delta is not None  # a folder of one file is one file
            await origin.publish(folder / "step1", 5, delta=False)
            assert (await origin.publish(folder, 6)).delta is None
            assert b"one is a folder and one a file" in b"".join(origin.store.find(6).log.lines)

    run(work)


def test_a_delta_that_does_not_pay_off_is_left_out_with_the_reason(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folders = [write_checkpoint(maker, name, model=os.urandom(4 * SIZE)) for name in ("old", "new")]
        async with open_origin(maker) as origin:
            await origin.publish(folders[0], 1)
            entry = await origin.publish(folders[1], 2)
            assert entry.complete and entry.delta is None and entry.log.delta_root is None
            assert b'"reason":"not smaller than the full version"' in b"".join(entry.log.lines)
            assert list_names(entry.folder) == ["manifest.ndjson", "source.json"]

    run(work)


def test_a_delta_that_a_sample_predicts_not_to_pay_off_is_not_written(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_module, "_SAMPLED_FROM", 0)
    monkeypatch.setattr(delta_module, "_SAMPLE_BLOCKS", 1)
    monkeypatch.setattr(publish_module._BoundedFile, "write", lambda *_: pytest.fail("written"))

    async def work() -> None:
        folders = [write_checkpoint(maker, name, model=os.urandom(4 * SIZE)) for name in ("old", "new")]
        async with open_origin(maker) as origin:
            await origin.publish(folders[0], 1)
            entry = await origin.publish(folders[1], 2)
            assert entry.complete and b'"reason":"not smaller than the full version"' in b"".join(entry.log.lines)

    run(work)


def test_a_parent_that_changed_meanwhile_gives_no_delta(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=DATA) for name in ("old", "new"))
        encode = publish_module.encode_delta

        def touch_and_encode(*args: Any, **options: Any) -> Any:
            os.utime(old / "model", ns=(0, 0))
            return encode(*args, **options)

        monkeypatch.setattr(publish_module, "encode_delta", touch_and_encode)
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            entry = await origin.publish(new, 2)
            assert entry.delta is None and b"the parent changed" in b"".join(entry.log.lines)

    run(work)


def test_parents_and_anchors_are_chosen_by_number(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker, keep=10) as origin:
            announced = {}
            for version in (1, 2, 8, 9):
                announced[version] = (await origin.publish(folder, version)).log.head
            assert [(head.parent, head.anchor) for head in announced.values()] == [
                (None, True),
                (1, False),
                (2, True),
                (8, False),
            ]
            assert (await origin.publish(folder, 17)).log.head.anchor, "16 was left out"
            assert (await origin.publish(folder, 5)).log.head.parent == 2
            free = (await origin.publish(folder, 11, delta=False)).log.head
            assert (free.parent, free.anchor) == (None, True)

    run(work)


def test_retention_keeps_the_last_versions(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker, keep=2, anchor_every=1) as origin:
            for version in range(5):
                await origin.publish(folder, version)
            assert [entry.version for entry in origin.store.entries()] == [3, 4]
            with pytest.raises(ConfigError, match=r"version = 2: .*older than the versions kept"):
                await origin.publish(folder, 2)
            assert (folder / "model").read_bytes() == DATA, "what was published is the trainer's, and stays"

    run(work)


def test_the_deltas_back_to_the_newest_anchor_stay_though_they_are_more_than_are_kept(
    run: Callable[..., Any], maker: Any
) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker, keep=2, anchor_every=4) as origin:
            held = []
            for version in range(1, 10):
                await origin.publish(folder, version)
                held.append([entry.version for entry in origin.store.entries()])
            assert held == [[1], [1, 2], [1, 2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8], [8, 9]]

    run(work)


@pytest.mark.parametrize("change", ["touch", "truncate", "remove", "add"])
def test_files_that_change_while_they_are_hashed_are_an_error_and_no_version(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        hash_shards = hashing_module.hash_shards

        def hash_and_change(path: Path, shards: Any) -> list[bytes]:
            if change == "touch":
                os.utime(folder / "model", ns=(0, 0))
            elif change == "truncate":
                os.truncate(folder / "model", 5)
            elif change == "add":
                (folder / "late").write_text("x")
            else:
                (folder / "model").unlink(missing_ok=True)
            return hash_shards(path, shards)

        async with open_origin(maker) as origin:
            with monkeypatch.context() as patch:
                patch.setattr(hashing_module, "hash_shards", hash_and_change)
                with pytest.raises(ConfigError, match="changed while it was being published"):
                    await origin.publish(folder, 1)
            assert origin.store.entries() == []
            shutil.rmtree(folder)
            entry = await origin.publish(write_checkpoint(maker, "ckpt", model=DATA), 1)
            assert entry.complete
        assert list_names(maker.folder / "store") == ["store.json", "store.lock", entry.folder.name]

    run(work)


@pytest.mark.parametrize("how", ["in place", "replaced", "removed"])
def test_a_source_that_changes_later_is_not_sent_and_its_version_dropped(
    run: Callable[..., Any], maker: Any, log: Any, how: str
) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker) as origin:
            entry = await origin.publish(folder, 1)
            if how == "in place":
                with entry.full.locate(0):
                    pass
                with (folder / "model").open("r+b") as file:
                    file.write(b"x")
            elif how == "replaced":
                (maker.folder / "new").write_bytes(change_some(DATA))
                (maker.folder / "new").replace(folder / "model")
            else:
                (folder / "model").unlink()
            for _ in range(2):
                with pytest.raises(ShardError, match="changed since"), entry.full.locate(0):
                    pass
            assert entry.gone and origin.store.entries() == []
            assert len(log.messages) == 1 and "version 1 is dropped" in log.messages[0]

    run(work)


def test_the_next_version_may_be_published_from_the_same_place(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder, later = write_checkpoint(maker, "ckpt", model=DATA), change_some(DATA)
        async with open_origin(maker) as origin:
            first = await origin.publish(folder, 1)
            with first.full.locate(0):  # its descriptor stays open
                pass
            (maker.folder / "new").write_bytes(later)
            (maker.folder / "new").replace(folder / "model")
            second = await origin.publish(folder, 2)
            with second.full.locate(0) as (descriptor, offset, size):
                assert os.pread(descriptor, size, offset) == later[:size]
            with pytest.raises(ShardError, match="changed since"), first.full.locate(0):
                pass
            assert origin.store.entries() == [second]

    run(work)


def test_a_source_that_changed_between_two_starts_is_dropped_with_a_note(
    run: Callable[..., Any], maker: Any, log: Any
) -> None:
    async def work() -> None:
        folders = [write_checkpoint(maker, name, model=DATA) for name in ("one", "two")]
        async with open_origin(maker) as origin:
            for version, folder in enumerate(folders):
                await origin.publish(folder, version)
        (folders[0] / "model").write_bytes(change_some(DATA))
        async with open_origin(maker) as origin:
            assert [entry.version for entry in origin.store.entries()] == [1]
            assert log.messages == [f"{folders[0]}: changed since it was published; version 0 is dropped"]

    run(work)


def test_a_cancelled_publish_leaves_nothing(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    async def work() -> None:
        began = threading.Event()
        hash_shards = hashing_module.hash_shards

        def hash_slowly(path: Path, shards: Any) -> list[bytes]:
            began.set()
            threading.Event().wait(0.05)
            return hash_shards(path, shards)

        monkeypatch.setattr(hashing_module, "hash_shards", hash_slowly)
        monkeypatch.setattr(hashing_module, "GROUP_BYTES", SIZE)
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            began.clear()
            task = asyncio.create_task(origin.publish(new, 2))
            await asyncio.to_thread(began.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [entry.version for entry in origin.store.entries()] == [1] and log.messages == []
            monkeypatch.undo()
            assert (await origin.publish(new, 2)).delta is not None
        assert len(list_names(maker.folder / "store")) == 4

    run(work)


def test_an_encoding_that_is_not_wanted_any_more_is_stopped(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    began, ended_by_itself = threading.Event(), threading.Event()

    def encode_for_ever(old: Path, new: Path, out: Any, **options: Any) -> None:
        for _ in range(1000):
            out.write(b"")
            began.set()
            threading.Event().wait(0.005)
        ended_by_itself.set()

    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            monkeypatch.setattr(publish_module, "encode_delta", encode_for_ever)
            task = asyncio.create_task(origin.publish(new, 2))
            await asyncio.to_thread(began.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [entry.version for entry in origin.store.entries()] == [1] and log.messages == []

    run(work)
    assert not ended_by_itself.is_set()


class FullDisk:
    """A file system with space for this many bytes of deltas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int, error: int) -> None:
        self.left, self.error = num_bytes, error
        write = publish_module._BoundedFile.write
        disk = self

        class Refusing:
            def __init__(self, file: Any) -> None:
                self._file = file

            def fileno(self) -> int:
                return int(self._file.fileno())

            def write(self, data: Any) -> int:
                disk.left -= memoryview(data).nbytes
                if disk.left < 0:
                    raise OSError(disk.error, os.strerror(disk.error))
                return int(self._file.write(data))

        def write_little(bounded: Any, data: Any) -> int:
            if not isinstance(bounded._file, Refusing):
                bounded._file = Refusing(bounded._file)
            return write(bounded, data)

        monkeypatch.setattr(publish_module._BoundedFile, "write", write_little)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("num_bytes", [0, 120])
def test_a_disk_without_room_for_the_delta_costs_the_delta_alone(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, log: Any, error: int, num_bytes: int
) -> None:
    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            with monkeypatch.context() as patch:
                FullDisk(patch, num_bytes, error)
                entry = await origin.publish(new, 2)
            assert entry.complete and entry.delta is None and log.messages == ["version 2 has no delta: no room for it"]
            assert list_names(entry.folder) == ["manifest.ndjson", "source.json"]
            assert (await origin.publish(old, 3)).delta is not None

    run(work)


def test_a_disk_that_is_full_when_the_last_bytes_are_flushed_costs_the_delta_alone(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs(maker.folder)

    class FullJob(publish_module.DeltaJob):
        def __init__(self, parent: Any, entry: Any) -> None:
            super().__init__(parent, entry)
            self.path.symlink_to("/dev/full")

    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            monkeypatch.setattr(publish_module, "DeltaJob", FullJob)
            monkeypatch.setattr(os, "fstatvfs", lambda _: room)
            entry = await origin.publish(new, 2)
            assert entry.complete and b"no room for it" in b"".join(entry.log.lines)
            assert list_names(entry.folder) == ["manifest.ndjson", "source.json"]

    run(work)


def test_a_delta_leaves_the_manifest_its_room(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            with monkeypatch.context() as patch:
                status = os.statvfs(maker.folder)
                little = os.statvfs_result((*status[:4], (1 << 16) // status.f_frsize, *status[5:]))
                patch.setattr(os, "fstatvfs", lambda _: little)
                entry = await origin.publish(new, 2)
            assert entry.complete and b"no room for it" in b"".join(entry.log.lines)

    run(work)


def test_a_disk_that_refuses_the_manifest_ends_the_publish_and_leaves_the_store_usable(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            with monkeypatch.context() as patch:
                patch.setattr(store_module, "write_at", refuse)
                with pytest.raises(OSError, match="full"):
                    await origin.publish(new, 2)
            assert [entry.version for entry in origin.store.entries()] == [1]
            assert (await origin.publish(new, 2)).complete

    run(work)


def test_the_record_that_there_is_no_delta_does_not_wait_for_the_hashes(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    hash_shards = hashing_module.hash_shards

    def hash_late(path: Path, shards: Any) -> list[bytes]:
        assert go_on.wait(10)
        return hash_shards(path, shards)

    async def work() -> None:
        old, new = (write_checkpoint(maker, name, model=os.urandom(4 * SIZE)) for name in ("old", "new"))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            monkeypatch.setattr(hashing_module, "hash_shards", hash_late)
            task = asyncio.create_task(origin.publish(new, 2))
            while origin.store.find(2) is None or not origin.store.find(2).log.delta_settled:
                await origin.store.changed.wait()
            assert origin.store.find(2).log.num_hashes == 0
            go_on.set()
            assert (await task).complete

    run(work)


def deny_reading(monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> None:
    """Make files of a name unreadable, also for root."""
    opened = os.open

    def open_but_one(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if Path(path).name == name and not flags & os.O_RDWR:
            raise OSError(error, os.strerror(error), os.fspath(path))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_but_one)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EPERM])
def test_a_file_that_cannot_be_read_is_an_error_and_never_announced(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA, closed=b"x")
        async with open_origin(maker) as origin:
            changed = origin.store.changed.wait()
            with monkeypatch.context() as patch:
                deny_reading(patch, "closed", error)
                with pytest.raises(ConfigError, match=re.escape(f"closed: cannot be read ({os.strerror(error)})")):
                    await origin.publish(folder, 1)
            assert not changed.done() and origin.store.entries() == []
            assert (await origin.publish(folder, 1)).complete

    run(work)


def test_a_file_that_fails_while_it_is_read_is_an_error_and_no_version(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, shards: Any) -> list[bytes]:
        raise OSError(errno.EIO, "Input/output error")

    async def work() -> None:
        folder = write_checkpoint(maker, "ckpt", model=DATA)
        async with open_origin(maker) as origin:
            with monkeypatch.context() as patch:
                patch.setattr(hashing_module, "hash_shards", fail)
                with pytest.raises(ConfigError, match=r"ckpt: cannot be read \(Input/output error\)"):
                    await origin.publish(folder, 1)
            assert origin.store.entries() == []

    run(work)


def test_a_parent_that_cannot_be_read_any_more_costs_the_delta_alone(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        old = write_checkpoint(maker, "old", model=DATA)
        new = write_checkpoint(maker, "new", other=change_some(DATA))
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)
            deny_reading(monkeypatch, "model", errno.EACCES)
            entry = await origin.publish(new, 2)
            assert entry.complete and b"cannot be compared with its parent" in b"".join(entry.log.lines)

    run(work)


def test_read_only_files_are_published_by_a_user_who_is_not_root() -> None:
    code = """
        import asyncio, os, sys
        from pathlib import Path
        from shoal.identity.keys import Key
        from shoal.shardcast import Origin, VersionStore

        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)

        async def main():
            key = Key.generate()
            store = await VersionStore.open(Path(sys.argv[1]) / "store", run="reef", publisher=key.public)
            origin = Origin(store, key)
            for version in (1, 2):
                entry = await origin.publish(Path(sys.argv[1]) / f"v{version}", version)
                with entry.full.locate(0) as (descriptor, offset, size):
                    os.pread(descriptor, size, offset)
            print(entry.complete, entry.delta is not None)
            await store.close()

        asyncio.run(main())
    """
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are not readable by other users
        root = Path(name)
        root.chmod(0o755)
        for version, data in ((1, DATA), (2, change_some(DATA))):
            (root / f"v{version}").mkdir()
            (root / f"v{version}" / "model").write_bytes(data)
            (root / f"v{version}" / "model").chmod(0o444)
            (root / f"v{version}").chmod(0o555)
        (root / "store").mkdir()
        (root / "store").chmod(0o777)
        command = [sys.executable, "-c", textwrap.dedent(code), name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        for version in (1, 2):
            (root / f"v{version}").chmod(0o755)
    assert done.stdout == "True True\n", done.stderr


KILLED = """
    import asyncio, sys
    from pathlib import Path
    from shoal.identity.keys import Key
    from shoal.shardcast import origin as publish
    from shoal.shardcast.store.store import VersionStore

    store, key, source = map(Path, sys.argv[1:])
    publish.FLUSH_BYTES = 1

    async def main():
        key_ = Key.load(key)
        opened = await VersionStore.open(store, run="reef", publisher=key_.public)
        origin = publish.Origin(opened, key_, shard_size=1 << 16)
        append = origin._append
        async def append_and_say(entry, record):
            await append(entry, record)
            print("line", flush=True)
        origin._append = append_and_say
        await origin.publish(source, 2)
        await asyncio.sleep(30)

    asyncio.run(main())
"""


@pytest.mark.parametrize("num_lines", [1, 20, 41])
def test_a_publisher_killed_in_the_middle_starts_again(run: Callable[..., Any], maker: Any, num_lines: int) -> None:
    old, new = (write_checkpoint(maker, name, model=data) for name, data in (("o", DATA), ("n", change_some(DATA))))
    maker.key.save(maker.folder / "key")

    async def publish_old() -> None:
        async with open_origin(maker) as origin:
            await origin.publish(old, 1)

    async def publish_again() -> None:
        async with open_origin(maker) as origin:
            found = [entry.version for entry in origin.store.entries()]
            # after 41 lines the last ones may have been written before the kill came
            assert found == [1] or (num_lines == 41 and origin.store.find(2).complete)
            assert len(list_names(origin.store.folder)) == 2 + len(found)
            entry = await origin.publish(new, 2)
            assert entry.complete and entry.delta is not None
            assert [entry.log.hash_of(FULL, 39), entry.log.hash_of(DELTA, 0)].count(None) == 0

    run(publish_old)
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED),
        *map(str, (maker.folder / "store", maker.folder / "key", new)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(num_lines):
            assert process.stdout.readline() == "line\n"
        process.send_signal(signal.SIGKILL)
    run(publish_again)


def test_input_mistakes_are_user_errors_and_leave_nothing(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_origin(maker) as origin:
            blank = write_checkpoint(maker, "blank", model=b"")
            for path, version, reason in (
                (maker.folder / "none", 1, "No such file"),
                (blank, 1, "nothing to publish"),
                (write_checkpoint(maker, "ok", model=b"x"), -1, "version = -1"),
                (maker.folder / "ok", 1 << 63, "version = "),
            ):
                with pytest.raises(ConfigError, match=reason):
                    await origin.publish(path, version)
            with pytest.raises(ConfigError, match="is not the publisher"):
                Origin(origin.store, Key.generate())
            for settings in ({"shard_size": 1000}, {"shard_size": 1 << 30}, {"anchor_every": 0}):
                with pytest.raises(ConfigError, match=re.escape(next(iter(settings)))):
                    Origin(origin.store, maker.key, **settings)
            assert list_names(origin.store.folder) == ["store.json", "store.lock"]

    run(work)


def test_names_that_do_not_fit_into_one_line_are_a_user_error(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = write_checkpoint(maker, "many", **{f"{number:0128d}": b"x" for number in range(1900)})
        async with open_origin(maker) as origin:
            with pytest.raises(ConfigError, match="fit into a manifest"):
                await origin.publish(folder, 1)

    run(work)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    code = """
        import asyncio, sys
        from pathlib import Path
        from shoal.identity.keys import Key
        from shoal.shardcast.origin import Origin
        from shoal.shardcast.store.store import VersionStore

        def read_peak():
            fields = Path("/proc/self/status").read_text().split()
            return int(fields[fields.index("RssAnon:") + 1])

        async def main():
            key = Key.generate()
            store = await VersionStore.open(Path(sys.argv[1]) / "store", run="reef", publisher=key.public)
            origin = Origin(store, key)
            before = read_peak()
            peaks = []
            task = asyncio.create_task(origin.publish(Path(sys.argv[1]) / "big", 1))
            while not task.done():
                peaks.append(read_peak())
                await asyncio.sleep(0.002)
            await task
            await store.close()
            print(before, max(peaks))

        asyncio.run(main())
    """
    with (tmp_path / "big").open("wb") as file:
        file.truncate(1 << 30)  # a hole: reads as zeros and takes no disk
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    before, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert peak < 150_000
    assert peak - before < 20_000
