"""Folders that are published while they are written: served file by file, and never ended without their writer."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.growing import (
    has_file,
    is_growing,
    list_growing,
    open_growing,
    read_plan,
    remove_stale,
)
from shoal.shardcast.origin import compute_root
from shoal.shardcast.store.origin_files import scan_source

SIZE = 1 << 16
FILES = {"config.json": b"{}", "model-1": os.urandom(3 * SIZE + 5), "model-2": os.urandom(2 * SIZE), "vocab": b"abc"}
SIZES = {name: len(data) for name, data in FILES.items()}


class Writer:
    """Writes a growing folder, file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = ExitStack()
        announce = self.stack.enter_context(open_growing(folder))
        announce(SIZES)

    def put(self, *names: str, files: dict[str, bytes] = FILES) -> None:
        for name in names:
            (self.folder / f".{name}.part").write_bytes(files[name])
            (self.folder / f".{name}.part").rename(self.folder / name)

    def close(self) -> None:
        self.stack.close()

    def fail(self) -> None:
        error = OSError("the disk is full")
        assert not self.stack.__exit__(OSError, error, None), "the error must pass"


async def until(happens: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (result := happens()):
            await asyncio.sleep(0.01)
        return result


def test_a_folder_counts_as_complete_when_its_marker_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    with open_growing(folder) as announce:
        with pytest.raises(ConfigError, match="still being written"):
            read_plan(folder)
        announce(SIZES)
        assert is_growing(folder) and read_plan(folder) == SIZES and list_growing(tmp_path) == {"v1"}
        (folder / "a").write_bytes(b"1")
        assert has_file(folder, "a") and not has_file(folder, "b")
    assert not is_growing(folder) and read_plan(folder) is None and list_growing(tmp_path) == set()
    with pytest.raises(ConfigError, match="has no b, which its writer announced"):
        has_file(folder, "b")


def test_nothing_is_left_of_a_folder_whose_writer_failed(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "v1")
    writer.put("config.json")
    writer.fail()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_was_killed_is_noticed_and_what_it_left_is_removed(tmp_path: Path) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from shoal.shardcast.growing import open_growing
        with open_growing(Path({str(tmp_path / "v1")!r})) as announce:
            announce({{"a": 1, "b": 1}})
            (Path({str(tmp_path / "v1")!r}) / "a").write_bytes(b"1")
            print("there", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        remove_stale(tmp_path)
        assert is_growing(tmp_path / "v1") and has_file(tmp_path / "v1", "a")
        child.send_signal(signal.SIGKILL)
    with pytest.raises(ConfigError, match="its writer ended before all files were complete"):
        is_growing(tmp_path / "v1")
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


@asynccontextmanager
async def publishing(net: Any, folder: Path, version: int) -> AsyncIterator["asyncio.Task[Any]"]:
    task = asyncio.create_task(net.origin.publish(folder, version))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_files_are_hashed_and_fetched_while_later_ones_are_written(
    run: Callable[[Callable[[], Awaitable[None]]], None], open_network: Callable[..., Any]
) -> None:
    async def work() -> None:
        async with open_network() as net:
            writer = Writer(net.root / "v7")
            async with publishing(net, writer.folder, 7) as task:
                client = await net.client(net.url)
                pull = asyncio.create_task(client.pull())
                writer.put("config.json", "model-1")
                entry = await until(lambda: net.store.find(7))
                held = await until(lambda: client.store.find(7))
                await until(lambda: held.full.have_bytes == SIZES["config.json"] + SIZES["model-1"])
                assert entry.log.num_hashes == 5 and not entry.complete and not task.done() and not pull.done()
                writer.put("model-2", "vocab")
                await until(lambda: held.full.num_missing == 0)
                assert not entry.log.ended and not pull.done(), "all files are there, but the writer has not finished"
                writer.close()
                folder = await pull
                await task
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
            assert entry.log.root == compute_root(writer.folder, SIZE)
            assert entry.source == scan_source(writer.folder)

    run(work)


def test_a_shard_that_is_not_written_yet_cannot_be_fetched_and_harms_nobody(
    run: Callable[[Callable[[], Awaitable[None]]], None], open_network: Callable[..., Any]
) -> None:
    async def work() -> None:
        async with open_network() as net:
            writer = Writer(net.root / "v7")
            async with publishing(net, writer.folder, 7) as task:
                writer.put("config.json", "model-1")
                entry = await until(lambda: net.store.find(7))
                await until(lambda: entry.log.num_hashes == 5)
                early = asyncio.create_task(net.get(net.server.url, f"/v/7/{entry.digest[:16]}/full/6"))
                await asyncio.sleep(0.2)
                assert not early.done() and net.store.find(7) is entry
                writer.put("model-2", "vocab")
                answer = await early
                assert (answer.status, answer.body) == (200, FILES["model-2"][SIZE:])
                writer.close()
                await task

    run(work)


@pytest.mark.parametrize("arrived", [(), ("config.json", "model-1"), tuple(FILES)], ids=["none", "some", "all"])
def test_a_version_whose_writer_fails_is_dropped_and_never_ends(
    run: Callable[[Callable[[], Awaitable[None]]], None], open_network: Callable[..., Any], arrived: tuple[str, ...]
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(6, FILES)
            writer = Writer(net.root / "v7")
            async with publishing(net, writer.folder, 7) as task:
                entry = await until(lambda: net.store.find(7))
                writer.put(*arrived)
                await asyncio.sleep(0.2)
                writer.fail()
                with pytest.raises(ConfigError, match=r"which its writer announced|changed while|cannot be read"):
                    await task
            assert entry.gone and not entry.log.ended and net.store.find(7) is None
            writer = Writer(net.root / "v7")  # the same step again
            async with publishing(net, writer.folder, 7) as task:
                writer.put(*FILES)
                writer.close()
                assert (await task).log.root == compute_root(writer.folder, SIZE)

    run(work)


def test_a_file_of_another_size_than_announced_is_refused(
    run: Callable[[Callable[[], Awaitable[None]]], None], open_network: Callable[..., Any]
) -> None:
    async def work() -> None:
        async with open_network() as net:
            writer = Writer(net.root / "v7")
            async with publishing(net, writer.folder, 7) as task:
                writer.put("config.json", files={"config.json": b"{ }"})
                with pytest.raises(ConfigError, match="its writer announced another number"):
                    await task
            assert net.store.find(7) is None
            writer.close()

    run(work)


def test_a_growing_folder_has_a_delta_to_the_version_before(
    run: Callable[[Callable[[], Awaitable[None]]], None], open_network: Callable[..., Any]
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(6, FILES)
            client = await net.client(net.url)
            await client.pull()
            changed = FILES | {"model-2": FILES["model-2"][:-1] + b"!"}
            writer = Writer(net.root / "v7")
            async with publishing(net, writer.folder, 7) as task:
                writer.put("config.json", "model-1")
                await until(lambda: (entry := net.store.find(7)) and entry.log.num_hashes == 5)
                writer.put("model-2", "vocab", files=changed)
                writer.close()
                entry = await task
            assert entry.delta is not None and entry.delta.layout.total < SIZE
            folder = await client.pull(7)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == changed
            assert client.store.find(7).delta is not None

    run(work)
