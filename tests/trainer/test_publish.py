"""The trainer's side of a real origin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import TrainerError, UnreachableError
from shoal.identity.keys import Key
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.origin_service import open_origin
from shoal.trainer.publish import OriginFolder

KEY = Key.generate()


@asynccontextmanager
async def origin_of(data: Path, **options: Any) -> AsyncIterator[str]:
    async with asyncio.timeout(60), open_origin(data, run="demo", key=KEY, **options) as service:
        task = asyncio.create_task(service.run())
        try:
            yield str(service.server.url)
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
            async with await ShardcastClient.open(tmp_path / "out", [url], run="demo", publisher=KEY.public) as client:
                pulled = await client.pull()
                entry = client.store.find(0)
                assert entry is not None
                assert (entry.log.root, entry.digest) == (first.root, first.manifest)
            assert (pulled / "model.safetensors").read_text() == "a" * 5000
        # After a restart it is the same version, and the publisher need not be given.
        async with origin_of(tmp_path / "data"):
            assert await OriginFolder(tmp_path / "data", run="demo").hand_over(path, 0) == first
            second = await origin.hand_over(make_version(tmp_path / "v1", "b" * 5000), 1)
            assert second.root != first.root

    asyncio.run(check())


def test_an_origin_that_is_away_is_tried_again_and_not_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=KEY.public)
        path = make_version(tmp_path / "v0", "a")
        with pytest.raises(UnreachableError, match="no origin serves this folder now"):
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
            await origin.hand_over(make_version(tmp_path / "v0", "a"), 0)  # afterwards it works again
            for _ in range(5):
                with pytest.raises(UnreachableError):
                    await origin.hand_over(empty, 0)
            with pytest.raises(TrainerError, match="the origin refuses to publish v0"):
                await origin.hand_over(empty, 0)

    asyncio.run(check())


def test_an_origin_with_another_key_than_the_runs_is_found_out(tmp_path: Path) -> None:
    async def check() -> None:
        origin = OriginFolder(tmp_path / "data", run="demo", publisher=Key.generate().public)
        async with origin_of(tmp_path / "data"):
            with pytest.raises(TrainerError, match="is the origin's key that of the run"):
                await origin.hand_over(make_version(tmp_path / "v0", "a"), 0)

    asyncio.run(check())
