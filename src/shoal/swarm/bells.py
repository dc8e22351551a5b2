"""Waiting for news: whoever asks for work that is not there yet is answered when it is, not asked to come back.

Invariants:
- those who wait are served first come, first served. A ring lets one of them try; who got something, or may not have
  it, lets the next one try, and nobody tries twice for one ring. So ten thousand who wait cost one attempt for each
  thing there is to have, not ten thousand;
- no ring is lost: one that falls between an attempt and the wait after it is noticed, and the attempt is made again;
- nobody waits longer than it asked for, and things that happen without a ring (a reservation that runs out) are found
  by an attempt every `LOOK_S`;
- at most `most` wait. Who comes then is answered at once, as if it had not asked to wait; so are all once it is closed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 5.0


class Outcome(Enum):
    """What an attempt brought."""

    SERVED = "served"
    """take it to the caller"""
    NOT_YOU = "not you"
    """nothing for this caller, but perhaps for the next one"""
    NOTHING = "nothing"
    """nothing for anybody"""


class Bell:
    """One kind of news. All of it runs in one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """with the number of rings that there had been when each tried last"""
        self._num_rings = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ring(self) -> None:
        """Something happened: let the first in line try."""
        self._num_rings += 1
        self._wake_next()

    def close(self) -> None:
        """Nobody waits any longer: all have the last answer they got."""
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft()[1].set_result(None)

    async def serve(self, attempt: Callable[[], Awaitable[T]], judge: Callable[[T], Outcome], wait_s: float) -> T:
        """What an attempt brings, made again at each ring until it serves, or until `wait_s` have passed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            num_rings = self._num_rings
            answer = await attempt()
            outcome = judge(answer)
            if outcome is not Outcome.NOTHING:
                self._wake_next()
            left_s = end - loop.time()
            if outcome is Outcome.SERVED or left_s <= 0 or self._is_closed:
                return answer
            if num_rings != self._num_rings:
                continue
            if len(self._waiting) >= self._most:
                return answer
            await self._wait_ring(num_rings, min(left_s, LOOK_S))
            if self._is_closed:
                return answer

    async def _wait_ring(self, num_rings: int, seconds: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_rings, turn)
        self._waiting.append(entry)
        try:
            await asyncio.wait((turn,), timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self._wake_next()  # it was our turn, and we are gone
            raise
        finally:
            if not turn.done():
                self._waiting.remove(entry)

    def _wake_next(self) -> None:
        """Wake the first in line that has not tried since the last ring."""
        for entry in self._waiting:
            num_rings, turn = entry
            if num_rings < self._num_rings:
                self._waiting.remove(entry)
                turn.set_result(None)
                return
