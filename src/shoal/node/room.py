"""A role whose disk is full: it waits for room, says so, and begins its work anew from what is on disk.

A kill at any moment loses nothing that was acknowledged, and a write that is refused is no worse than a kill. So there
is one place for it: the work ends at the refused write, wherever that was, and is begun again once there is room.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from shoal.disk import guard_disk, has_room
from shoal.errors import DiskError
from shoal.node.waits import FIRST_PAUSE_S, LONGEST_PAUSE_S, RoleWaits

T = TypeVar("T")
ROOM_S = 600.0
"""after which a wait for room is overdue; it goes on all the same"""


async def outlast_disk(
    work: Callable[[], Awaitable[T]], folder: Path, waits: RoleWaits, *, stopping: asyncio.Event | None = None
) -> T:
    """The result of the work, which is begun anew each time a full disk ended it and there is room again.

    A role that is asked to stop meanwhile ends with the `DiskError`.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            with guard_disk(folder):
                return await work()
        except DiskError as error:
            if not error.is_full:
                raise
            await _await_room(folder, waits, stopping, str(error).partition(";")[0], pause_s)
            if stopping is not None and stopping.is_set():
                raise DiskError(str(error)) from error  # nobody waits for room any more
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)  # what it needs may be more than what there is


async def _await_room(
    folder: Path, waits: RoleWaits, stopping: asyncio.Event | None, reason: str, pause_s: float
) -> None:
    async def look() -> None:
        while not (stopping is not None and stopping.is_set()):
            await asyncio.sleep(pause_s)
            if await asyncio.to_thread(has_room, folder):
                return

    waits.note(f"{reason}; waits for room")
    await waits.insist("disk", look, for_whom="room on its disk", timeout_s=ROOM_S, reason=reason)
    waits.note("goes on: there is room again")
