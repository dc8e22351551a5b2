"""Supervision of the parts of a swarm: what dies is started again, what is stopped stops in order.

    part: started -> runs -> ended by itself, for good (finished) | died -> pause -> started again

Invariants:
- a part that died is started again after a pause that doubles with each death in a row, up to `LONGEST_PAUSE_S`, and is
  short again after `CALM_S` of life;
- a part that ends `MAX_MISTAKES` times in a row at once with the exit code of a wrong setting is not started again:
  the run is over, with its error message;
- parts are stopped rank by rank: SIGTERM, and SIGKILL for those that have not ended in `SHUTDOWN_GRACE_S`;
- when `run` returns or raises, no part is left.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.errors import EXIT_MISTAKE
from shoal.launch.process import ForkedProcess, ForkServer, ForkServerError, Part, Process, open_log, read_last_line
from shoal.util.aio import Backoff

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CALM_S = 60.0
SHUTDOWN_GRACE_S = 40.0
MAX_MISTAKES = 3
_MAX_EVENTS = 1000


@dataclass(slots=True)
class PartState:
    """What is known of a part."""

    part: Part
    process: Process | None = None
    num_deaths: int = 0
    last_code: int | None = None
    num_mistakes: int = 0
    """ends in a row with `EXIT_MISTAKE`, each at once"""
    finished: bool = False
    """it ended by itself, for good"""
    restarts_at: float = 0.0
    """when it will be started again; 0 while it runs"""

    @property
    def failed(self) -> bool:
        """Whether the run cannot continue without it."""
        return self.finished and bool(self.last_code) and (self.part.ends or self.num_mistakes >= MAX_MISTAKES)

    def describe(self, now: float) -> str:
        """The part in a few words."""
        if self.finished:
            return "finished" if self.last_code == 0 else f"ended, {describe_code(self.last_code)}"
        if self.process is not None:
            again = f", started {self.num_deaths + 1} times" if self.num_deaths else ""
            return f"runs, pid {self.process.pid}{again}"
        if self.restarts_at:
            pause_s = max(0.0, self.restarts_at - now)
            return f"ended with {describe_code(self.last_code)}, starts again in {pause_s:.0f} s"
        return "not started" if self.last_code is None else "stopped"


class Supervisor:
    """Starts parts and restarts those that die."""

    def __init__(self, parts: Sequence[Part], logs: Path, environment: Mapping[str, str]) -> None:
        assert len({part.name for part in parts}) == len(parts), "every part has a name of its own"
        self.states = {part.name: PartState(part) for part in parts}
        self.events: deque[str] = deque(maxlen=_MAX_EVENTS)
        """what happened to parts, as text"""
        self.logs, self._environment = logs, dict(environment)
        self.is_stopping = False
        """whether the parts are being stopped: what one prints then is no alarm"""
        self._fork_server = ForkServer(self._environment)

    async def run(self, until: Callable[[], bool], stop: asyncio.Event) -> bool:
        """Supervise the parts until all that end by themselves have and `until` holds, or until `stop` is set.

        Whether they ended by themselves, and well. All parts are stopped then.
        """
        watches = [asyncio.create_task(self._watch(state)) for state in self.states.values()]
        try:
            finished = await self._wait_end(watches, until, stop)
        finally:
            self.is_stopping = True
            for rank in sorted({state.part.rank for state in self.states.values()}):
                states = [state for state in self.states.values() if state.part.rank == rank]
                await _stop([state.process for state in states if state.process is not None])
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            # One may have been starting while the others were stopped.
            await _stop([state.process for state in self.states.values() if state.process is not None])
            await self._fork_server.close()
        return finished

    def kill_all(self) -> None:
        """End every process now, with all that it started; `run` returns soon if it was asked to stop."""
        for state in self.states.values():
            if state.process is not None:
                state.process.signal(signal.SIGKILL)

    async def _wait_end(
        self, watches: Sequence["asyncio.Task[None]"], until: Callable[[], bool], stop: asyncio.Event
    ) -> bool:
        while not stop.is_set():
            for watch in watches:
                if watch.done():
                    watch.result()  # it only ends by a bug or a disk error
            if any(state.failed for state in self.states.values()):
                return False  # for good, and not well: the others would wait for it forever
            if all(state.finished for state in self.states.values() if state.part.ends) and until():
                return True
            try:
                async with asyncio.timeout(0.2):
                    await stop.wait()
            except TimeoutError:
                continue
        return False

    async def _watch(self, state: PartState) -> None:
        """Start a part, again and again, until it has finished or all is stopped."""
        backoff, attempt = Backoff.steady(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while not (self.is_stopping or state.finished):
            began = time.monotonic()
            await self._run_once(state)
            if state.finished or self.is_stopping:
                if state.finished and state.last_code:
                    self._record(state, f"ended and is not restarted: {read_last_line(self.logs, state.part.name)}")
                continue
            attempt = 0 if time.monotonic() - began > CALM_S else attempt
            pause_s = backoff.pause_s(attempt)
            state.restarts_at = time.monotonic() + pause_s
            line = read_last_line(self.logs, state.part.name)
            again = f"ended with {describe_code(state.last_code)}, starts again in {pause_s:g} s"
            self._record(state, f"{again}; its last line: {line}" if line else again)
            await asyncio.sleep(pause_s)
            state.restarts_at = 0.0
            attempt += 1

    async def _run_once(self, state: PartState) -> None:
        began = time.monotonic()
        with open_log(self.logs, state.part.name) as log:
            state.process = await self._start(state.part, log)
        logger.info(f"{state.part.name} runs, pid {state.process.pid}")
        state.last_code = await state.process.wait()
        state.process = None
        is_mistake = state.last_code == EXIT_MISTAKE and time.monotonic() - began < CALM_S
        state.num_mistakes = state.num_mistakes + 1 if is_mistake else 0
        is_done = (state.part.ends and state.last_code == 0) or state.last_code in state.part.last
        state.finished = is_done or state.num_mistakes >= MAX_MISTAKES
        if not state.finished:
            state.num_deaths += 1

    async def _start(self, part: Part, log: IO[bytes]) -> Process:
        """Start a part: as a fork, if it needs torch and there is a fork server."""
        if part.has_model:
            try:
                await self._fork_server.wait_ready()
                return Process(ForkedProcess(self._fork_server.fork(part.arguments, log)))
            except ForkServerError:
                pass  # executed instead: slower, and the same
        return await Process.start(part, log, self._environment)

    def _record(self, state: PartState, text: str) -> None:
        self.events.append(f"{state.part.name} {text}")
        logger.info(self.events[-1])


async def _stop(processes: Sequence[Process]) -> None:
    if not processes:
        return
    for process in processes:
        process.signal(signal.SIGTERM)
    waiting = [asyncio.create_task(process.wait()) for process in processes]
    await asyncio.wait(waiting, timeout=SHUTDOWN_GRACE_S)
    for process in processes:
        process.signal(signal.SIGKILL)
    await asyncio.gather(*waiting)


def describe_code(code: int | None) -> str:
    """Describe an exit code."""
    if code is None:
        return "no code"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
