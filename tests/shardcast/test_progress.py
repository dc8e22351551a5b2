import asyncio
from typing import Any

import pytest

from shoal.shardcast.progress import RateMeter

SHARD = 1 << 16


def test_the_rate_is_measured_from_look_to_look_and_smoothed() -> None:
    now = 0.0
    meter = RateMeter(lambda: now)
    assert meter.update(0) == 0.0
    now = 1.0
    assert meter.update(1000) == 1000.0
    now = 2.0
    assert meter.update(1000) == pytest.approx(500.0)
    assert meter.update(1000) == pytest.approx(500.0)
    now = 12.0
    assert meter.update(1000) == 0.0


def test_bytes_rate_and_time_left_are_told_while_it_goes_on(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(40 * SHARD, 1)})

            async def dawdle(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target:
                    await asyncio.sleep(0.02)
                return False

            front = await home.front(dawdle)
            client = await home.client(front.url)
            assert client.progress.stage == "idle"
            pulled = asyncio.create_task(client.pull())
            seen = []
            while not pulled.done():
                await asyncio.sleep(0.01)
                seen.append(client.progress)
            await pulled
            busy = [progress for progress in seen if progress.stage == "full"]
            done = [progress.bytes_done for progress in busy]
            assert done == sorted(done) and len(set(done)) > 5
            assert {progress.bytes_total for progress in busy} == {40 * SHARD}
            assert any(progress.eta_s for progress in busy)
            assert all(progress.waiting_for is None for progress in busy[5:])
            assert sum(source.bytes for source in client.progress.sources) == 40 * SHARD

    run(work)
