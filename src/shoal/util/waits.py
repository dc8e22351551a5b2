"""Named waits: every wait has a name, an owner, something it waits for and a deadline, so nothing hangs silently.

    WaitTable   the waits of a process, listed by `shoal status`
    RoleWaits   the waits of one role: with deadlines, repeated calls and spans; the heartbeat reports the longest

Invariants:
- a role awaits nothing outside its process except through `with_timeout` or `retry_forever`: every wait has a deadline;
- current waits can be read at any time, with the last failure if there was one;
- a cause of failure is one warning, and one more each minute, until what reported it succeeds again, however many
  calls it fails;
- each reported wait is a span of kind `wait`.

Waits of the run itself (a step for its groups, the queue for validators) are not recorded here: `status` reads them
from its tables.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from shoal.errors import UnreachableError
from shoal.util.aio import Backoff
from shoal.util.clock import read_clock
from shoal.util.spans import Field, SpanLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITS = 4096
"""maximum number of listed waits; more indicate a leak or an attack, and are only counted"""
MAX_CAUSES = 64
"""causes of failures remembered at once, to report each one only once"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
REMIND_S = 60.0
"""time between two warnings about a cause that lasts"""


class WaitError(Exception):
    """A wait exceeded its deadline."""

    def __init__(self, name: str, waiting_for: str, timeout_s: float) -> None:
        super().__init__(f"{name}: timed out after {timeout_s:g} s waiting for {waiting_for}")


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait."""

    name: str
    owner: str
    waiting_for: str
    since_ms: int
    deadline_ms: int = 0
    """0: no deadline"""
    detail: str = ""

    def lasts(self, now_ms: int) -> int:
        """Duration so far, in milliseconds."""
        return max(0, now_ms - self.since_ms)

    def is_overdue(self, now_ms: int) -> bool:
        """Whether it exceeded its deadline."""
        return bool(self.deadline_ms) and now_ms > self.deadline_ms


@dataclass(frozen=True, slots=True)
class _Cause:
    """A cause of failures that was logged as a warning."""

    reporter: str
    """name of the wait that logged it first"""
    since_ms: int
    logged_ms: int


class WaitTable:
    """The current waits of a process. Thread-safe."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self.num_dropped = 0

    @contextmanager
    def wait(
        self, name: str, *, owner: str, waiting_for: str, timeout_s: float = 0.0, detail: str = ""
    ) -> Iterator[Callable[[str], None]]:
        """List a wait while the block runs; the block may update its detail."""
        now_ms = self._clock()
        deadline_ms = now_ms + round(1000 * timeout_s) if timeout_s else 0
        with self._lock:
            number = next(self._numbers)
            if len(self._waits) < MAX_WAITS:
                self._waits[number] = Wait(name, owner, waiting_for, now_ms, deadline_ms, detail)
            else:
                self.num_dropped += 1

        def set_detail(text: str) -> None:
            with self._lock:
                if number in self._waits:
                    self._waits[number] = replace(self._waits[number], detail=text)

        try:
            yield set_detail
        finally:
            with self._lock:
                self._waits.pop(number, None)

    def list_waits(self) -> list[Wait]:
        """All waits, the longest first."""
        with self._lock:
            return sorted(self._waits.values(), key=lambda wait: wait.since_ms)


class RoleWaits:
    """The waits of one role."""

    def __init__(
        self,
        role: str,
        *,
        spans: SpanLog | None = None,
        clock: Callable[[], int] = read_clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        backoff: Backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S),  # noqa: B008 (frozen)
    ) -> None:
        self._role, self._sleep, self._backoff = role, sleep, backoff
        self._spans = spans or SpanLog(None, role)
        self._reported, self._unreported = WaitTable(clock), WaitTable(clock)
        self._clock = clock
        self._warned: dict[str, _Cause] = {}

    async def with_timeout(
        self,
        name: str,
        work: Awaitable[T],
        *,
        waiting_for: str,
        timeout_s: float,
        reported: bool = True,
        **fields: Field,
    ) -> T:
        """Return the result of `work`; after `timeout_s` it is cancelled and `WaitError` is raised.

        `reported=False` is for waits that block nobody, such as reading ahead.
        """
        with self._enter(name, waiting_for, timeout_s, reported, fields):
            return await _limit(name, work, waiting_for, timeout_s)

    async def retry_forever(
        self,
        name: str,
        call: Callable[[], Awaitable[T]],
        *,
        waiting_for: str,
        timeout_s: float,
        reported: bool = True,
        reason: str = "",
        **fields: Field,
    ) -> T:
        """Return the result of `call`, repeated after each timeout and each `UnreachableError`, with growing pauses.

        All repetitions are one wait: it keeps its start, and is overdue after its first deadline. Its reason is
        replaced by the last failure.
        """
        with self._enter(name, waiting_for, timeout_s, reported, fields, reason) as set_detail:
            for attempt in itertools.count():
                try:
                    result = await _limit(name, call(), waiting_for, timeout_s)
                    self.note_success(name)
                    return result
                except (WaitError, UnreachableError) as error:
                    silent = f"{name}: no answer from {waiting_for}: {error}"
                    text = f"{error if isinstance(error, WaitError) else silent}; retrying"
                    self.report_failure(name, error, text)
                    set_detail(str(error))
                await self._sleep(self._backoff.pause_s(attempt))
        raise AssertionError("retries end with a result")

    def report_failure(self, name: str, error: Exception, text: str) -> None:
        """Log a failed attempt; as a warning only if none about the same cause was logged in the last minute."""
        now_ms, known = self._clock(), self._warned.get(str(error))
        if known is not None and now_ms - known.logged_ms < 1000 * REMIND_S:
            logger.debug(text)
            return
        if known is None:
            logger.warning(text)
            known = _Cause(name, now_ms, now_ms)
        else:
            logger.warning(f"{text}, for {(now_ms - known.since_ms) // 1000} s now")
        if str(error) in self._warned or len(self._warned) < MAX_CAUSES:
            self._warned[str(error)] = replace(known, logged_ms=now_ms)

    def note_success(self, name: str) -> None:
        """An attempt succeeded: the causes that it reported are over."""
        over = [text for text, cause in self._warned.items() if cause.reporter == name]
        for text in over:
            del self._warned[text]
        if over:
            logger.info(f"{name}: succeeded again")

    def longest(self) -> Wait | None:
        """The reported wait that has lasted longest."""
        waits = self._reported.list_waits()
        return waits[0] if waits else None

    def list_waits(self) -> list[Wait]:
        """All waits, the longest first."""
        waits = [*self._reported.list_waits(), *self._unreported.list_waits()]
        return sorted(waits, key=lambda wait: wait.since_ms)

    @contextmanager
    def _enter(
        self, name: str, waiting_for: str, timeout_s: float, reported: bool, fields: dict[str, Field], reason: str = ""
    ) -> Iterator[Callable[[str], None]]:
        assert timeout_s > 0, "every wait has a deadline"
        table = self._reported if reported else self._unreported
        span = self._spans.span(name, kind="wait", **{"for_whom": waiting_for, **fields}) if reported else nullcontext()
        wait = table.wait(name, owner=self._role, waiting_for=waiting_for, timeout_s=timeout_s, detail=reason)
        with wait as set_detail, span:
            yield set_detail


async def _limit(name: str, work: Awaitable[T], waiting_for: str, timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise WaitError(name, waiting_for, timeout_s) from None
        raise  # raised by the work itself
