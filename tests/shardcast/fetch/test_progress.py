import asyncio
from typing import Any

SHARD = 1 << 16


def test_bytes_rate_and_time_left_are_reported_during_a_pull(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(40 * SHARD, 1)})

            async def respond_slowly(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target:
                    await asyncio.sleep(0.02)
                return False

            proxy = await net.proxy(respond_slowly)
            client = await net.client(proxy.url)
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
            assert sum(source.bytes for source in client.progress.upstreams) == 40 * SHARD

    run(work)
