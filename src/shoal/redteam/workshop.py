"""Honest work for all identities of an attacker, by one engine: one machine, however many names.

    relays -> weights -> mill (a thread) -> work

It is the worker's own mill with the honest author: what it writes any validator accepts.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from shoal.node.session import Session
from shoal.node.weights import number_version, open_weights
from shoal.recipe import Recipe
from shoal.shardcast.client import Client
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order, WorkLimits
from shoal.worker.mill import Mill

SLOTS, MEMORY_MB = 64, 1024


class Workshop:
    """The engine; made by `open_workshop`."""

    def __init__(self, recipe: Recipe, limits: WorkLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._orders: dict[str, asyncio.Future[Work]] = {}
        self.mill = Mill(Author(recipe), self._hand_over, limits=limits, slots=SLOTS)

    async def write(self, order: Order) -> Work:
        """The work of an order, with the newest version that it allows."""
        self._orders[order.lease] = done = self._loop.create_future()
        self.mill.order(order)
        try:
            return await done
        finally:
            self._orders.pop(order.lease, None)
            if not done.done() or done.cancelled():
                self.mill.cancel(order.lease)

    def fail(self, error: BaseException) -> None:
        """Nothing more will be written."""
        for done in self._orders.values():
            if not done.done():
                done.set_exception(error)

    def _hand_over(self, work: Work) -> None:
        """Called from the mill's thread."""
        self._loop.call_soon_threadsafe(self._finish, work)

    def _finish(self, work: Work) -> None:
        done = self._orders.get(work.order.lease)
        if done is not None and not done.done():
            done.set_result(work)


@asynccontextmanager
async def open_workshop(session: Session, recipe: Recipe, folder: Path, *, keep: int) -> AsyncIterator[Workshop]:
    """A workshop with the weights of a session's run, pulled into `folder`."""
    shop = Workshop(recipe, WorkLimits(memory_mb=MEMORY_MB))
    async with open_weights(session, folder, keep=keep) as weights:
        tasks = [asyncio.create_task(work) for work in (_turn_mill(shop.mill), _follow(shop.mill, weights))]
        for task in tasks:
            task.add_done_callback(lambda ended: _tell_end(shop, ended))
        try:
            yield shop
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _tell_end(shop: Workshop, ended: "asyncio.Task[None]") -> None:
    """Whoever waits for work hears what ended the engine."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        shop.fail(error)


async def _turn_mill(mill: Mill) -> None:
    """Run the mill's thread, which is waited for whatever ends this task."""
    with ThreadPoolExecutor(1, "workshop") as pool:
        turning = asyncio.get_running_loop().run_in_executor(pool, mill.run)
        try:
            await asyncio.shield(turning)
        finally:
            mill.stop()


async def _follow(mill: Mill, weights: Client) -> None:
    """Offer every new version to the mill."""
    async with aclosing(weights.follow()) as folders:
        async for folder in folders:
            mill.offer(number_version(folder), folder)
