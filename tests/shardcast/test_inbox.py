"""Asking a serving origin to publish: answered once, in order, and never silently lost."""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import files
from shoal.errors import ConfigError, DiskError
from shoal.shardcast import inbox as inbox_module
from shoal.shardcast.inbox import Inbox, Request, ask_publish, wait_answer, withdraw_request
from shoal.shardcast.lock import LOCK


def exchange(folder: Path, publish: Any, ask: Any, *, served: bool = True, notes: list[str] | None = None) -> Any:
    """Run `ask()` while the inbox is served."""

    async def run() -> Any:
        async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
            if served:
                inbox = await stack.enter_async_context(Inbox(folder, ([] if notes is None else notes).append))
                server = asyncio.create_task(inbox.serve(publish))
                stack.callback(server.cancel)
                asking = asyncio.create_task(ask())
                done, _ = await asyncio.wait({server, asking}, return_when=asyncio.FIRST_COMPLETED)
                assert server not in done, server
                return await asking
            return await ask()

    return asyncio.run(run())


def ask_for(folder: Path, version: int = 1, **flags: Any) -> Path:
    return ask_publish(folder, Request(folder / "ck", version, flags))


def list_inbox(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "inbox").iterdir() if path.name != "alive")


async def publish_well(request: Request) -> str:
    return f"digest{request.version}"


def always() -> bool:
    return True


def test_a_request_is_published_and_answered_once(tmp_path: Path) -> None:
    seen = []

    async def publish(request: Request) -> str:
        seen.append(request)
        return f"digest{request.version}"

    async def ask() -> list[str]:
        requests = [ask_for(tmp_path, version, **{"--keep": version}) for version in (1, 2, 3)]
        return [await wait_answer(request, always) for request in requests]

    assert exchange(tmp_path, publish, ask) == ["digest1", "digest2", "digest3"]
    assert seen == [Request(tmp_path / "ck", version, {"--keep": version}) for version in (1, 2, 3)]
    assert list_inbox(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("ck: is empty"), ConfigError, "ck: is empty"),
        (DiskError("d: is full"), DiskError, "d: is full"),
        (OSError(errno.ENOSPC, "No space left"), DiskError, r"ck: not published \(No space left\)"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), DiskError, "Permission denied"),
    ],
)
def test_what_goes_wrong_comes_back_as_the_askers_error_and_the_next_is_served(
    tmp_path: Path, error: Exception, kind: type[Exception], text: str
) -> None:
    async def publish(request: Request) -> str:
        if request.version == 1:
            raise error
        return "fine"

    async def ask() -> str:
        with pytest.raises(kind, match=text):
            await wait_answer(ask_for(tmp_path), always)
        return await wait_answer(ask_for(tmp_path, 2), always)

    assert exchange(tmp_path, publish, ask) == "fine"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b'{"path": 3}', b'{"path": "a", "version": "x", "flags": {}}', b"\xff", b"[" * 9999],
)
def test_nonsense_in_the_inbox_is_answered_and_does_not_stop_it(tmp_path: Path, text: bytes) -> None:
    async def ask() -> str:
        good, odd = ask_for(tmp_path), tmp_path / "inbox" / "odd.json"
        odd.write_bytes(text)
        with pytest.raises(ConfigError, match="no request to publish"):
            await wait_answer(odd, always)
        return await wait_answer(good, always)

    assert exchange(tmp_path, publish_well, ask) == "digest1"


def test_an_answer_that_cannot_be_written_ends_the_wait_and_not_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        if path.suffix == ".done":
            raise OSError(errno.ENOSPC, "No space left")
        files.write_atomic(path, data)

    notes: list[str] = []

    async def ask() -> str:
        request = ask_for(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(inbox_module, "write_atomic", refuse)
            with pytest.raises(DiskError, match="could not answer"):
                await wait_answer(request, always)
        return await wait_answer(ask_for(tmp_path, 2), always)

    assert exchange(tmp_path, publish_well, ask, notes=notes) == "digest2"
    assert notes == ["a request to publish cannot be answered (No space left)"]


def test_an_origin_that_went_away_is_noticed_and_the_request_withdrawn(tmp_path: Path) -> None:
    async def ask() -> None:
        await wait_answer(ask_for(tmp_path), lambda: False)

    with pytest.raises(ConfigError, match="ended before it published"):
        exchange(tmp_path, None, ask, served=False)
    assert list_inbox(tmp_path) == []


def test_an_origin_that_shows_no_life_is_not_waited_for(tmp_path: Path) -> None:
    async def ask() -> None:
        await wait_answer(ask_for(tmp_path), always, silence_s=0.3)

    with pytest.raises(ConfigError, match="has shown no life for"):
        exchange(tmp_path, None, ask, served=False)
    assert list_inbox(tmp_path) == []


def test_an_origin_that_is_long_at_work_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "BEAT_S", 0.05)

    async def publish(request: Request) -> str:
        await asyncio.sleep(1.5)
        return "late"

    async def ask() -> str:
        return await wait_answer(ask_for(tmp_path), always, silence_s=1.0)

    assert exchange(tmp_path, publish, ask) == "late"


def test_a_withdrawn_request_is_not_carried_out_and_one_under_way_cannot_be(tmp_path: Path) -> None:
    began, go_on, seen = asyncio.Event(), asyncio.Event(), []

    async def publish(request: Request) -> str:
        seen.append(request.version)
        began.set()
        await go_on.wait()
        return "done"

    async def ask() -> None:
        first, second = ask_for(tmp_path, 1), None
        await began.wait()
        second = ask_for(tmp_path, 2)
        assert not withdraw_request(first) and withdraw_request(second)
        third = ask_for(tmp_path, 3)
        go_on.set()
        assert await wait_answer(first, always) == "done"
        assert await wait_answer(third, always) == "done"

    exchange(tmp_path, publish, ask)
    assert seen == [1, 3]


def test_what_was_asked_before_the_origin_began_is_not_carried_out(tmp_path: Path) -> None:
    old = ask_for(tmp_path, 7)
    for name in ("left.done", "left.taken"):
        (tmp_path / "inbox" / name).write_text("{}")
    for path in (tmp_path / "inbox").iterdir():
        os.utime(path, ns=(0, 10**18))
    (tmp_path / LOCK).write_text("1 origin\n")
    os.utime(tmp_path / LOCK, ns=(0, 10**18 + 1))
    seen = []

    async def publish(request: Request) -> str:
        seen.append(request.version)
        return "done"

    async def ask() -> None:
        await wait_answer(ask_for(tmp_path, 8), always)

    exchange(tmp_path, publish, ask)
    assert seen == [8] and not old.exists() and list_inbox(tmp_path) == []


def test_what_was_asked_while_the_origin_began_is_carried_out(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("1 origin\n")
    os.utime(tmp_path / LOCK, ns=(0, 10**18))
    request = ask_for(tmp_path, 7)

    async def ask() -> str:
        return await wait_answer(request, always)

    assert exchange(tmp_path, publish_well, ask) == "digest7"


def test_only_the_owner_may_leave_requests(tmp_path: Path) -> None:
    ask_for(tmp_path)
    assert (tmp_path / "inbox").stat().st_mode & 0o777 == 0o700


def test_serving_forces_nothing_to_disk_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync: Callable[[int], None] = os.fsync
    threads = set()

    def sync_and_say(descriptor: int) -> None:
        threads.add(threading.current_thread())
        sync(descriptor)

    async def ask() -> None:
        request = ask_for(tmp_path)
        monkeypatch.setattr(os, "fsync", sync_and_say)
        await wait_answer(request, always)

    exchange(tmp_path, publish_well, ask)
    assert threads and threading.main_thread() not in threads
