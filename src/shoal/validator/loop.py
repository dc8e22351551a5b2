"""The validator's loop: claim, fetch, judge, say. A few jobs of one version at a time.

Invariants:
- nothing more is claimed before all that was claimed is settled. A claim that cannot be finished in its time is left,
  and somebody else gets it; what is computed for it comes to its end first, and then one job is claimed alone;
- files are removed once their verdict is heard; nothing of a file is kept;
- a file that cannot be judged here (no reader, a version that no relay has any more) gets an inconclusive verdict:
  somebody else may know more. Relays that are away are no such reason: they are waited for until the claim ends, and
  before the next one. So an outage costs a validator one lapse, however long it is, and submissions nothing;
- on the first signal nothing more is claimed, and what is claimed is judged if that takes no longer than `FAREWELL_S`.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.node.session import ASK_S, Session, SessionError, State, end_session
from shoal.policy.model import Policy
from shoal.swarm.asking import RefusedError
from shoal.swarm.clock import read_clock
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.messages import ClaimAnswer, HeartbeatAnswer, Job, Verdict
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion, note_breach, reject
from shoal.validator.pace import Pace, Stint
from shoal.validator.shelf import Shelf

POLL_S = 20
"""how long the coordinator may keep a claim until there is a job"""
FAREWELL_S = 30.0
"""how long a validator that stops goes on with what it has claimed"""
_PAUSE_S = 1.0
_LIMITED = "limited"
"""the one refusal that ends by time"""


class Validator:
    """One validator; `run` ends when the run is finished, or after the first signal."""

    def __init__(self, session: Session, judge: Judge, shelf: Shelf, folder: Path) -> None:
        self._session, self._judge, self._shelf = session, judge, shelf
        self._folder = folder / "jobs"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink()  # of a process that was killed; its claim is given to somebody again
        self.verdicts: dict[Verdict, int] = dict.fromkeys(Verdict, 0)
        self._version = -1
        self._owed: int | None = None
        """version whose weights did not come in time: without them the next claim would end like the last one"""
        self._pace = Pace()
        self._finished = False
        self._limited = ""
        """why it may not judge for a while; as it was last said"""
        session.describe, session.heard = self._describe_state, self._hear

    async def run(self) -> None:
        """Judge until the run is finished or the session stops."""
        ending = asyncio.create_task(self._await_end())
        try:
            while not ending.done():
                claim = asyncio.create_task(self._claim())
                await asyncio.wait((claim, ending), return_when=asyncio.FIRST_COMPLETED)
                if not claim.done():  # a job that is on its way to us lapses, and somebody else gets it
                    claim.cancel()
                    await asyncio.gather(claim, return_exceptions=True)
                    break
                await self._see_through(claim.result())
        finally:
            ending.cancel()
        await self._session.leave()

    def describe(self) -> str:
        """One line for whoever watches."""
        said = ", ".join(f"{count} {verdict.value}" for verdict, count in self.verdicts.items() if count)
        wait = self._session.waits.longest()
        parts = [f"v{self._version}" if self._version >= 0 else "no weights yet", said or "no verdicts yet"]
        if pace := self._pace.describe():
            parts.append(pace)
        if self._session.problem:
            parts.append(self._session.problem)
        elif self._limited:
            parts.append(self._limited)
        elif wait is not None:
            parts.append(f"waits for {wait.for_whom}: {wait.detail or wait.name}")
        return "  ".join(parts)

    async def _claim(self) -> ClaimAnswer:
        """What to judge next; nothing is claimed while weights for it may not come."""
        if self._owed is not None:
            await self._shelf.find(self._owed)
            self._owed = None
        client, most = self._session.client, self._pace.choose_most(self._session.params.claim_s)
        try:
            return await self._session.waits.insist(
                "job", lambda: client.claim_jobs(wait_s=POLL_S, most=most), for_whom="the coordinator", timeout_s=ASK_S
            )
        except RefusedError as error:
            if error.refusal.code != _LIMITED:
                raise SessionError(f"no more jobs: {error}") from None
            return self._sit_out(str(error))
        except (ForkError, KeepError) as error:
            raise end_session(error) from None

    def _sit_out(self, reason: str) -> ClaimAnswer:
        """Ask again later: a limit ends by time."""
        if reason != self._limited:
            self._session.note(reason)
        self._limited = reason
        return ClaimAnswer(retry_after_s=POLL_S)

    async def _see_through(self, answer: ClaimAnswer) -> None:
        """Judge what was claimed. Who is asked to stop meanwhile has a while for it, and leaves the rest to others."""
        work = asyncio.create_task(self._take_answer(answer))
        stop = asyncio.create_task(self._session.stopping.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((work,), timeout=FAREWELL_S)
            if work.done():
                work.result()
            else:
                self._session.note("not all that was claimed could be judged; left to others")
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _take_answer(self, answer: ClaimAnswer) -> None:
        if answer.jobs:
            self._limited = ""
        if not answer.jobs:
            await self._pause(max(_PAUSE_S, min(answer.retry_after_s, POLL_S)))
        for version in dict.fromkeys(job.version for job in answer.jobs):
            await self._settle([job for job in answer.jobs if job.version == version])

    async def _await_end(self) -> None:
        """Until the run is finished or the session stops; a claim may wait longer than either."""
        while not (self._finished or self._session.stopping.is_set()):
            await self._pause(_PAUSE_S)

    async def _settle(self, jobs: Sequence[Job]) -> None:
        """Judge jobs of one version within their time, and say what was found."""
        deadline_ms = min(job.deadline_ms for job in jobs)
        left_s = (deadline_ms - read_clock() - self._session.client.clock_offset_ms) / 1000
        try:
            async with asyncio.timeout(max(left_s, _PAUSE_S)):
                await self._judge_jobs(jobs)
        except TimeoutError:
            self._pace.note_late()
            names = ", ".join(job.submission for job in jobs)
            self._session.note(f"{names}: not judged in {left_s:.0f} s; left to others")
            await self._session.waits.insist(  # or it would make the next ones late too
                "replay", self._judge.finish, for_whom="this machine", timeout_s=self._session.params.claim_s
            )
        finally:
            for job in jobs:
                self._locate(job).unlink(missing_ok=True)

    async def _judge_jobs(self, jobs: Sequence[Job]) -> None:
        version = jobs[0].version
        self._owed = version  # for as long as they are not there
        policy = await self._shelf.find(version)
        self._owed = None
        if policy is None:
            for job in jobs:
                await self._send(job, reject(Verdict.INCONCLUSIVE, [note_breach("weights", f"v{version} is gone")]))
            return
        self._version = max(self._version, version)
        problems = await asyncio.gather(*(self._fetch(job) for job in jobs))
        files = [(job, self._locate(job)) for job, problem in zip(jobs, problems, strict=True) if not problem]
        opinions = iter(await self._form_opinions(files, policy) if files else [])
        for job, problem in zip(jobs, problems, strict=True):
            lost = reject(Verdict.INCONCLUSIVE, [note_breach("file", problem)])
            await self._send(job, lost if problem else next(opinions))

    async def _fetch(self, job: Job) -> str:
        """Have the file of a job here; why it cannot be, if so.

        A coordinator that is away says nothing of the file: it is asked for until the claim ends.
        """
        blob, size, path = job.manifest.blob, job.manifest.size, self._locate(job)
        client = self._session.client
        try:
            await self._session.waits.insist(
                "file",
                lambda: client.fetch_blob(job.submission, blob, size, path),
                for_whom="the coordinator",
                timeout_s=ASK_S,
            )
        except (KeepError, RefusedError) as error:
            self._session.note(f"{job.submission}: {error}")
            return str(error) or "it cannot be had"
        return ""

    async def _form_opinions(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        first, begun = files[0][0], time.perf_counter()
        with self._session.spans.span("judge", step=first.step, version=first.version, jobs=len(files)):
            opinions = await self._judge.judge_all(files, policy)
        self._pace.add(
            Stint(
                jobs=len(files),
                rollouts=sum(opinion.replayed.rollouts for opinion in opinions),
                tokens=sum(opinion.replayed.tokens for opinion in opinions),
                seconds=time.perf_counter() - begun,
            )
        )
        return opinions

    async def _send(self, job: Job, opinion: Opinion) -> None:
        statement = opinion.state(job)
        client = self._session.client
        try:
            await self._session.waits.insist(
                "verdict", lambda: client.send_verdict(statement), for_whom="the coordinator", timeout_s=ASK_S
            )
        except RefusedError as error:
            self._session.note(f"{job.submission}: the verdict is not wanted any more: {error}")
            return
        except (ForkError, KeepError) as error:
            raise end_session(error) from None
        self.verdicts[opinion.verdict] += 1

    def _locate(self, job: Job) -> Path:
        return self._folder / f"{job.submission}.parquet"

    def _describe_state(self) -> State:
        metrics = {
            "verdicts_done": sum(self.verdicts.values()),
            "rollouts_done": self._pace.rollouts,
            "rollouts_per_s": round(self._pace.rollouts_per_s),
            "tokens_per_s": round(self._pace.tokens_per_s),
        }
        return State(version=self._version, metrics=metrics)

    def _hear(self, answer: HeartbeatAnswer) -> None:
        self._finished = self._finished or answer.finished

    async def _pause(self, seconds: float) -> None:
        """Until the session stops, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._session.stopping.wait()
        except TimeoutError:
            return
