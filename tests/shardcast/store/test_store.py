"""Stores: one process each, one entry per version, and nothing lost or wrong however the process ended."""

import asyncio
import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from shoal.errors import ConfigError, DiskError
from shoal.identity.keys import Key
from shoal.shardcast.errors import ManifestError, StaleError
from shoal.shardcast.store.store import VersionStore
from shoal.util.disk import guard_disk

SIZE = 1 << 16
FILES = {"a": os.urandom(2 * SIZE + 1)}
TOTAL = len(FILES["a"])


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def list_versions(store: VersionStore) -> list[int]:
    return [entry.version for entry in store.entries()]


def test_an_adopted_head_is_an_entry_found_by_version_and_digest(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(3, FILES)
        changed = store.changed.wait()
        entry = await store.adopt(lines[0] + b"\n")
        await changed
        assert (entry.version, entry.serial, entry.gone, entry.complete) == (3, 4, False, False)
        assert store.entries() == [entry] and await store.adopt(lines[0]) is entry
        assert store.find(3) is store.find_digest(entry.digest) is store.find_digest(entry.digest[:16]) is entry
        assert store.find(2) is store.find_digest(entry.digest[:15]) is store.find_digest("") is None
        assert entry.folder.name == f"v3-{entry.digest[:16]}"
        await store.close()

    run(work)


def test_a_head_of_another_run_or_publisher_is_refused_and_leaves_nothing(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(3, FILES)
        foreign = maker.sign_all(maker.make_head(3, FILES), key=Key.generate())
        for line in (
            lines[1],
            foreign[0],
            maker.make_lines(3, FILES, run="other")[0],
            b"",
            b"\n",
            b"{}",
            lines[0][:-1],
        ):
            with pytest.raises(ManifestError):
                await store.adopt(line)
        assert list_names(store.folder) == ["store.json", "store.lock"]
        await store.close()

    run(work)


def test_lines_are_kept_and_read_again(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(3, FILES, portion=1)
        entry = await store.adopt(lines[0])
        for line in lines[1:3]:
            grown, changed = entry.grown.wait(), store.changed.wait()
            await entry.append(line)
            await asyncio.gather(grown, changed)
        with pytest.raises(ManifestError):
            await entry.append(lines[2])
        await store.close()
        store = await maker.open_store()
        (entry,) = store.entries()
        assert list(entry.log.lines) == lines[:3]
        for line in lines[3:]:
            await entry.append(line)
        assert entry.log.ended
        assert (entry.folder / "manifest.ndjson").read_bytes() == b"".join(line + b"\n" for line in lines)
        await store.close()

    run(work)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_line_is_cut_off_when_the_store_is_opened(run: Callable[..., Any], maker: Any, cut: int) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(3, FILES, portion=1)
        entry = await maker.add_lines(store, lines)
        await store.close()
        path = entry.folder / "manifest.ndjson"
        os.truncate(path, path.stat().st_size - cut)
        store = await maker.open_store()
        (entry,) = store.entries()
        assert list(entry.log.lines) == lines[:-1]
        await entry.append(lines[-1])
        await store.close()
        assert path.read_bytes() == b"".join(line + b"\n" for line in lines)

    run(work)


def test_a_line_that_the_disk_refused_is_not_in_the_log_either(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def write_half(descriptor: int, data: Any, offset: int) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data[: len(data) - 20], offset)

    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(3, FILES, portion=1)
        entry = await store.adopt(lines[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_half)
            with pytest.raises(OSError, match="full"):
                await entry.append(lines[1])
        assert list(entry.log.lines) == lines[:1]
        assert (entry.folder / "manifest.ndjson").read_bytes() == lines[0] + b"\n"
        await maker.add_lines(store, lines)
        await store.close()
        store = await maker.open_store()
        assert list(store.entries()[0].log.lines) == lines
        await store.close()

    run(work)


def test_a_larger_serial_replaces_a_version_and_a_smaller_one_is_stale(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        first = await maker.fill_store(store, 3, FILES, serial=10)
        second = await store.adopt(maker.make_lines(3, {"a": b"new"}, serial=11)[0])
        assert first.gone and store.entries() == [second] and not store.is_gone(3)
        assert store.find_digest(first.digest) is None
        for serial in (9, 10, 11):
            with pytest.raises(StaleError, match="replaced"):
                await store.adopt(maker.make_lines(3, {"a": b"older"}, serial=serial)[0])
        await store.close()
        assert list_names(store.folder) == ["store.json", "store.lock", second.folder.name]

    run(work)


def test_of_two_folders_of_one_version_the_larger_serial_is_taken_back(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        for serials in ((10, 11), (11, 10)):
            name = f"store{serials[0]}"
            for number, serial in enumerate(serials):
                store = await maker.open_store(f"{name}-{number}")
                await store.adopt(maker.make_lines(3, {"a": str(serial).encode()}, serial=serial)[0])
                await store.close()
                for folder in store.folder.glob("v3-*"):
                    (maker.folder / name).mkdir(exist_ok=True)
                    folder.rename(maker.folder / name / folder.name)
            store = await maker.open_store(name)
            assert [entry.serial for entry in store.entries()] == [11]
            assert len(list(store.folder.glob("v3-*"))) == 1
            await store.close()

    run(work)


def test_the_newest_versions_are_kept_and_the_newest_complete_one(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store(keep=2)
        await maker.fill_store(store, 1, FILES)
        await maker.fill_store(store, 2, FILES)
        for version in (3, 4, 5):
            await store.adopt(maker.make_lines(version, FILES)[0])
        assert list_versions(store) == [2, 4, 5]
        assert [version for version in range(8) if store.is_gone(version)] == [0, 1, 3]
        await maker.fill_store(store, 5, FILES)
        await store.trim()
        assert list_versions(store) == [4, 5]
        with pytest.raises(StaleError, match="older than the versions kept"):
            await store.adopt(maker.make_lines(3, FILES)[0])
        await store.close()
        store = await maker.open_store(keep=2)
        assert list_versions(store) == [4, 5] and store.is_gone(3) and not store.is_gone(6)
        await store.close()

    run(work)


def test_a_store_that_is_not_full_takes_older_versions_too(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store(keep=2)
        await store.adopt(maker.make_lines(9, FILES)[0])
        await store.adopt(maker.make_lines(3, FILES)[0])
        assert list_versions(store) == [3, 9]
        await store.adopt(maker.make_lines(5, FILES)[0])
        assert list_versions(store) == [5, 9]
        await store.close()

    run(work)


def test_what_is_held_is_never_deleted_and_removed_when_it_is_let_go(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store(keep=1)
        old = await maker.fill_store(store, 1, FILES)
        with old.hold(), old.hold():
            new = await maker.fill_store(store, 2, FILES)
            await store.trim()
            assert list_versions(store) == [1, 2]  # in use: not even dropped
            await store.drop(old)
            assert old.gone and list_versions(store) == [2] and store.is_gone(1)
            assert old.full.path_of("a").read_bytes() == FILES["a"]
            with old.full.locate(0) as (descriptor, offset, size):
                assert os.pread(descriptor, size, offset) == FILES["a"][:SIZE]
            with pytest.raises(StaleError, match="older than"):
                await store.adopt(old.log.lines[0])
            assert store.used_bytes == 2 * TOTAL
        assert old.folder.exists()
        await store.close()
        assert list_names(store.folder) == ["store.json", "store.lock", new.folder.name]
        with pytest.raises(StaleError), old.hold():
            pass

    run(work)


def test_a_version_that_is_being_removed_is_not_taken_again_before_it_is_gone(
    run: Callable[..., Any], maker: Any
) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        with entry.hold():
            await store.drop(entry)
            with pytest.raises(StaleError, match="being removed"):
                await store.adopt(entry.log.lines[0])
        again = None
        while again is None:  # refused until the last file is gone, which no file name shows
            with contextlib.suppress(StaleError):
                again = await store.adopt(entry.log.lines[0])
            await asyncio.sleep(0.001)
        assert again is not entry and not again.complete
        await store.close()

    run(work)


def test_a_dropped_version_does_not_come_back_if_its_reader_never_released_it(
    run: Callable[..., Any], maker: Any
) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        with entry.hold():
            await store.drop(entry)
            await store.close()
            store = await maker.open_store()
            assert store.entries() == [] and list_names(store.folder) == ["store.json", "store.lock"]
            await store.close()
            entry._num_holds += 1  # the reader of a process that has exited

    run(work)


def test_a_dropped_entry_takes_no_lines_and_wakes_who_waits(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        lines = maker.make_lines(1, FILES)
        entry = await store.adopt(lines[0])
        waits = [entry.grown.wait(), store.changed.wait()]
        await store.drop(entry)
        await asyncio.gather(*waits)
        with pytest.raises(StaleError):
            await entry.append(lines[1])
        await store.drop(entry)
        again = await store.adopt(lines[0])
        assert again is not entry and store.find(1) is again and not store.is_gone(1)
        await store.close()

    run(work)


def test_a_limit_of_bytes_drops_the_oldest_and_spares_what_is_held(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store(max_bytes=2 * TOTAL)
        for version in (1, 2, 3):
            await maker.fill_store(store, version, FILES)
        assert list_versions(store) == [2, 3] and store.used_bytes == 2 * TOTAL
        with store.find(2).hold():
            await maker.fill_store(store, 4, FILES)
            assert list_versions(store) == [2, 4]
            with store.find(4).hold(), pytest.raises(OSError, match="needs more than") as caught:
                await maker.fill_store(store, 5, FILES)
            assert caught.value.errno == errno.EDQUOT
        assert list_versions(store) == [2, 4, 5] and store.used_bytes == 2 * TOTAL
        await maker.fill_store(store, 5, FILES)
        assert list_versions(store) == [4, 5]
        await store.close()
        store = await maker.open_store(max_bytes=TOTAL)
        assert list_versions(store) == [5]
        await store.close()

    run(work)


def test_a_version_that_can_never_fit_costs_no_other(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store(max_bytes=2 * TOTAL)
        await maker.fill_store(store, 1, FILES)
        with pytest.raises(OSError, match="needs more than"):
            await maker.fill_store(store, 2, {"a": bytes(3 * TOTAL)})
        newer = await maker.fill_store(store, 3, FILES)
        await store.drop(store.find(1))
        await maker.fill_store(store, 2, FILES, serial=50)
        with pytest.raises(OSError, match="needs more than"):  # an older version does not evict newer ones
            await maker.fill_store(store, 0, FILES)
        assert newer.complete and list_versions(store) == [0, 2, 3]
        await store.close()

    run(work)


def test_a_second_store_in_one_folder_is_refused_with_a_clear_message(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}; wait for it or choose another folder"):
            await maker.open_store()
        code = f"""
            import asyncio, sys
            from pathlib import Path
            from shoal.shardcast.store.store import VersionStore
            asyncio.run(VersionStore.open(Path({str(store.folder)!r}), run="reef", publisher={maker.key.public!r}))
        """
        found = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert f"in use by process {os.getpid()};" in found.stderr
        await store.close()
        await store.close()
        await (await maker.open_store()).close()

    run(work)


def test_a_folder_of_another_run_or_publisher_is_refused_and_left_alone(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await maker.fill_store(store, 1, FILES)
        await store.close()
        other = Key.generate().public
        for run_name, publisher in (("reef", other), ("other", maker.key.public)):
            with pytest.raises(ConfigError, match="a different run or publisher"):
                await VersionStore.open(store.folder, run=run_name, publisher=publisher)
        assert entry.full.path_of("a").read_bytes() == FILES["a"]
        (store.folder / "store.json").write_text("{")
        with pytest.raises(ConfigError, match="cannot be read"):
            await maker.open_store()

    run(work)


@pytest.mark.parametrize("settings", [{"run": "A b"}, {"run": ""}, {"publisher": "00"}, {"keep": 0}, {"max_bytes": 0}])
def test_invalid_settings_are_user_errors(run: Callable[..., Any], maker: Any, settings: Any) -> None:
    async def work() -> None:
        given = {"run": "reef", "publisher": maker.key.public} | settings
        with pytest.raises(ConfigError):
            await VersionStore.open(maker.folder / "store", **given)
        assert not (maker.folder / "store").exists()

    run(work)


def test_a_folder_that_cannot_be_used_is_a_user_error(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        (maker.folder / "file").write_text("x")
        for name in ("file", "file/below"):
            with pytest.raises(ConfigError, match="cannot be used as a store"):
                await maker.open_store(name)

    run(work)


def test_what_is_not_ours_in_the_folder_is_left_alone(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        outside = maker.folder / "outside"
        outside.mkdir()
        (outside / "dear").write_text("x")
        store = await maker.open_store()
        await store.close()
        (store.folder / "notes.txt").write_text("mine")
        (store.folder / "v1").mkdir()
        (store.folder / f"v2-{'0' * 16}").symlink_to(outside)
        (store.folder / f"v3-{'0' * 16}").write_text("a file")
        (store.folder / f"v4-{'0' * 16}").mkdir()  # ours, without a manifest
        store = await maker.open_store()
        assert store.entries() == []
        await store.close()
        kept = ["notes.txt", "store.json", "store.lock", "v1", f"v2-{'0' * 16}", f"v3-{'0' * 16}"]
        assert list_names(store.folder) == kept and (outside / "dear").exists()

    run(work)


def test_a_folder_with_the_manifest_of_another_version_is_removed(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        entry = await store.adopt(maker.make_lines(1, FILES)[0])
        await store.close()
        entry.folder.rename(entry.folder.with_name(entry.folder.name.replace("v1", "v2")))
        store = await maker.open_store()
        assert store.entries() == [] and list_names(store.folder) == ["store.json", "store.lock"]
        await store.close()

    run(work)


def test_a_head_that_the_disk_refused_leaves_no_folder(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full", str(path))

    async def work() -> None:
        store = await maker.open_store()
        line = maker.make_lines(1, FILES)[0]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", refuse)
            with pytest.raises(OSError, match="full"):
                await store.adopt(line)
        assert store.entries() == [] and list_names(store.folder) == ["store.json", "store.lock"]
        assert await store.adopt(line) in store.entries()
        await store.close()

    run(work)


KILLED = """
    import asyncio, random, sys
    from pathlib import Path
    from shoal.shardcast.store.store import VersionStore
    from tests.fixtures.shards import write_bytes

    folder, publisher, manifest, data, seed = sys.argv[1:]
    lines = Path(manifest).read_bytes().splitlines()
    data = Path(data).read_bytes()
    order = random.Random(int(seed))

    async def write_shard(entry, index):
        shard = entry.full.layout.shards[index]
        with entry.full.start(index) as writer:
            for start in range(shard.offset, shard.offset + shard.size, 40000):
                end = min(start + 40000, shard.offset + shard.size)
                await write_bytes(writer, data[start:end])
            await writer.finish()

    async def main():
        store = await VersionStore.open(Path(folder), run="reef", publisher=publisher)
        print("open", flush=True)
        entry = await store.adopt(lines[0])
        for line in lines[len(entry.log.lines):]:
            await entry.append(line)
        missing = list(entry.full.missing())
        order.shuffle(missing)
        for start in range(0, len(missing), 4):
            await asyncio.gather(*(write_shard(entry, index) for index in missing[start : start + 4]))
        await entry.full.settle()
        await store.close()
        print("done", flush=True)

    asyncio.run(main())
"""


def test_a_writer_killed_at_any_moment_leaves_only_valid_shards(run: Callable[..., Any], maker: Any) -> None:
    data = os.urandom(200 * SIZE + 17)
    lines = maker.make_lines(1, {"a": data}, portion=40)
    (maker.folder / "manifest").write_bytes(b"\n".join(lines))
    (maker.folder / "data").write_bytes(data)
    paths = [maker.folder / "store", maker.key.public, maker.folder / "manifest", maker.folder / "data"]
    chance = random.Random(4)
    progress = []

    async def look() -> bool:
        store = await maker.open_store()
        try:
            if not store.entries():
                return False
            (entry,) = store.entries()
            for shard in entry.full.layout.shards:
                if entry.full.has(shard.index):
                    with entry.full.locate(shard.index) as (descriptor, offset, size):
                        assert blake3(os.pread(descriptor, size, offset)).digest() == entry.full.hash_of(shard.index)
            progress.append(entry.full.have_bytes)
            return entry.complete
        finally:
            await store.close()

    for attempt in range(60):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), *map(str, paths), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
            time.sleep(chance.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        if run(look):
            break
    assert progress == sorted(progress), "what was verified once is not lost by a kill"
    assert len(set(progress)) >= 3, "it was killed in the middle, several times"
    subprocess.run(command, check=True, capture_output=True)
    assert run(look) and (next((maker.folder / "store").glob("v1-*")) / "full" / "a").read_bytes() == data


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_gives_the_version_up_and_the_rest_stays(
    run: Callable[..., Any], maker: Any, small_disk: Path
) -> None:
    async def work() -> None:
        maker.folder = small_disk
        store = await maker.open_store()
        first = await maker.fill_store(store, 1, FILES)
        with pytest.raises(DiskError, match=re.escape(os.strerror(errno.ENOSPC))), guard_disk(small_disk):
            await maker.fill_store(store, 2, {"a": bytes(SIZE), "b": bytes(1 << 20)})
        second = store.find(2)
        assert second is not None and list_names(second.folder) == ["manifest.ndjson"]
        await store.drop(second)
        third = await maker.fill_store(store, 3, FILES)
        await store.close()
        store = await maker.open_store()
        assert list_versions(store) == [1, 3]
        for entry in (first, third):
            assert entry.full.path_of("a").read_bytes() == FILES["a"]
        await store.close()

    run(work)


def test_the_store_says_whose_it_is(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        store = await maker.open_store()
        assert json.loads((store.folder / "store.json").read_text()) == {
            "format": 1,
            "run": "reef",
            "publisher": maker.key.public,
        }
        assert (store.folder / "store.lock").read_text() == f"{os.getpid()}\n"
        await store.close()

    run(work)
