"""Versions for a running origin: published once, in order, and never silently lost."""

import asyncio
import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError, DiskError
from shoal.shardcast import origin_watch
from shoal.shardcast.origin_watch import PublishedVersion, VersionWatch, request_publish, withdraw
from shoal.shardcast.store.lock import LOCK
from shoal.util import files


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulates whether an origin uses the folder."""
    found = SimpleNamespace(is_served=True)
    monkeypatch.setattr(origin_watch, "find_owner", lambda _: object() if found.is_served else None)
    return found


def entry_of(version: int) -> Any:
    log = SimpleNamespace(root=f"root{version}", head=SimpleNamespace(shard_size=64))
    return SimpleNamespace(version=version, log=log, digest=f"digest{version}")


async def publish_well(path: Path, version: int) -> Any:
    return entry_of(version)


def result_of(version: int) -> PublishedVersion:
    return PublishedVersion(version, f"root{version}", f"digest{version}", 64)


def exchange(folder: Path, publish: Any, ask: Any, **settings: Any) -> Any:
    """Run `ask()` while the folder is watched."""

    async def run() -> Any:
        async with asyncio.timeout(20):
            watch = VersionWatch(folder, settings)
            watching, asking = asyncio.create_task(watch.run(publish)), asyncio.create_task(ask())
            try:
                done, _ = await asyncio.wait({watching, asking}, return_when=asyncio.FIRST_COMPLETED)
                assert watching not in done, watching
                result = await asking
                while any((folder / "versions").glob("*.taken")):  # removed after the line is written
                    await asyncio.sleep(0.01)
                return result
            finally:
                watching.cancel()

    return asyncio.run(run())


def list_links(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "versions").iterdir())


async def ask_for(folder: Path, version: int = 1, **options: Any) -> PublishedVersion:
    return await request_publish(folder, folder / f"c{version}", version, **options)


def test_a_version_is_published_once_and_its_hashes_are_on_disk(tmp_path: Path) -> None:
    seen = []

    async def publish(path: Path, version: int) -> Any:
        seen.append((path, version))
        return entry_of(version)

    async def ask() -> list[PublishedVersion]:
        return [await ask_for(tmp_path, version) for version in (1, 2, 3)]

    assert exchange(tmp_path, publish, ask) == [result_of(version) for version in (1, 2, 3)]
    assert seen == [((tmp_path / f"c{version}").resolve(), version) for version in (1, 2, 3)]
    lines = [json.loads(line) for line in (tmp_path / "published.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3]
    assert (lines[0]["root"], lines[0]["manifest"]) == ("root1", "digest1")
    assert list_links(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("ck: is empty"), ConfigError, "ck: is empty"),
        (DiskError("d: is full"), DiskError, "d: is full"),
        (OSError(errno.ENOSPC, "No space left"), DiskError, r"c1: not published \(No space left\)"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), DiskError, "Permission denied"),
    ],
)
def test_a_failure_is_reported_to_the_caller_and_the_next_version_is_published(
    tmp_path: Path, error: Exception, kind: type[Exception], text: str
) -> None:
    async def publish(path: Path, version: int) -> Any:
        if version == 1:
            raise error
        return entry_of(version)

    async def ask() -> PublishedVersion:
        with pytest.raises(kind, match=text):
            await ask_for(tmp_path)
        return await ask_for(tmp_path, 2)

    assert exchange(tmp_path, publish, ask) == result_of(2)


@pytest.mark.parametrize("name", ["odd", "v1", "v-1-" + "a" * 32, "v01-" + "a" * 32, "v1-" + "g" * 32])
def test_other_files_in_the_folder_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / name).symlink_to(tmp_path)
    (tmp_path / "versions" / ("v1-" + "a" * 32)).write_text("not a link")

    async def ask() -> PublishedVersion:
        return await ask_for(tmp_path, 2)

    assert exchange(tmp_path, publish_well, ask) == result_of(2)
    assert list_links(tmp_path) == sorted([name, "v1-" + "a" * 32])


def test_a_line_that_cannot_be_written_ends_the_wait_and_not_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    async def ask() -> PublishedVersion:
        with monkeypatch.context() as patch:
            patch.setattr(origin_watch, "append_line", refuse)
            with pytest.raises(DiskError, match="could not record the result"):
                await ask_for(tmp_path)
        assert origin_watch.append_line is files.append_line
        return await ask_for(tmp_path, 2)

    assert exchange(tmp_path, publish_well, ask) == result_of(2)
    assert len(log.messages) == 1 and "published.jsonl: cannot be written (No space left)" in log.messages[0]


def test_an_origin_that_exited_is_noticed_and_the_link_withdrawn(tmp_path: Path, served: SimpleNamespace) -> None:
    served.is_served = False
    with pytest.raises(ConfigError, match="exited before publishing"):
        asyncio.run(ask_for(tmp_path))
    assert list_links(tmp_path) == []


def test_an_origin_that_takes_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no response from the origin"):
        asyncio.run(ask_for(tmp_path, silence_s=0.3))
    assert list_links(tmp_path) == []


def test_an_origin_that_is_long_at_work_is_waited_for(tmp_path: Path) -> None:
    async def publish(path: Path, version: int) -> Any:
        await asyncio.sleep(1.5)
        return entry_of(version)

    async def ask() -> list[PublishedVersion]:
        return await asyncio.gather(ask_for(tmp_path, 1, silence_s=1.0), ask_for(tmp_path, 2, silence_s=1.0))

    assert exchange(tmp_path, publish, ask) == [result_of(1), result_of(2)]


def test_a_withdrawn_link_is_not_published_and_one_that_was_begun_is(tmp_path: Path, log: Any) -> None:
    began, go_on, seen = asyncio.Event(), asyncio.Event(), []

    async def publish(path: Path, version: int) -> Any:
        seen.append(version)
        began.set()
        await go_on.wait()
        return entry_of(version)

    async def ask() -> None:
        first = asyncio.create_task(ask_for(tmp_path, 1))
        await began.wait()
        second = asyncio.create_task(ask_for(tmp_path, 2))
        while len(list_links(tmp_path)) < 2:
            await asyncio.sleep(0.01)
        for task in (first, second):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        go_on.set()
        assert await ask_for(tmp_path, 3) == result_of(3)

    exchange(tmp_path, publish, ask)
    assert seen == [1, 3] and log.messages == ["the origin has already started publishing v1 and continues"]


def test_links_from_before_the_origin_started_are_removed(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    old = tmp_path / "versions" / ("v7-" + "a" * 32)
    for path in (old, old.with_name(old.name + ".taken")):
        path.symlink_to(tmp_path)
        os.utime(path, ns=(0, 10**18), follow_symlinks=False)
    (tmp_path / LOCK).write_text("1 origin\n")
    os.utime(tmp_path / LOCK, ns=(0, 10**18 + 1))
    seen = []

    async def publish(path: Path, version: int) -> Any:
        seen.append(version)
        return entry_of(version)

    exchange(tmp_path, publish, lambda: ask_for(tmp_path, 8))
    assert seen == [8] and list_links(tmp_path) == []


def test_links_created_while_the_origin_started_are_published(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("1 origin\n")
    os.utime(tmp_path / LOCK, ns=(0, 10**18))

    async def check() -> PublishedVersion:
        asking = asyncio.create_task(ask_for(tmp_path, 7))
        while not (tmp_path / "versions").exists() or not list_links(tmp_path):
            await asyncio.sleep(0.01)
        watching = asyncio.create_task(VersionWatch(tmp_path).run(publish_well))
        try:
            return await asyncio.wait_for(asking, 20)
        finally:
            watching.cancel()

    assert asyncio.run(check()) == result_of(7)


def test_settings_that_differ_from_the_origins_are_refused_by_name(tmp_path: Path) -> None:
    async def ask() -> PublishedVersion:
        with pytest.raises(ConfigError, match="--keep: the origin serving this folder was started with a different"):
            await ask_for(tmp_path, given={"--keep": 4})
        return await ask_for(tmp_path, given={"--keep": 5, "--signer": ["a"]})

    settings: Any = {"--keep": 5, "--signer": ["a"]}
    assert exchange(tmp_path, publish_well, ask, **settings) == result_of(1)


def test_only_the_owner_may_leave_links(tmp_path: Path) -> None:
    VersionWatch(tmp_path)
    assert (tmp_path / "versions").stat().st_mode & 0o777 == 0o700


def test_a_link_is_withdrawn_once(tmp_path: Path) -> None:
    link = tmp_path / "v1"
    link.symlink_to(tmp_path)
    assert withdraw(link) and not withdraw(link)


def test_publishing_forces_nothing_to_disk_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync: Callable[[int], None] = os.fsync
    threads = set()

    def sync_and_say(descriptor: int) -> None:
        threads.add(threading.current_thread())
        sync(descriptor)

    async def ask() -> None:
        monkeypatch.setattr(os, "fsync", sync_and_say)
        await ask_for(tmp_path)

    exchange(tmp_path, publish_well, ask)
    assert threads and threading.main_thread() not in threads
