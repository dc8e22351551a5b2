"""What a role waits for: each wait has a name, somebody it waits for and a deadline, and is told to the coordinator.

Invariants:
- a role awaits nothing outside its process but through `bound` or `insist`: there is no wait without a deadline;
- what waits now can be read at any time (`longest`), which the heartbeat does: `shoal status` shows it, with the last
  failure where there was one;
- each wait that is told is a span of kind `wait`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from shoal.node.spans import Field, SpanLog
from shoal.swarm.asking import UnreachableError
from shoal.swarm.clock import read_clock
from shoal.swarm.waits import Wait, WaitBook

T = TypeVar("T")
Note = Callable[[str], None]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


class WaitError(Exception):
    """A wait that passed its deadline."""

    def __init__(self, name: str, for_whom: str, timeout_s: float) -> None:
        super().__init__(f"{name}: waited {timeout_s:g} s for {for_whom}, in vain")
        self.name, self.for_whom = name, for_whom


class RoleWaits:
    """The waits of one role."""

    def __init__(
        self,
        role: str,
        *,
        spans: SpanLog | None = None,
        note: Note = lambda _: None,
        clock: Callable[[], int] = read_clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._role, self.note, self._sleep = role, note, sleep
        self._spans = spans or SpanLog(None, role)
        self._told, self._quiet = WaitBook(clock), WaitBook(clock)

    async def bound(
        self,
        name: str,
        work: Awaitable[T],
        *,
        for_whom: str,
        timeout_s: float,
        told: bool = True,
        **fields: Field,
    ) -> T:
        """What `work` brings, or `WaitError` if it brings nothing in time, in which case it is cancelled.

        What is not `told` is what nobody is kept waiting by: reading ahead, for example.
        """
        with self._enter(name, for_whom, timeout_s, told, fields):
            return await _limit(name, work, for_whom, timeout_s)

    async def insist(
        self,
        name: str,
        ask: Callable[[], Awaitable[T]],
        *,
        for_whom: str,
        timeout_s: float,
        told: bool = True,
        reason: str = "",
        **fields: Field,
    ) -> T:
        """The same, asked again after each deadline and each `UnreachableError` for as long as it takes, politely.

        The wait is one: it keeps its beginning, and is overdue from its first deadline on. Its reason, if there is one
        beside its name, is replaced by what last went wrong.
        """
        with self._enter(name, for_whom, timeout_s, told, fields, reason) as tell:
            pause_s = FIRST_PAUSE_S
            while True:
                try:
                    return await _limit(name, ask(), for_whom, timeout_s)
                except (WaitError, UnreachableError) as error:
                    self.note(f"{error}; goes on trying" if isinstance(error, WaitError) else f"{name}: {error}")
                    tell(str(error))
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def longest(self) -> Wait | None:
        """Of the waits that are told, the one that lasts longest."""
        waits = self._told.list_waits()
        return waits[0] if waits else None

    def list_waits(self) -> list[Wait]:
        """All waits, the longest first."""
        waits = [*self._told.list_waits(), *self._quiet.list_waits()]
        return sorted(waits, key=lambda wait: wait.since_ms)

    @contextmanager
    def _enter(
        self, name: str, for_whom: str, timeout_s: float, told: bool, fields: dict[str, Field], reason: str = ""
    ) -> Iterator[Callable[[str], None]]:
        assert timeout_s > 0, "every wait has a deadline"
        book = self._told if told else self._quiet
        span = self._spans.span(name, kind="wait", **{"for_whom": for_whom, **fields}) if told else nullcontext()
        wait = book.wait(name, owner=self._role, for_whom=for_whom, timeout_s=timeout_s, detail=reason)
        with wait as tell, span:
            yield tell


async def _limit(name: str, work: Awaitable[T], for_whom: str, timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise WaitError(name, for_whom, timeout_s) from None
        raise  # the work's own
