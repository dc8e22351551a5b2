"""Read a submission: the only way from an untrusted file to records, for validators and trainers alike.

    open the file -> parse it in a sandbox (submission/parse.py) -> check every length and value here -> records
    parser died -> parse again -> parser died -> parse a known good file -> ParserCrashError

Invariants:
- the output of a sandbox is untrusted and checked. What passes is well-formed and bounded, but still only a claim:
  later stages check whether prompts, seeds, versions, rewards and proofs are right;
- `FormError` is the file's fault, `ParserPoolError` is ours. A file is blamed for crashing its parsers, or for
  exceeding memory, only if a known good file is parsed right afterwards within the same limits, with all of that memory
  taken. A parser killed from outside (SIGKILL: the kernel when memory runs out) is never the file's fault;
- a file is parsed at most twice, and the known good file once, so reading always ends;
- a bounded file is parsed with at most `BOUND_FACTOR` times the CPU time that an honest file of its lease needs on this
  machine, measured with the known good file, and not again if it exceeds that;
- cancelling the caller ends its parser.
"""

import asyncio
import os
import signal
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from shoal.errors import ConfigError
from shoal.protocol.messages import RolloutEntry
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.sandbox.frames import clean_sentence
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.pool import (
    JobEndedError,
    JobOutputError,
    JobReport,
    SandboxError,
    SandboxJob,
    SandboxPool,
    SandboxProcess,
)
from shoal.submission.columns import (
    ARRAYS,
    COLUMNS,
    Arrays,
    Column,
    Columns,
    count_bytes,
    find_excess,
    limit_bytes,
    split_rows,
    view_columns,
)
from shoal.submission.limits import NO_ROOM, FormError, ParserCrashError, SubmissionLimits
from shoal.submission.write import make_entry
from shoal.util.units import count_things

MAX_TRIES = 2
_PROGRAMS = "shoal.submission.parse"
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve address space, which is limited here
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads cannot be forked safely
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_BASE_BYTES = 64 << 20
_DECODING_FACTOR = 6
"""memory needed for decoding, as a multiple of the decoded size"""
BOUND_FACTOR, _LEAST_BOUND_S = 10, 0.2
"""CPU time of a bounded file, as a multiple of what an honest one needs; and at least this much"""
_SAMPLE_ROLLOUTS, _SAMPLE_TOKENS = 16, 512
"""so many rollouts of so many tokens take as long as the known good file, which is mostly the start of the parser"""
_CPU_SHARE = 0.5
"""a parser killed beyond this share of its CPU limit has reached it: the kernel's two clocks differ"""
_RETRY_S = 0.1
_T = TypeVar("_T")
_FINISHES = {finish.value: finish for finish in Finish}


class ParserPoolError(Exception):
    """Parsing does not work on this machine at the moment; says nothing about the file."""


class _ParserDeathError(Exception):
    """A parser died or had to be killed. `lost`: it was killed from outside, which is not the fault of the file.
    `spent`: it used up its CPU time."""

    def __init__(self, reason: str, *, lost: bool = False, spent: bool = False) -> None:
        super().__init__(reason)
        self.lost, self.spent = lost, spent


@dataclass(slots=True)
class ReadCost:
    """What reading a file took."""

    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubmissionContents:
    """The claims of a submission."""

    groups: tuple[Group, ...]
    """in ascending order of index; rollouts are named as by `plan_group`"""
    proofs: dict[str, tuple[bytes, ...]]
    """by rollout id"""

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts in order of group, then sample, as in the manifest."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def entries(self) -> tuple[RolloutEntry, ...]:
        """The rollout entries that its manifest must contain."""
        return tuple(make_entry(rollout) for rollout in self.rollouts)


async def read_submission(
    parsers: "ParserPool",
    path: Path,
    limits: SubmissionLimits,
    *,
    bounded: bool = False,
    cost: ReadCost | None = None,
) -> SubmissionContents:
    """Read the claims of a file; `bounded`: with little more CPU time than an honest file needs.

    `FormError`: the file is not a submission within the limits, or crashes its parsers. `ParserPoolError`: parsing does
    not work on this machine at the moment, which says nothing about the file.
    """
    return read_claims(await parsers.parse(path, limits, bounded=bounded, cost=cost), limits)


# Parsing in a sandbox


class ParserPool:
    """Sandboxes that parse files, each started on first use. Use as `async with ParserPool() as parsers`."""

    def __init__(self, *, size: int = 1, cpu_s: int = 10, wall_s: float = 30.0, programs: str = _PROGRAMS) -> None:
        self.sandboxes = SandboxPool(programs, size, environment=_ENVIRONMENT)
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._sample_s = 0.0
        """CPU time of the known good file on this machine; 0 until it is measured"""
        self._slots = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(size, "parser")

    async def __aenter__(self) -> "ParserPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def parse(
        self, path: Path, limits: SubmissionLimits, *, bounded: bool = False, cost: ReadCost | None = None
    ) -> Columns:
        """Parse the columns of a file. FormError: the file is invalid. ParserPoolError: it could not be parsed here."""
        file, cost = _open_file(path), cost or ReadCost()
        try:
            file_bytes, decoded_bytes = _check_file(file, limits), limit_bytes(limits)
            wide = SandboxLimits(
                cpu_s=self._cpu_s,
                wall_s=self._wall_s,
                memory_bytes=_BASE_BYTES + 2 * file_bytes + _DECODING_FACTOR * decoded_bytes,
                output_bytes=_BASE_BYTES + decoded_bytes,
            )
            parse_own = _prepare_trial(wide, cost)
            tight = replace(wide, cpu_s=await self._bound_cpu(limits, wide)) if bounded else wide
            return await self._parse_persistently(
                partial(_run_job, "parse", asdict(limits), file, tight, partial(_receive_columns, limits), cost=cost),
                parse_own,
                tries=1 if bounded else MAX_TRIES,
            )
        finally:
            os.close(file)

    async def _bound_cpu(self, limits: SubmissionLimits, wide: SandboxLimits) -> float:
        """CPU time for a bounded file."""
        if not self._sample_s:
            cost = ReadCost()
            await self._try_own_file(_prepare_trial(wide, cost))
            self._sample_s = cost.cpu_s
        size = limits.max_rollouts / _SAMPLE_ROLLOUTS * max(1.0, limits.max_tokens / _SAMPLE_TOKENS)
        bound_s = max(_LEAST_BOUND_S, BOUND_FACTOR * self._sample_s * (1 + size))
        return min(float(self._cpu_s), bound_s)

    async def close(self) -> None:
        """End all parsers; returns when they have exited."""
        await asyncio.to_thread(self.sandboxes.close)
        self._threads.shutdown()

    async def _parse_persistently(
        self, parse: Callable[[SandboxProcess], Columns], parse_own: Callable[[SandboxProcess], None], *, tries: int
    ) -> Columns:
        """`tries`: how often a file that uses up its CPU time is parsed; other deaths may be chance."""
        deaths: list[_ParserDeathError] = []
        while len(deaths) < MAX_TRIES and sum(death.spent for death in deaths) < tries:
            try:
                return await self._run(parse)
            except _ParserDeathError as error:
                deaths.append(error)
            except FormError as error:
                if str(error) == NO_ROOM:
                    await self._try_own_file(parse_own)
                raise
        reason = str(deaths[-1])
        if any(death.lost for death in deaths):
            raise ParserPoolError(f"submission parsers keep dying on this machine: {reason}")
        await self._try_own_file(parse_own)
        raise ParserCrashError(len(deaths), reason)

    async def _try_own_file(self, parse: Callable[[SandboxProcess], None]) -> None:
        """Parse a known good file within the limits of another; ParserPoolError if that fails too."""
        try:
            await self._run(parse)
        except _ParserDeathError as error:
            raise ParserPoolError(f"the submission parser failed on a known good file: {error}") from None

    async def _run(self, work: Callable[[SandboxProcess], _T]) -> _T:
        """Run work in a thread with its own sandbox, which ends if the caller is cancelled."""
        async with self._slots:
            with self.sandboxes.borrow(0.0) as sandbox:
                future = asyncio.get_running_loop().run_in_executor(self._threads, work, sandbox)
                try:
                    return await asyncio.shield(future)
                except asyncio.CancelledError:
                    while not future.done():
                        sandbox.interrupt()  # again: it may just have been starting
                        await asyncio.wait({future}, timeout=_RETRY_S)
                    future.exception()
                    raise


def _prepare_trial(limits: SandboxLimits, cost: ReadCost) -> Callable[[SandboxProcess], None]:
    """A job that parses the known good file within the limits of another."""
    own = {"memory_bytes": limits.memory_bytes}
    return partial(_run_job, "trial", own, None, limits, _receive_done, cost=cost)


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise  # the caller has not stored it there
    except OSError as error:  # no descriptor left, or a failing disk
        raise ParserPoolError(f"cannot open the submission file ({error.strerror})") from error


def _check_file(file: int, limits: SubmissionLimits) -> int:
    """Return the size of a file; FormError if it is not a regular file, or too large."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise FormError("not a file")
    if status.st_size > limits.file_bytes:
        raise FormError(f"a file of {status.st_size} bytes, allowed are {limits.file_bytes}")
    return status.st_size


def _run_job(
    program: str,
    value: Any,
    file: int | None,
    limits: SandboxLimits,
    receive: Callable[[SandboxJob], _T],
    sandbox: SandboxProcess,
    *,
    cost: ReadCost,
) -> _T:
    """Return the result of a job; _ParserDeathError if it does not end cleanly, whatever it returned."""
    answer: _T | FormError | _ParserDeathError
    try:
        with sandbox.open_job(program, value, limits, file) as job:
            try:
                answer = receive(job)
            except JobOutputError as error:
                raise _ParserDeathError(str(error)) from None
            except JobEndedError as error:
                answer = _ParserDeathError(str(error))
            except FormError as error:
                answer = error
            report = job.finish(kill=False)
            cost.cpu_s += report.cpu_s
    except (SandboxError, OSError) as error:
        raise _ParserDeathError(str(error), lost=True) from None
    except ConfigError as error:
        raise ParserPoolError(f"cannot parse submissions on this machine: {error}") from None
    except MemoryError:
        raise ParserPoolError("not enough memory for the contents of a submission") from None
    _check_report(report, limits)
    if isinstance(answer, FormError | _ParserDeathError):
        raise answer
    return answer


def _check_report(report: JobReport, limits: SandboxLimits) -> None:
    """Raise _ParserDeathError if a job did not end cleanly."""
    if report.late:
        raise _ParserDeathError(f"it took more than {limits.wall_s:g} s")
    is_killed = report.code == -signal.SIGKILL  # by the limit if it ignored SIGXCPU; it cannot send SIGKILL itself
    is_timed_out = report.code in (-signal.SIGXCPU, -signal.SIGPROF)
    if is_timed_out or (is_killed and report.cpu_s >= _CPU_SHARE * limits.cpu_s):
        raise _ParserDeathError(f"it took more than {limits.cpu_s:.3g} s of CPU time", spent=True)
    if is_killed:
        raise _ParserDeathError("it was ended by SIGKILL", lost=True)
    if report.code < 0:
        known = {number.value: number.name for number in signal.Signals}
        raise _ParserDeathError(f"it was ended by {known.get(-report.code, f'signal {-report.code}')}")
    if report.code > 0:
        raise _ParserDeathError(f"it failed with code {report.code}")


def _receive_columns(limits: SubmissionLimits, job: SandboxJob) -> Columns:
    sizes = read_sizes(job.receive(), limits)
    columns = view_columns(job.read_exactly(count_bytes(sizes)), sizes)
    if job.read_output(0):
        raise JobOutputError("an answer that continues after its end")
    return columns


def read_sizes(head: Any, limits: SubmissionLimits) -> list[int]:
    """The sizes that a response announces, all within the limits; FormError if it is a refusal."""
    match head:
        case {"error": str(text)}:
            raise FormError(clean_sentence(text))
        case {"fault": str(text)}:
            raise ParserPoolError(f"the submission parser does not work: {clean_sentence(text)}")
        case {"sizes": list(sizes)}:
            if len(sizes) != len(ARRAYS) or not all(type(size) is int and size >= 0 for size in sizes):
                raise JobOutputError("an answer without one size per array")
            if excess := find_excess(sizes, limits):
                raise JobOutputError(excess)
            return sizes
    raise JobOutputError("an answer of unknown form")


def _receive_done(job: SandboxJob) -> None:
    if job.receive() != {"done": True}:
        raise JobOutputError("an answer of unknown form")


# Records from columns


def read_claims(columns: Columns, limits: SubmissionLimits) -> SubmissionContents:
    """Build the records of a file; FormError if its values are invalid."""
    for column in COLUMNS:
        _check_column(column, columns[column.name], limits)
    _check_order(columns["group"][-1], columns["sample"][-1], limits.group_size)
    tokens, logprobs = columns["token_ids"][0], columns["logprobs"][0]
    _require_rows(logprobs == tokens, "logprobs are not one per token")
    split = {column.name: split_rows(column.kind, columns[column.name]) for column in COLUMNS}
    rows = [dict(zip(split, values, strict=True)) for values in zip(*split.values(), strict=True)]
    groups = tuple(
        _build_group(start, rows[start : start + limits.group_size]) for start in range(0, len(rows), limits.group_size)
    )
    ids = (rollout.id for group in groups for rollout in group.rollouts)
    return SubmissionContents(groups=groups, proofs=dict(zip(ids, (row["proofs"] for row in rows), strict=True)))


def _check_column(column: Column, arrays: Arrays, limits: SubmissionLimits) -> None:
    """Check lengths first: everything after relies on them."""
    for level, length in enumerate(column.lengths):
        lengths, most = arrays[level], length.most(limits)
        good = (lengths >= length.least) & (lengths <= most)
        if not good.all():
            place = int(good.argmin())
            where = f"{column.name} {place}" if level else f"rollout {place}: {column.name}"
            raise FormError(f"{where} of length {lengths[place]}, allowed are {length.least} to {most}")
        if int(lengths.sum(dtype=np.int64)) != len(arrays[level + 1]):
            raise FormError(f"{column.name}: lengths that do not add up")
    if column.check is not None:
        good = column.check(arrays[-1], limits)
        if not good.all():
            place = int(good.argmin())
            if column.lengths:
                place = int(np.searchsorted(np.cumsum(arrays[0], dtype=np.int64), place, side="right"))
            _refuse_row(place, f"{column.name} {column.error.format(limits)}")


def _check_order(groups: np.ndarray, samples: np.ndarray, size: int) -> None:
    """Check for whole groups in ascending order, with the samples of each counted from 0."""
    if len(groups) % size:
        raise FormError(f"{count_things(len(groups), 'rollout')}: no whole groups of {size}")
    _require_rows(samples == np.tile(np.arange(size), len(groups) // size), "sample out of order")
    firsts = groups[::size]
    _require_rows(groups == np.repeat(firsts, size), "group out of order")
    if not (firsts[:-1] < firsts[1:]).all():
        raise FormError("groups out of order")


def _build_group(start: int, rows: list[dict[str, Any]]) -> Group:
    index, task_id = rows[0]["group"], rows[0]["task_id"]
    if any(row["task_id"] != task_id for row in rows):
        _refuse_row(start, "a group of several tasks")
    return Group(
        index=index,
        task_id=task_id,
        rollouts=tuple(_build_rollout(start + place, row) for place, row in enumerate(rows)),
        scores=tuple(Score(row["reward"], row["reason"]) for row in rows),
    )


def _build_rollout(place: int, row: dict[str, Any]) -> Rollout:
    finish = _FINISHES.get(row["finish"])
    if finish is None:
        _refuse_row(place, f"finish is {row['finish']}, allowed are {' and '.join(sorted(_FINISHES))}")
    return Rollout(
        id=f"g{row['group']}.{row['sample']}",
        prompt_ids=row["prompt_ids"],
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        finish=finish,
        versions=(VersionRange(row["version"], 0, len(row["token_ids"])),),
        temperature=row["temperature"],
        seed=row["seed"],
    )


def _require_rows(good: np.ndarray, text: str) -> None:
    if not good.all():
        _refuse_row(int(good.argmin()), text)


def _refuse_row(row: int, text: str) -> NoReturn:
    raise FormError(f"rollout {row}: {text}")
