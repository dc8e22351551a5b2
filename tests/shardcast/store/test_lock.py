"""Ownership of a folder: the lock decides, whatever its file contains."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.store import lock as lock_module
from shoal.shardcast.store.lock import LOCK, LockOwner, find_owner


def test_a_folder_has_an_owner_while_its_store_is_open(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        folder = maker.folder / "store"
        assert find_owner(folder) is None
        store = await maker.open_store(role="relay")
        assert find_owner(folder) == LockOwner(os.getpid(), "relay")
        await store.close()
        assert find_owner(folder) is None, "what the file says counts only while it is locked"
        store = await maker.open_store()
        assert find_owner(folder) == LockOwner(os.getpid(), "")
        await store.close()

    run(work)


def test_the_owner_of_a_folder_is_named_in_the_refusal(
    run: Callable[..., Any], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "WAIT_S", 0.05)

    async def work() -> None:
        store = await maker.open_store(role="origin")
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} \(origin\); wait for it"):
            await maker.open_store()
        await store.close()

    run(work)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"x\n", b"-1\n", b"12 origin extra\n", b"\xff\xfe", b"9" * 60, b"0 relay"]
)
def test_garbage_in_a_locked_file_is_an_owner_without_a_name(tmp_path: Path, text: bytes) -> None:
    with (tmp_path / LOCK).open("wb") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        owner = find_owner(tmp_path)
        assert owner == LockOwner(None, "") and str(owner) == "another process"
    assert find_owner(tmp_path) is None


def test_a_file_instead_of_a_folder_has_no_owner(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert find_owner(tmp_path / "file") is None


def test_checking_the_owner_does_not_keep_a_store_from_opening(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        await (await maker.open_store()).close()
        looking = os.open(maker.folder / "store" / LOCK, os.O_RDONLY)
        fcntl.flock(looking, fcntl.LOCK_SH)
        opening = asyncio.create_task(maker.open_store())
        await asyncio.sleep(0.05)
        assert not opening.done()
        os.close(looking)
        await (await opening).close()

    run(work)
