"""Code: 1 if the Python of a completion passes all tests of its task, else 0.

    completion -> source (after the thoughts, last fenced block, or all of it) -> sandbox -> values -> compared here

Invariants:
- the source runs in a fresh sandbox job that does not know the expected values: what it returns or prints leaves the
  job as plain data and is compared outside, so there is no verdict in the job to forge;
- tests written as source run in a separate job, and call the candidate's job through this process. Their random
  numbers and clock follow from a seed of their own. They get no NaN or infinity unless their code names one, because
  comparisons with those can pass whatever is right, and they must call the function at least once;
- one failure ends the attempt; hitting a limit, or a fault of this machine, gives a score that is not firm.
"""

import hashlib
import io
import json
import os
import platform
import re
import signal
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from shoal.rollout import Score
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.pool import JobEndedError, JobReport, SandboxError, SandboxJob, SandboxPool, SandboxProcess
from shoal.tasks.base import MAX_COMPLETION_CHARS, guard_score, quote_text
from shoal.tasks.verify.base import (
    MARGIN,
    Attempt,
    Info,
    Verifier,
    give_up,
    is_firm,
    mark_near,
    own_fault,
    score_safely,
)
from shoal.tasks.verify.code.compare import is_finite, match_output, match_values
from shoal.tasks.verify.code.tests import AssertTests, CallTests, ScriptTests, Tests, read_tests
from shoal.tasks.verify.extract import drop_thoughts, find_block

LIMITS = SandboxLimits(cpu_s=8, wall_s=40.0, memory_bytes=512 << 20)
"""Changing breaks: scores; raise the version."""
MAX_OUTPUT_BYTES = 1 << 20
MAX_CALLS = 10_000
_PROGRAMS = "shoal.sandbox.programs.code"
_MEMORY_MARGIN = 2
_ALL_CASES = 3
"""limit for all runs of a program together, in wall-clock limits: each run has its own job and limits"""
_MAX_PROCESSES = 4
_LANGUAGES = ("python", "python3", "py")
_TEST_FAILED = "a test failed"
_PROGRAM_SEED = "0"
_INFINITE = re.compile(r"(?:(?:is)?(?:nan|inf|finite)|infinity|['\"][-+]?(?:nan|inf|infinity)['\"])", re.IGNORECASE)
"""a name or a text in Python by which a test asks for a value that is not finite"""
_PASSED = Score(1.0, "all tests passed")
_SHIFTS = 7
"""other places for objects. The order of a small set depends on addresses modulo eight blocks"""
_AGAIN_S = 4.0
"""a false claim about a slow program must not cost a validator more than this"""

Given = dict[str, Any]
"""the input of a job"""


class _FailureError(Exception):
    """A failed test; the text gives the reason."""


class CodeVerifier(Verifier):
    """Unit tests of Python, in a bounded pool of sandboxes."""

    name = "code"
    version = 4
    expensive = True

    def __init__(self, *, size: int | None = None, limits: SandboxLimits = LIMITS, namespaces: bool = True) -> None:
        self.limits = limits
        size = size or max(1, min(_MAX_PROCESSES, os.cpu_count() or 1))
        self._pool = SandboxPool(_PROGRAMS, size, namespaces=namespaces)
        self._judges = SandboxPool(_PROGRAMS, size, namespaces=namespaces)
        self._wait_s = 100 * limits.wall_s
        with self._pool.borrow(self._wait_s) as process:
            process.start()  # fail now, not at the first completion
            self._isolation = process.isolation

    @property
    def stamp(self) -> str:
        # The isolation is part of it: only one kind of sandbox lets code write files.
        return f"{self.name}/{self.version} python-{'.'.join(platform.python_version_tuple()[:2])} {self._isolation}"

    def check_info(self, info: Info) -> None:
        read_tests(info)

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        return self._score(info, completion, shift=0)

    def score_again(self, attempt: Attempt, first: Score) -> Iterator[Score]:
        """Scores with the objects of the program at other addresses (sandbox/chance.py)."""
        if not is_firm(first) or len(attempt.completion) > MAX_COMPLETION_CHARS:
            return
        start = time.monotonic()
        for shift in range(1, 1 + _SHIFTS):
            yield guard_score(partial(self._score, attempt.info, attempt.completion, shift=shift))
            if time.monotonic() - start > _AGAIN_S:
                return

    def _score(self, info: Info, completion: str, *, shift: int) -> Score:
        tests, source = read_tests(info), find_source(completion, info.get("prompt", ""))
        if not source.strip():
            return Score(0.0, "no code")
        given = {"source": source, "seed": _PROGRAM_SEED, "shift": shift}
        try:
            with self._pool.borrow(self._wait_s) as process:
                return self._run_tests(process, tests, given)
        except SandboxError as error:
            return own_fault(str(error))

    def score_many(self, attempts: Sequence[Attempt]) -> list[Score]:
        with ThreadPoolExecutor(max_workers=len(self._pool.processes)) as threads:
            return list(threads.map(lambda one: score_safely(self, one.info, one.prompt, one.completion), attempts))

    def close(self) -> None:
        self._pool.close()
        self._judges.close()

    def _run_tests(self, process: SandboxProcess, tests: Tests, program: Given) -> Score:
        match tests:
            case CallTests():
                with process.open_job("calls", {**program, "function": tests.function}, self.limits) as job:
                    score, ended = _try(lambda: _check_calls(job, tests))
                    return self._settle(score, job.finish(), ended=ended)
            case ScriptTests():
                return self._run_scripts(process, tests, program)
            case AssertTests():
                with self._judges.borrow(self._wait_s) as judge:
                    return self._run_judge(process, judge, tests, program)

    def _run_scripts(self, process: SandboxProcess, tests: ScriptTests, program: Given) -> Score:
        score, started, most_s = _PASSED, time.monotonic(), _ALL_CASES * self.limits.wall_s
        for number, (given, wanted) in enumerate(tests.cases):
            if time.monotonic() - started > most_s:
                return give_up(f"more than {most_s:g} s for all cases")
            one = self._run_script(process, {**program, "stdin": given}, wanted)
            if one.value == 0.0:
                return Score(0.0, f"{one.reason} (case {number})")
            score = one if one is not _PASSED else score  # one case near a limit marks the whole score
        return mark_near(score) if time.monotonic() - started > most_s / MARGIN else score

    def _run_script(self, process: SandboxProcess, program: Given, wanted: str) -> Score:
        with process.open_job("script", program, self.limits) as job:
            try:
                output = job.read_output(MAX_OUTPUT_BYTES)
            except JobEndedError as error:
                return self._settle(Score(0.0, str(error)), job.finish(), ended=True)
            if len(output) > MAX_OUTPUT_BYTES:
                return self._settle(Score(0.0, "too much output"), job.finish(), ended=False)
            report = job.finish(kill=False)
        if report.code != 0:
            return self._settle(Score(0.0, f"it ended with code {report.code}"), report, ended=True)
        is_right = match_output(output.decode(errors="replace"), wanted)
        return self._settle(_PASSED if is_right else Score(0.0, "another output"), report, ended=False)

    def _run_judge(self, process: SandboxProcess, judge: SandboxProcess, tests: AssertTests, program: Given) -> Score:
        given = {"tests": tests.source, "function": tests.function, "prefix": tests.prefix}
        seed = hashlib.sha256(json.dumps([given, program["source"]]).encode()).hexdigest()
        with (
            process.open_job("calls", {**program, "function": tests.function}, self.limits) as job,
            judge.open_job("judge", {**given, "seed": seed, "shift": 0}, self.limits) as tests_job,
        ):
            score, ended = _try(lambda: _serve_tests(tests_job, job, must_be_finite=not _names_infinity(tests.source)))
            judged = self._settle(score, tests_job.finish(), ended=score.reason == _TEST_FAILED)
            return self._settle(judged, job.finish(), ended=ended)

    def _settle(self, score: Score, report: JobReport, *, ended: bool) -> Score:
        """The score of an attempt given the resources it used; `ended` if the job ended before we stopped it."""
        if report.late:
            return give_up(f"more than {self.limits.wall_s:g} s")
        if ended and report.code == -signal.SIGKILL:  # no job can send that: a limit, or something outside, did
            return give_up(f"killed after {report.cpu_s:.1f} s of CPU time")
        is_long = report.cpu_s > self.limits.cpu_s / MARGIN
        is_wide = report.peak_bytes > self.limits.memory_bytes / _MEMORY_MARGIN
        return mark_near(score) if is_long or is_wide or "MemoryError" in score.reason else score


@lru_cache(maxsize=64)
def _names_infinity(source: str) -> bool:
    """Whether the code of tests, not a comment or a sentence in it, names a value that is not finite."""
    try:
        tokens = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]
    except (tokenize.TokenError, SyntaxError):
        return False
    return any(map(_INFINITE.fullmatch, tokens))


def find_source(completion: str, prefix: str) -> str:
    """The program of a completion: its last fenced block, or all of it, after the task's own source."""
    text = drop_thoughts(completion)
    block = find_block(text, *_LANGUAGES)
    return prefix + ("\n" if prefix and block is not None else "") + (text if block is None else block)


def _try(work: Callable[[], None]) -> tuple[Score, bool]:
    """The score of an exchange with a job, and whether the job ended it."""
    try:
        work()
    except _FailureError as error:
        return Score(0.0, str(error)), False
    except JobEndedError as error:
        return Score(0.0, str(error)), True
    except RecursionError:
        return Score(0.0, "a value nested too deep"), False
    return _PASSED, False


def _await_ready(job: SandboxJob) -> None:
    if job.receive() != {"ready": True}:
        raise _FailureError("the program is no program with that function")


def _check_calls(job: SandboxJob, tests: CallTests) -> None:
    _await_ready(job)
    is_open = [True] * len(tests.readings)
    for number, arguments in enumerate(tests.arguments):
        answer = _pass_call(job, {"args": arguments, "kwargs": {"d": []}})
        if "error" in answer:
            raise _FailureError(f"it raised {quote_text(str(answer['error']))}")
        for place, wanted in enumerate(tests.readings):
            is_open[place] = is_open[place] and match_values(answer["value"], wanted[number])
        if not any(is_open):
            raise _FailureError(f"case {number}: another value")


def _serve_tests(tests_job: SandboxJob, job: SandboxJob, *, must_be_finite: bool) -> None:
    """Forward calls until the tests finish; everything except a reported pass is a failure."""
    _await_ready(job)
    for number in range(MAX_CALLS):
        try:
            message = tests_job.receive()
        except JobEndedError:
            raise _FailureError(_TEST_FAILED) from None
        match message:
            case {"passed": True} if number == 0:
                raise _FailureError("the tests did not call the function")
            case {"passed": True}:
                return
            case {"call": call}:
                answer = _pass_call(job, call)
                if must_be_finite and "value" in answer and not is_finite(answer["value"]):
                    raise _FailureError("a value that is not finite")
                tests_job.send(answer)
            case _:
                raise _FailureError("the tests made no sense")
    raise _FailureError(f"more than {MAX_CALLS} calls")


def _pass_call(job: SandboxJob, call: object) -> dict[str, object]:
    """The candidate's answer to a call, with only the expected fields."""
    job.send(call)
    match job.receive():
        case {"value": value}:
            return {"value": value}
        case {"error": str(name)}:
            return {"error": name}
    raise _FailureError("an answer of no known kind")
