"""Code: 1 if the Python of a completion passes all tests of its task, else 0.

    completion -> source (after the thoughts, last fenced block, or all of it) -> box -> values -> compared here

Invariants:
- the source runs in a fresh box (shoal.box) that knows no expected value: what it returns or prints crosses as plain
  data and is compared outside, so there is no verdict in the box to forge;
- tests written as source run in a box of their own, and call the candidate's box through this process;
- one failure ends the attempt; a limit that is met, or a fault of this machine, is a score that is not firm.
"""

import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.box.walls import Limits
from shoal.box.warden import BoxError, Cell, EndedError, Pool, Report, Warden
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS, quote_text
from shoal.tasks.verify.answers import drop_thoughts, find_block
from shoal.tasks.verify.base import MARGIN, Attempt, Info, give_up, mark_near, own_fault, score_safely
from shoal.tasks.verify.code.compare import match_output, match_values
from shoal.tasks.verify.code.tests import CallTests, JudgeTests, ScriptTests, Tests, read_tests

LIMITS = Limits(cpu_s=8, wall_s=40.0, memory_bytes=512 << 20)
"""Changing breaks: scores; raise the version."""
MAX_OUTPUT_BYTES = 1 << 20
MAX_CALLS = 10_000
_WORKS = "shoal.box.code"
_MEMORY_MARGIN = 2
_ALL_CASES = 3
"""times the wall-clock limit, for all runs of a program together: each has a box and limits of its own"""
_MOST_BOXES = 4
_LANGUAGES = ("python", "python3", "py")
_TEST_FAILED = "a test failed"
_PASSED = Score(1.0, "all tests passed")


class _FailureError(Exception):
    """A test that was not passed; the text says how."""


class CodeVerifier:
    """Unit tests of Python; it holds a bounded pool of boxes."""

    name = "code"
    version = 2
    dear = True

    def __init__(self, *, size: int | None = None, limits: Limits = LIMITS, namespaces: bool = True) -> None:
        self.limits = limits
        size = size or max(1, min(_MOST_BOXES, os.cpu_count() or 1))
        self._pool = Pool(_WORKS, size, namespaces=namespaces)
        self._judges = Pool(_WORKS, size, namespaces=namespaces)
        self._wait_s = 100 * limits.wall_s
        with self._pool.borrow(self._wait_s) as warden:
            warden.start()  # refuses now, and not at the first completion
            self.walls = warden.walls

    @property
    def stamp(self) -> str:
        # The walls are of it: code that writes a file can do so in one kind of box only.
        return f"{self.name}/{self.version} python-{'.'.join(platform.python_version_tuple()[:2])} {self.walls}"

    def check_info(self, info: Info) -> None:
        read_tests(info)

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        if len(completion) > MAX_COMPLETION_CHARS:
            return Score(0.0, "too long")
        tests, source = read_tests(info), find_source(completion, info.get("prompt", ""))
        if not source.strip():
            return Score(0.0, "no code")
        try:
            with self._pool.borrow(self._wait_s) as warden:
                return self._run_tests(warden, tests, source)
        except BoxError as error:
            return own_fault(str(error))

    def score_many(self, attempts: Sequence[Attempt]) -> list[Score]:
        with ThreadPoolExecutor(max_workers=self._pool.size) as threads:
            return list(threads.map(lambda one: score_safely(self, one.info, one.prompt, one.completion), attempts))

    def close(self) -> None:
        self._pool.close()
        self._judges.close()

    def _run_tests(self, warden: Warden, tests: Tests, source: str) -> Score:
        match tests:
            case CallTests():
                return self._run_calls(warden, tests, source)
            case ScriptTests():
                return self._run_scripts(warden, tests, source)
            case JudgeTests():
                with self._judges.borrow(self._wait_s) as judge:
                    return self._run_judge(warden, judge, tests, source)

    def _run_calls(self, warden: Warden, tests: CallTests, source: str) -> Score:
        with warden.open_cell("calls", {"source": source, "function": tests.function}, self.limits) as cell:
            score, ended = _try(lambda: _check_calls(cell, tests))
            return self._settle(score, cell.finish(), ended=ended)

    def _run_scripts(self, warden: Warden, tests: ScriptTests, source: str) -> Score:
        score, started, most_s = _PASSED, time.monotonic(), _ALL_CASES * self.limits.wall_s
        for number, (given, wanted) in enumerate(tests.cases):
            if time.monotonic() - started > most_s:
                return give_up(f"more than {most_s:g} s for all cases")
            one = self._run_script(warden, source, given, wanted)
            if one.value == 0.0:
                return Score(0.0, f"{one.reason} (case {number})")
            score = one if one is not _PASSED else score  # near a limit once is near a limit
        return mark_near(score) if time.monotonic() - started > most_s / MARGIN else score

    def _run_script(self, warden: Warden, source: str, given: str, wanted: str) -> Score:
        with warden.open_cell("script", {"source": source, "stdin": given}, self.limits) as cell:
            try:
                output = cell.read_output(MAX_OUTPUT_BYTES)
            except EndedError as error:
                return self._settle(Score(0.0, str(error)), cell.finish(), ended=True)
            if len(output) > MAX_OUTPUT_BYTES:
                return self._settle(Score(0.0, "too much output"), cell.finish(), ended=False)
            report = cell.finish(kill=False)
        if report.code != 0:
            return self._settle(Score(0.0, f"it ended with code {report.code}"), report, ended=True)
        is_right = match_output(output.decode(errors="replace"), wanted)
        return self._settle(_PASSED if is_right else Score(0.0, "another output"), report, ended=False)

    def _run_judge(self, warden: Warden, judge: Warden, tests: JudgeTests, source: str) -> Score:
        job = {"tests": tests.source, "function": tests.function, "prefix": tests.prefix}
        with (
            warden.open_cell("calls", {"source": source, "function": tests.function}, self.limits) as cell,
            judge.open_cell("judge", job, self.limits) as bench,
        ):
            score, ended = _try(lambda: _hear_judge(bench, cell))
            judged = self._settle(score, bench.finish(), ended=score.reason == _TEST_FAILED)
            return self._settle(judged, cell.finish(), ended=ended)

    def _settle(self, score: Score, report: Report, *, ended: bool) -> Score:
        """The score of work that took so much; `ended` is whether it fell silent before we ended it."""
        if report.late:
            return give_up(f"more than {self.limits.wall_s:g} s")
        if ended and report.code == -signal.SIGKILL:  # no cell can send that: a limit did, or who else ends us
            return give_up(f"killed after {report.cpu_s:.1f} s of CPU time")
        is_long = report.cpu_s > self.limits.cpu_s / MARGIN
        is_wide = report.peak_bytes > self.limits.memory_bytes / _MEMORY_MARGIN
        return mark_near(score) if is_long or is_wide or "MemoryError" in score.reason else score


def find_source(completion: str, prefix: str) -> str:
    """The program of a completion: its last fenced block, or all of it, after what the task puts before it."""
    text = drop_thoughts(completion)
    block = find_block(text, *_LANGUAGES)
    return prefix + ("\n" if prefix and block is not None else "") + (text if block is None else block)


def _try(work: Callable[[], None]) -> tuple[Score, bool]:
    """The score of some conversation with a box, and whether the box ended it."""
    try:
        work()
    except _FailureError as error:
        return Score(0.0, str(error)), False
    except EndedError as error:
        return Score(0.0, str(error)), True
    except RecursionError:
        return Score(0.0, "a value nested too deep"), False
    return _PASSED, False


def _await_ready(cell: Cell) -> None:
    if cell.receive() != {"ready": True}:
        raise _FailureError("the program is no program with that function")


def _check_calls(cell: Cell, tests: CallTests) -> None:
    _await_ready(cell)
    for number, (arguments, right) in enumerate(tests.cases):
        found = _call(cell, {"args": arguments, "kwargs": {"d": []}})
        if not any(match_values(found, wanted) for wanted in right):
            raise _FailureError(f"case {number}: another value")


def _call(cell: Cell, call: object) -> object:
    """What the candidate returns, encoded; _FailureError if it raises."""
    cell.send(call)
    match cell.receive():
        case {"value": value}:
            return value
        case {"error": str(name)}:
            raise _FailureError(f"it raised {quote_text(name)}")
    raise _FailureError("an answer of no known kind")


def _hear_judge(bench: Cell, cell: Cell) -> None:
    """Pass calls on until the judge has seen enough; whatever it does not call passed is a failure."""
    _await_ready(cell)
    for _ in range(MAX_CALLS):
        try:
            message = bench.receive()
        except EndedError:
            raise _FailureError(_TEST_FAILED) from None
        match message:
            case {"passed": True}:
                return
            case {"call": call}:
                cell.send(call)
                bench.send(_clean_answer(cell.receive()))
            case _:
                raise _FailureError("the tests made no sense")
    raise _FailureError(f"more than {MAX_CALLS} calls")


def _clean_answer(answer: object) -> dict[str, object]:
    match answer:
        case {"value": value}:
            return {"value": value}
        case {"error": str(name)}:
            return {"error": name}
    raise _FailureError("an answer of no known kind")
