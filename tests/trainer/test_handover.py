"""The trainer's side of a real origin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.keys import Key
from shoal.shardcast.client import Client
from shoal.swarm.asking import UnreachableError
from shoal.trainer.errors import TrainerError
from shoal.trainer.handover import OriginFolder, read_root
from shoal.trainer.origin import run_origin

KEY = Key.generate()


@asynccontextmanager
async def origin_of(data: Path, **options: Any) -> AsyncIterator[str]:
    served: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    work = run_origin(data, run="demo", key=KEY, ready=lambda _, server: served.set_result(str(server.url)), **options)
    task = asyncio.create_task(work)
    try:
        async with asyncio.timeout(60):
            await asyncio.wait((task, served), return_when=asyncio.FIRST_COMPLETED)
            yield served.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def make_version(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(text)
    return folder


def test_what_is_handed_over_can_be_fetched_and_has_the_manifests_hashes(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=KEY.public)
        path = make_version(tmp_path / "v0", "a" * 5000)
        async with origin_of(tmp_path / "data") as url:
            assert origin.list_served() == set()
            first = await origin.hand_over(path, 0)
            assert await origin.hand_over(path, 0) == first
            assert origin.list_served() == {0}
            async with await Client.open(tmp_path / "out", [url], run="demo", publisher=KEY.public) as client:
                pulled = await client.pull()
                entry = client.store.find(0)
                assert entry is not None
                assert (entry.log.root, entry.digest) == (first.root, first.manifest)
            assert (pulled / "model.safetensors").read_text() == "a" * 5000
        # after a restart it is the same version, and whose store it is need not be said
        async with origin_of(tmp_path / "data"):
            assert await OriginFolder(tmp_path / "data", run="demo").hand_over(path, 0) == first
            second = await origin.hand_over(make_version(tmp_path / "v1", "b" * 5000), 1)
            assert second.root != first.root

    asyncio.run(check())


def test_an_origin_that_is_away_is_tried_again_and_not_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=KEY.public)
        path = make_version(tmp_path / "v0", "a")
        with pytest.raises(UnreachableError, match="no origin serves it now"):
            await origin.hand_over(path, 0)
        async with origin_of(tmp_path / "data"):
            assert (await origin.hand_over(path, 0)).version == 0

    asyncio.run(check())


def test_an_origin_that_says_no_again_and_again_is_believed(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=KEY.public)
        empty = tmp_path / "empty"
        empty.mkdir()
        async with origin_of(tmp_path / "data"):
            for _ in range(4):
                with pytest.raises(UnreachableError):
                    await origin.hand_over(empty, 0)
            await origin.hand_over(make_version(tmp_path / "v0", "a"), 0)  # and then it is as good as new
            for _ in range(5):
                with pytest.raises(UnreachableError):
                    await origin.hand_over(empty, 0)
            with pytest.raises(TrainerError, match="the origin does not publish v0"):
                await origin.hand_over(empty, 0)

    asyncio.run(check())


def test_an_origin_with_another_key_than_the_runs_is_found_out(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=Key.generate().public)
        async with origin_of(tmp_path / "data"):
            with pytest.raises(TrainerError, match="is the origin's key that of the run"):
                await origin.hand_over(make_version(tmp_path / "v0", "a"), 0)

    asyncio.run(check())


def test_a_manifest_that_is_gone_or_another_is_no_root(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="gone again"):
        read_root(tmp_path / "v0-0", KEY.public, "demo", "0" * 64)
