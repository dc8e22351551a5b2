"""The validator's loop: claim, fetch, judge, send the verdict. A few jobs of one version at a time.

Invariants:
- nothing is claimed before all earlier claims are finished. A claim that misses its deadline is left to other
  validators; its computation ends first, and then one job is claimed alone. The number of claims follows from the
  measured throughput;
- files are removed once their verdict is accepted; nothing of a file is kept;
- a file that cannot be judged here (no working parser, a version that no relay has any more) gets an inconclusive
  verdict: another validator may be able to judge it. Unreachable relays are no such reason: the validator waits for
  them until the claim ends, and before the next claim. So an outage costs a validator one lapsed claim, however long;
- when the run is finished, what is left for this validator is judged first: the queue, and appeals if it was started
  for them;
- after the first signal nothing more is claimed, and claimed jobs are judged if that takes at most `SHUTDOWN_GRACE_S`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.net.retry import RefusedError
from shoal.node.receipts import InvalidDocumentError
from shoal.node.session import ASK_S, RoleState, Session, SessionError
from shoal.node.weights import PolicyCache
from shoal.policy.model import Policy
from shoal.protocol.messages import MAX_JOBS, ClaimAnswer, HeartbeatAnswer, Job, Verdict
from shoal.util.aio import run_until_set
from shoal.util.clock import read_clock
from shoal.validator.finding import Assessment, rejected, violation
from shoal.validator.judge import Judge

logger = logging.getLogger(__name__)

RECENT = 32
"""number of recent judgements that the throughput is measured over"""
PATIENCE = 4
"""jobs claimed at once take at most this fraction (1/n) of a claim's time"""
GROWTH = 2
"""after a late judgement, factor by which the number of claims may grow with each judgement in time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingTime:
    """Timing of one judgement of several jobs."""

    jobs: int
    rollouts: int
    """replayed"""
    tokens: int
    """replayed"""
    seconds: float
    """time from the files to the assessments"""


class Throughput:
    """Throughput of a validator over its recent judgements."""

    def __init__(self) -> None:
        self._timings: deque[JudgingTime] = deque(maxlen=RECENT)
        self._most = MAX_JOBS

    def add(self, timing: JudgingTime) -> None:
        """Add one judgement."""
        self._timings.append(timing)
        self._most = min(MAX_JOBS, GROWTH * self._most)

    def note_late(self) -> None:
        """Note a missed deadline: one job is claimed next, whatever the throughput was.

        Jobs differ: a newcomer's is replayed in full, a trusted owner's in part. After many cheap ones, as many
        expensive ones would be claimed each time, and the validator would be limited for lapsed claims.
        """
        self._most = 1

    @property
    def rollouts_per_s(self) -> float:
        return self._rate(sum(timing.rollouts for timing in self._timings))

    @property
    def tokens_per_s(self) -> float:
        return self._rate(sum(timing.tokens for timing in self._timings))

    def choose_most(self, claim_s: float) -> int:
        """Jobs to claim at once: as many as can be judged well before their claims end; one until that is known."""
        per_s = self._rate(sum(timing.jobs for timing in self._timings))
        return max(1, min(self._most, int(per_s * claim_s / PATIENCE)))

    def describe(self) -> str:
        """A short text; empty before the first judgement."""
        if not self._timings:
            return ""
        return f"replays {self.rollouts_per_s:,.0f} rollouts/s, {self.tokens_per_s:,.0f} tokens/s"

    def _rate(self, number: int) -> float:
        seconds = sum(timing.seconds for timing in self._timings)
        return number / seconds if seconds > 0.0 else 0.0


POLL_S = 20
"""how long the coordinator may hold a claim request until there is a job"""
SHUTDOWN_GRACE_S = 30.0
"""how long a stopping validator continues with its claims"""
_PAUSE_S = 1.0
_LIMITED = "limited"
"""the one refusal that ends with time"""


class Validator:
    """One validator; `run` ends when the run is finished and nothing is left to judge, or after the first signal."""

    def __init__(self, session: Session, judge: Judge, policies: PolicyCache, folder: Path) -> None:
        self._session, self._judge, self._policies = session, judge, policies
        self._folder = folder / "jobs"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink()  # of a process that was killed; its claim is reassigned
        self.verdicts: dict[Verdict, int] = dict.fromkeys(Verdict, 0)
        self._version = -1
        self._missing_version: int | None = None
        """version whose weights did not arrive in time: without them the next claim would lapse as well"""
        self._throughput = Throughput()
        self._finished = False
        self._limited = ""
        """why it may not judge for a while, as last reported"""
        session.read_state, session.on_heartbeat = self._describe_state, self._hear

    async def run(self) -> None:
        """Judge until the run is finished and nothing is left, or until the session stops."""
        ending = asyncio.create_task(self._await_end())
        try:
            while not ending.done():
                claim = asyncio.create_task(self._claim())
                await asyncio.wait((claim, ending), return_when=asyncio.FIRST_COMPLETED)
                if not claim.done():  # a job that is on its way to us lapses and is reassigned
                    claim.cancel()
                    await asyncio.gather(claim, return_exceptions=True)
                    break
                await self._judge_claim(claim.result())
        finally:
            ending.cancel()
        while not self._session.stopping.is_set() and (answer := await self._claim(wait_s=0)).jobs:
            await self._judge_claim(answer)
        if not self._finished:  # afterwards it stays: an appeal is only accepted if someone can be asked to judge it
            await self._session.leave()

    def describe(self) -> str:
        """A status line, the most important first: a narrow terminal cuts its end."""
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in self.verdicts.items() if count)
        wait = self._session.waits.longest()
        parts = [f"v{self._version}" if self._version >= 0 else "no weights yet"]
        if self._session.problem:
            parts.append(self._session.problem)
        elif self._limited:
            parts.append(self._limited)
        elif wait is not None:
            parts.append(f"waits for {wait.waiting_for}: {wait.detail or wait.name}")
        parts.append(counts or "no verdicts yet")
        if rates := self._throughput.describe():
            parts.append(rates)
        return "  ".join(parts)

    async def _claim(self, wait_s: int = POLL_S) -> ClaimAnswer:
        """Claim the next jobs; claims nothing while the weights for them may not arrive."""
        if self._missing_version is not None:
            await self._policies.find(self._missing_version)
            self._missing_version = None
        most = self._throughput.choose_most(self._session.params.claim_s)
        try:
            claim_jobs = partial(self._session.client.claim_jobs, wait_s=wait_s, most=most)
            return await self._session.ask_coordinator("job", claim_jobs)
        except RefusedError as error:
            if error.refusal.code != _LIMITED:
                raise SessionError(f"no more jobs: {error}", error.refusal.code) from None
            return self._wait_out_limit(str(error))

    def _wait_out_limit(self, reason: str) -> ClaimAnswer:
        """Ask again later: a limit ends with time."""
        if reason != self._limited:
            logger.warning(reason)
        self._limited = reason
        return ClaimAnswer(retry_after_s=POLL_S)

    async def _judge_claim(self, answer: ClaimAnswer) -> None:
        """Judge the claimed jobs; after a signal, only for `SHUTDOWN_GRACE_S`."""
        if not await run_until_set(self._session.stopping, self._take_answer(answer), SHUTDOWN_GRACE_S):
            logger.warning("some claimed jobs could not be judged before shutdown; left to other validators")

    async def _take_answer(self, answer: ClaimAnswer) -> None:
        if answer.jobs:
            self._limited = ""
        if not answer.jobs:
            await self._pause(max(_PAUSE_S, min(answer.retry_after_s, POLL_S)))
        for version in dict.fromkeys(job.version for job in answer.jobs):
            await self._judge_in_time([job for job in answer.jobs if job.version == version])

    async def _await_end(self) -> None:
        """Wait until the run is finished or the session stops; a claim may take longer than either."""
        while not (self._finished or self._session.stopping.is_set()):
            await self._pause(_PAUSE_S)

    async def _judge_in_time(self, jobs: Sequence[Job]) -> None:
        """Judge jobs of one version before their deadline, and send the verdicts."""
        deadline_ms = min(job.deadline_ms for job in jobs)
        left_s = (deadline_ms - read_clock() - self._session.client.clock_offset_ms) / 1000
        try:
            async with asyncio.timeout(max(left_s, _PAUSE_S)):
                await self._judge_jobs(jobs)
        except TimeoutError:
            self._throughput.note_late()
            names = ", ".join(job.submission for job in jobs)
            logger.warning(f"{names}: not judged within {left_s:.0f} s; left to other validators")
            await self._session.waits.retry_forever(  # otherwise it would delay the next ones too
                "replay", self._judge.finish, waiting_for="this machine", timeout_s=self._session.params.claim_s
            )
        finally:
            for job in jobs:
                self._locate(job).unlink(missing_ok=True)

    async def _judge_jobs(self, jobs: Sequence[Job]) -> None:
        version = jobs[0].version
        self._missing_version = version  # until the weights are here
        # First the previous version, which is here if its jobs came before: then this one takes the place of an older.
        wants_previous = version > 0 and self._judge.needs_previous
        previous = await self._policies.find(version - 1, beside=[version]) if wants_previous else None
        policy = await self._policies.find(version, beside=[version - 1] if wants_previous else ())
        self._missing_version = None
        if policy is None:
            for job in jobs:
                await self._send(job, rejected(Verdict.INCONCLUSIVE, [violation("weights", f"v{version} is gone")]))
            return
        self._judge.previous = previous
        self._version = max(self._version, version)
        problems = await asyncio.gather(*(self._fetch(job) for job in jobs))
        files = [(job, self._locate(job)) for job, problem in zip(jobs, problems, strict=True) if not problem]
        assessments = iter(await self._assess_files(files, policy) if files else [])
        for job, problem in zip(jobs, problems, strict=True):
            lost = rejected(Verdict.INCONCLUSIVE, [violation("file", problem)])
            await self._send(job, lost if problem else next(assessments))

    async def _fetch(self, job: Job) -> str:
        """Download the file of a job; returns why it failed, or an empty string.

        An unreachable coordinator proves nothing about the file: it is asked until the claim ends.
        """
        blob, size, path = job.manifest.blob, job.manifest.size, self._locate(job)
        client = self._session.client
        try:
            await self._session.waits.retry_forever(
                "file",
                lambda: client.fetch_blob(job.submission, blob, size, path),
                waiting_for="the coordinator",
                timeout_s=ASK_S,
            )
        except (InvalidDocumentError, RefusedError) as error:
            logger.warning(f"{job.submission}: {error}")
            return str(error) or "it cannot be had"
        return ""

    async def _assess_files(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        first, begun = files[0][0], time.perf_counter()
        with self._session.spans.span("judge", step=first.step, version=first.version, jobs=len(files)):
            assessments = await self._judge.judge_all(files, policy)
        self._throughput.add(
            JudgingTime(
                jobs=len(files),
                rollouts=sum(assessment.replayed.rollouts for assessment in assessments),
                tokens=sum(assessment.replayed.tokens for assessment in assessments),
                seconds=time.perf_counter() - begun,
            )
        )
        return assessments

    async def _send(self, job: Job, assessment: Assessment) -> None:
        try:
            send_verdict = partial(self._session.client.send_verdict, assessment.state(job))
            await self._session.ask_coordinator("verdict", send_verdict)
        except RefusedError as error:
            logger.warning(f"{job.submission}: the verdict was refused: {error}")
            return
        self.verdicts[assessment.verdict] += 1

    def _locate(self, job: Job) -> Path:
        return self._folder / f"{job.submission}.parquet"

    def _describe_state(self) -> RoleState:
        return RoleState(version=self._version, tokens_per_s=round(self._throughput.tokens_per_s))

    def _hear(self, answer: HeartbeatAnswer) -> None:
        self._finished = self._finished or answer.finished

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the session stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._session.stopping.wait()
        except TimeoutError:
            return
