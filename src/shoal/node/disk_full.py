"""A role whose disk is full: it waits for free space, reports that, and restarts its work from the state on disk.

A kill at any moment loses nothing that was acknowledged, and a failed write is no worse than a kill. So one place
handles it: the work ends at the failed write, wherever that was, and starts again once there is free space.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from shoal.errors import DiskError
from shoal.util.aio import Backoff
from shoal.util.clock import read_clock
from shoal.util.disk import guard_disk, has_room
from shoal.util.waits import FIRST_PAUSE_S, LONGEST_PAUSE_S, RoleWaits, Wait

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROOM_S = 600.0
"""after which a wait for free space is overdue; the role keeps waiting"""
_NAME, _WAITING_FOR = "disk", "room on its disk"


def describe_full(role: str, error: DiskError) -> Wait:
    """The wait of a role whose disk is full, beginning now."""
    now_ms = read_clock()
    deadline_ms = now_ms + round(1000 * ROOM_S)
    return Wait(_NAME, role, _WAITING_FOR, now_ms, deadline_ms, _give_reason(error))


async def outlast_disk(
    work: Callable[[], Awaitable[T]], folder: Path, waits: RoleWaits, *, stopping: asyncio.Event | None = None
) -> T:
    """The result of the work, which restarts each time a full disk ended it and there is free space again.

    A role that is asked to stop in the meantime ends with the `DiskError`.
    """
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    for attempt in itertools.count():  # the work may need more than is free: longer pauses each time
        try:
            with guard_disk(folder):
                return await work()
        except DiskError as error:
            if not error.is_full:
                raise
            await _await_room(folder, waits, stopping, _give_reason(error), backoff.pause_s(attempt))
            if stopping is not None and stopping.is_set():
                raise DiskError(str(error)) from error  # stopping: do not wait for free space
    raise AssertionError("attempts end with a result")


async def _await_room(
    folder: Path, waits: RoleWaits, stopping: asyncio.Event | None, reason: str, pause_s: float
) -> None:
    async def check_space() -> None:
        while not (stopping is not None and stopping.is_set()):
            await asyncio.sleep(pause_s)
            if await asyncio.to_thread(has_room, folder):
                return

    logger.warning(f"{reason}; waiting for free space")
    await waits.retry_forever(_NAME, check_space, waiting_for=_WAITING_FOR, timeout_s=ROOM_S, reason=reason)
    logger.info("free space is available again, resuming")


def _give_reason(error: DiskError) -> str:
    """What could not be written, without the advice that follows it."""
    return str(error).partition(";")[0]
