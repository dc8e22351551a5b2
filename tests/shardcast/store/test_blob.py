"""Blobs on disk: allocated, restored, settled, and never trusted without their hashes."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.shards import write_bytes

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.store import blob as blob_module

SIZE = 1 << 16
FILES = {"a": os.urandom(3 * SIZE + 7), "empty": b"", "b": os.urandom(SIZE)}
DELTA = os.urandom(SIZE + 9)


async def fill_some(maker: Any, store: Any, *indices: int) -> Any:
    entry = await maker.add_lines(store, maker.make_lines(1, FILES))
    for index in indices:
        await maker.fill_shard(entry.full, index, FILES)
    return entry


def test_files_are_allocated_whole_before_the_first_byte(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store)
        assert not (entry.folder / "full.part").exists()
        assert await entry.full.prepare() == entry.folder / "full.part"
        sizes = {path.name: path.stat().st_size for path in (entry.folder / "full.part").iterdir()}
        assert sizes == {name: len(data) for name, data in FILES.items()}
        assert (entry.folder / "full.part" / "a").stat().st_blocks * 512 >= 3 * SIZE
        assert store.used_bytes == sum(sizes.values())
        await store.close()

    run(work)


def test_a_full_disk_shows_at_once_gives_the_space_back_and_leaves_the_store_usable(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        if size == SIZE:  # the second file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(OSError, match="No space left") as caught, entry.full.start(0) as writer:
                await write_bytes(writer, b"x")
            assert caught.value.filename == str(entry.folder / "full.part" / "b")
        assert sorted(path.name for path in entry.folder.iterdir()) == ["manifest.ndjson"]
        assert store.used_bytes == 0
        await maker.fill_shard(entry.full, 0, FILES)
        assert entry.full.has(0)
        await store.close()

    run(work)


def test_a_file_system_that_cannot_allocate_is_written_to_all_the_same(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    async def work() -> None:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        assert entry.complete
        await store.close()

    run(work)


def test_a_complete_blob_gets_its_final_name_and_is_forced_to_disk(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        assert entry.complete and entry.full.settled
        assert {path.name: path.read_bytes() for path in entry.full.folder.iterdir()} == FILES
        assert entry.full.folder == entry.folder / "full" and entry.full.path_of("a") == entry.folder / "full" / "a"
        await entry.full.wait_flushed()
        assert sorted(path.name for path in entry.folder.iterdir()) == ["full", "manifest.ndjson"]
        await entry.full.settle()
        assert not [path for path, _ in entry.full.open_files._open if "full.part" in path], "a name that is no more"
        await store.close()

    run(work)


def test_readers_continue_across_the_rename(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, *range(5))
        with entry.full.locate(0) as (descriptor, offset, size):
            await entry.full.settle()
            assert os.pread(descriptor, size, offset) == FILES["a"][:SIZE]
        with entry.full.locate(4) as (descriptor, offset, size):
            assert os.pread(descriptor, size, offset) == FILES["b"]
        await store.close()

    run(work)


def test_a_blob_is_not_settled_before_all_is_there(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0)
        with pytest.raises(AssertionError, match="all shards"):
            await entry.full.settle()
        unended = await maker.add_lines(store, maker.make_lines(2, {"a": b"x"})[:-1])
        await maker.fill_shard(unended.full, 0, {"a": b"x"})
        with pytest.raises(AssertionError, match="must be complete"):
            await unended.full.settle()
        await store.close()

    run(work)


def test_a_restart_keeps_what_was_verified_and_fetches_only_the_rest(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        await fill_some(maker, store, 1, 4)
        await store.close()
        store = await maker.open_store()
        entry = store.find(1)
        assert entry is not None and list(entry.full.missing()) == [0, 2, 3]
        assert entry.full.have_bytes == 2 * SIZE
        for index in (0, 2, 3):
            await maker.fill_shard(entry.full, index, FILES)
        await entry.full.settle()
        assert {path.name: path.read_bytes() for path in entry.full.folder.iterdir()} == FILES
        await store.close()

    run(work)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "remove all"])
def test_marked_shards_that_no_longer_match_are_forgotten(run: Callable[..., Any], maker: Any, damage: str) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0, 1, 4)
        await store.close()
        path = entry.folder / "full.part" / "a"
        if damage == "flip":
            with path.open("r+b") as file:
                file.seek(SIZE + 5)
                file.write(bytes([FILES["a"][SIZE + 5] ^ 1]))
            expected = [1, 2, 3]
        elif damage == "truncate":
            os.truncate(path, SIZE)
            expected = [0, 1, 2, 3]  # shards 0 and 1 are hashed in one group, which ends at the missing byte
        elif damage == "remove":
            path.unlink()
            expected = [0, 1, 2, 3]
        else:
            for each in path.parent.iterdir():
                each.unlink()
            path.parent.rmdir()
            expected = [0, 1, 2, 3, 4]
        store = await maker.open_store()
        (entry,) = store.entries()
        assert list(entry.full.missing()) == expected
        marks = (entry.folder / "full.have").read_bytes()
        assert [index for index in range(5) if not marks[index]] == expected
        for index in expected:
            await maker.fill_shard(entry.full, index, FILES)
        await entry.full.settle()
        assert {each.name: each.read_bytes() for each in entry.full.folder.iterdir()} == FILES
        await store.close()

    run(work)


@pytest.mark.parametrize("marks", [b"", b"\1" * 5, b"\1" * 10_000, b"\xff\2\0ab"])
def test_marks_alone_prove_nothing(run: Callable[..., Any], maker: Any, marks: bytes) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 1)
        await store.close()
        (entry.folder / "full.have").write_bytes(marks)
        store = await maker.open_store()
        (entry,) = store.entries()
        assert list(entry.full.missing()) == ([0, 2, 3, 4] if marks[1:2] == b"\1" else [0, 1, 2, 3, 4])
        assert (entry.folder / "full.have").stat().st_size == 5
        await store.close()

    run(work)


def test_marks_beyond_the_known_hashes_are_forgotten(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0, 4)
        await store.close()
        manifest = entry.folder / "manifest.ndjson"
        lines = manifest.read_bytes().splitlines(keepends=True)
        manifest.write_bytes(b"".join(lines[:2]) + lines[2][:50])
        store = await maker.open_store()
        (entry,) = store.entries()
        assert entry.log.num_hashes == 3 and not entry.log.ended
        assert list(entry.full.missing()) == [1, 2, 3, 4]
        assert manifest.read_bytes() == b"".join(lines[:2])
        for line in lines[2:]:
            await entry.append(line)
        await store.close()

    run(work)


def test_what_was_renamed_but_perhaps_not_on_disk_is_hashed_again(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        await store.close()
        with (entry.folder / "full" / "b").open("r+b") as file:
            file.write(bytes(100))
        store = await maker.open_store()
        assert store.entries()[0].complete  # without marks it is trusted: clients verify it themselves
        await store.close()

        (entry.folder / "full.have").write_bytes(b"\1" * 5)
        store = await maker.open_store()
        (entry,) = store.entries()
        assert not entry.full.settled and list(entry.full.missing()) == [4]
        await maker.fill_shard(entry.full, 4, FILES)
        await entry.full.settle()
        await store.close()
        assert not (entry.folder / "full.have").exists()
        assert (entry.folder / "full" / "b").read_bytes() == FILES["b"]

    run(work)


def test_what_was_renamed_and_holds_needs_nothing_more(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        await store.close()
        (entry.folder / "full.have").write_bytes(b"\1" * 5)
        store = await maker.open_store()
        assert store.entries()[0].complete and store.entries()[0].full.settled
        await store.close()
        assert not (entry.folder / "full.have").exists()

    run(work)


def test_what_had_all_its_shards_is_settled_when_the_store_is_opened(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        await fill_some(maker, store, *range(5))
        await store.close()
        store = await maker.open_store()
        assert store.entries()[0].full.settled and store.entries()[0].complete
        await store.close()

    run(work)


def test_complete_files_of_another_size_are_not_taken_back(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        await store.close()
        os.truncate(entry.folder / "full" / "a", 5)
        store = await maker.open_store()
        (entry,) = store.entries()
        assert entry.full.num_missing == 5 and not entry.full.settled
        assert not (entry.folder / "full").exists()
        await store.close()

    run(work)


def test_files_that_could_not_be_forced_to_disk_are_hashed_again_next_time(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "bad disk")

    async def work() -> None:
        store = await maker.open_store()
        with monkeypatch.context() as patch:
            patch.setattr(blob_module, "sync_path", refuse)
            entry = await maker.fill_store(store, 1, FILES)
            await entry.full.wait_flushed()
        assert len(log.messages) == 1 and "bad disk" in log.messages[0]
        await store.close()
        assert (entry.folder / "full.have").read_bytes() == b"\1" * 5

    run(work)


def test_a_delta_is_a_blob_of_one_file(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(2, FILES, parent=1, delta=DELTA)
        entry = await store.adopt(lines[0])
        assert entry.delta is None
        entry = await maker.add_lines(store, lines)
        for index in range(2):
            await maker.fill_shard(entry.delta, index, {"delta": DELTA})
        await store.close()
        store = await maker.open_store()
        (entry,) = store.entries()
        assert entry.delta.complete and entry.delta.settled
        assert entry.delta.folder == entry.delta.path_of("delta") == entry.folder / "delta"
        assert entry.delta.folder.read_bytes() == DELTA
        assert not entry.complete and entry.full.num_missing == 5
        await store.close()

    run(work)


def build_folder(entry: Any, files: dict[str, bytes]) -> Path:
    folder: Path = entry.folder / "built"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_files_made_here_are_taken_over_and_checked_like_any_others(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0)
        assert await entry.full.adopt_files(build_folder(entry, FILES)) == 0
        await entry.full.settle()
        assert {path.name: path.read_bytes() for path in entry.full.folder.iterdir()} == FILES
        await store.close()

    run(work)


def test_what_is_wrong_in_files_made_here_is_still_missing(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0)  # verified before, but replaced
        wrong = dict(FILES, a=bytes(SIZE) + FILES["a"][SIZE:])
        assert await entry.full.adopt_files(build_folder(entry, wrong)) == 1
        assert list(entry.full.missing()) == [0]
        await maker.fill_shard(entry.full, 0, FILES)
        await entry.full.settle()
        assert entry.complete
        await store.close()

    run(work)


def test_files_of_other_sizes_are_not_taken_over(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0)
        for wrong in (dict(FILES, a=b"x"), {"a": FILES["a"]}):
            folder = build_folder(entry, wrong)
            with pytest.raises(ShardError):
                await entry.full.adopt_files(folder)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        assert entry.full.has(0)
        await store.close()

    run(work)


def test_scratch_of_a_killed_process_is_removed(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store, 0)
        build_folder(entry, FILES)
        (entry.folder / "full.spare-3-0").write_bytes(b"x")
        await store.close()
        await (await maker.open_store()).close()
        assert sorted(path.name for path in entry.folder.iterdir()) == ["full.have", "full.part", "manifest.ndjson"]

    run(work)


def test_waiting_for_a_shard_of_a_large_blob_keeps_nothing_of_those_who_left(
    run: Callable[..., Any], maker: Any
) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store)
        for index in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(entry.full.claims.progress(index).wait(), 0.001)
        await asyncio.sleep(0)
        assert len(entry.full.claims._signals) == 0
        await store.close()

    run(work)


def test_a_shard_that_is_not_here_is_a_shard_error(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await fill_some(maker, store)
        with pytest.raises(ShardError, match="not available"), entry.full.locate(0):
            pass
        await store.drop(entry)
        with pytest.raises(StaleError):
            await entry.full.prepare()
        await store.close()

    run(work)
