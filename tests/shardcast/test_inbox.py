"""Asking a serving origin to publish: answered once, in order, and never silently lost."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.inbox import ask_publish, serve_inbox, wait_answer


def exchange(folder: Path, publish, ask, *, served: bool = True):
    """Run `ask()` while the inbox is served."""

    async def run():
        server = asyncio.create_task(serve_inbox(folder, publish)) if served else None
        try:
            async with asyncio.timeout(20):
                return await ask()
        finally:
            if server is not None:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server

    return asyncio.run(run())


def test_a_request_is_published_and_answered_once(tmp_path: Path) -> None:
    seen = []

    async def publish(path: Path, version: int) -> str:
        seen.append((path, version))
        return f"digest{version}"

    async def ask():
        answers = [ask_publish(tmp_path, tmp_path / "ck", version) for version in (1, 2, 3)]
        return [await wait_answer(answer, lambda: True) for answer in answers]

    assert exchange(tmp_path, publish, ask) == ["digest1", "digest2", "digest3"]
    assert seen == [(tmp_path / "ck", version) for version in (1, 2, 3)]
    assert list((tmp_path / "inbox").iterdir()) == []


def test_a_mistake_comes_back_as_the_askers_error(tmp_path: Path) -> None:
    async def publish(path: Path, version: int) -> str:
        raise ConfigError(f"{path}: is empty")

    async def ask():
        await wait_answer(ask_publish(tmp_path, tmp_path / "ck", 1), lambda: True)

    with pytest.raises(ConfigError, match="ck: is empty"):
        exchange(tmp_path, publish, ask)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"path": 3}', b'{"path": "a", "version": "x"}'])
def test_nonsense_in_the_inbox_is_answered_and_does_not_stop_it(tmp_path: Path, text: bytes) -> None:
    async def publish(path: Path, version: int) -> str:
        return "fine"

    async def ask():
        good = ask_publish(tmp_path, tmp_path, 1)
        (tmp_path / "inbox" / "odd.json").write_bytes(text)
        with pytest.raises(ConfigError, match="no request to publish"):
            await wait_answer(tmp_path / "inbox" / "odd.done", lambda: True)
        return await wait_answer(good, lambda: True)

    assert exchange(tmp_path, publish, ask) == "fine"


def test_an_origin_that_went_away_is_noticed_and_the_request_withdrawn(tmp_path: Path) -> None:
    async def ask():
        await wait_answer(ask_publish(tmp_path, tmp_path, 1), lambda: False)

    with pytest.raises(ConfigError, match="ended before it published"):
        exchange(tmp_path, None, ask, served=False)
    assert list((tmp_path / "inbox").iterdir()) == []


def test_only_the_owner_may_leave_requests(tmp_path: Path) -> None:
    ask_publish(tmp_path, tmp_path, 1)
    assert (tmp_path / "inbox").stat().st_mode & 0o777 == 0o700
