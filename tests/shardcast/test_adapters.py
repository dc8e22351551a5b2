"""Versions that are adapters over version 0: everyone who keeps one keeps its base, and late clients find both."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

SIZE = 40_000
STEPS = 12


def make_base(make_bytes: Any) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": make_bytes(300_000, 7)}


def make_adapter(step: int) -> dict[str, bytes]:
    """An adapter in which each step changes a tenth of the values."""
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    for done in range(1, step + 1):
        rng = np.random.default_rng(done)
        places = rng.integers(0, SIZE, SIZE // 10)
        values[places] += rng.normal(size=len(places)).astype(np.float32)
    return {"adapter_config.json": b'{"r": 1}', "adapter_model.safetensors": save({"a": torch.from_numpy(values)})}


async def become(look: Callable[[], object], wanted: object) -> None:
    """Old versions are removed a moment after the newest is there."""
    for _ in range(400):
        if look() == wanted:
            return
        await asyncio.sleep(0.05)
    assert look() == wanted


def count_versions(folder: Path) -> int:
    return len(list(folder.glob("v*")))


def describe_held(store: Any) -> tuple[int, int, bool]:
    held = [entry.version for entry in store.entries() if entry.complete]
    return held[0], held[-1], 1 in held


def test_an_adapter_has_no_delta_to_its_base_but_one_to_the_adapter_before(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(0, make_base(make_bytes))
            first, second = [await net.publish(step, make_adapter(step)) for step in (1, 2)]
            assert first.log.head.parent is None and first.log.head.anchor and first.delta is None
            assert second.log.head.parent == 1 and second.delta.layout.total < second.full.layout.total / 2

    run(work)


def test_the_base_is_kept_by_origin_relay_and_client_while_there_are_adapters(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network(keep=2, anchor_every=3) as net:
            relay = await net.relay(str(net.url), keep=2)
            client = await net.client(str(relay.server.url), keep=1)
            await net.publish(0, make_base(make_bytes))
            assert (await client.pull(0)).name == "v0"
            for step in range(1, STEPS + 1):
                await net.publish(step, make_adapter(step))
                folder = await client.pull(step)
                assert read_files(folder) == make_adapter(step)
                assert read_files(folder.with_name("v0")) == make_base(make_bytes)
                await become(partial(count_versions, folder.parent), 2)
            for store in (net.store, relay.store, client.store):
                await become(partial(describe_held, store), (0, STEPS, False))
            # A client that joins late gets the newest adapter and its base, from a relay that joined late itself.
            late = await net.relay(str(relay.server.url), data="late relay", keep=2)
            other = await net.client(str(late.server.url), out="late", keep=1)
            async for folder in other.follow():
                assert read_files(folder) == make_adapter(STEPS)
                assert read_files(folder.with_name("v0")) == make_base(make_bytes)
                break

    run(work)


def test_an_old_adapter_can_be_pulled_without_its_base(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network(keep=2, keep_s=3600.0) as net:
            await net.publish(0, make_base(make_bytes))
            for step in range(1, 5):
                await net.publish(step, make_adapter(step))
            client = await net.client(str(net.url), only=2, with_base=False)
            folder = await client.pull(2)
            assert read_files(folder) == make_adapter(2) and not folder.with_name("v0").exists()

    run(work)


def test_without_adapters_version_0_is_dropped_as_before(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network(keep=2, anchor_every=1) as net:
            for step in range(5):
                await net.publish(step, {"config.json": b"{}", "model.safetensors": make_bytes(1000, step)})
            assert [entry.version for entry in net.store.entries()] == [3, 4]

    run(work)
