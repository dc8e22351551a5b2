"""The validator's loop: claim, fetch, judge, say.

Invariants:
- one claim at a time; a claim that cannot be finished in its time is left, and somebody else gets it;
- files are removed once their verdict is heard; nothing of a file is kept;
- a file that cannot be judged here (no weights, no reader) gets an inconclusive verdict: somebody else may know more.
"""

import asyncio
from pathlib import Path

from shoal.node.session import ASK_S, Session, SessionError, State, end_session
from shoal.swarm.asking import RefusedError
from shoal.swarm.clock import read_clock
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.messages import ClaimAnswer, HeartbeatAnswer, Job, Verdict
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion, note_breach, reject
from shoal.validator.shelf import Shelf

POLL_S = 20
"""how long the coordinator may keep a claim until there is a job"""
_PAUSE_S = 1.0


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
        self._finished = False
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
                await self._take_answer(claim.result())
        finally:
            ending.cancel()
        await self._session.leave()

    def describe(self) -> str:
        """One line for whoever watches."""
        said = ", ".join(f"{count} {verdict.value}" for verdict, count in self.verdicts.items() if count)
        wait = self._session.waits.longest()
        parts = [f"v{self._version}" if self._version >= 0 else "no weights yet", said or "no verdicts yet"]
        if self._session.problem:
            parts.append(self._session.problem)
        elif wait is not None:
            parts.append(f"waits for {wait.for_whom}: {wait.detail or wait.name}")
        return "  ".join(parts)

    async def _claim(self) -> ClaimAnswer:
        client = self._session.client
        try:
            return await self._session.waits.insist(
                "job", lambda: client.claim_job(wait_s=POLL_S), for_whom="the coordinator", timeout_s=ASK_S
            )
        except RefusedError as error:
            raise SessionError(f"no more jobs: {error}") from None
        except (ForkError, KeepError) as error:
            raise end_session(error) from None

    async def _take_answer(self, answer: ClaimAnswer) -> None:
        if answer.job is not None:
            await self._settle(answer.job)
            return
        await self._pause(max(_PAUSE_S, min(answer.retry_after_s, POLL_S)))

    async def _await_end(self) -> None:
        """Until the run is finished or the session stops; a claim may wait longer than either."""
        while not (self._finished or self._session.stopping.is_set()):
            await self._pause(_PAUSE_S)

    async def _settle(self, job: Job) -> None:
        """Judge one job within its time, and say what was found."""
        left_s = (job.deadline_ms - read_clock() - self._session.client.clock_offset_ms) / 1000
        path = self._folder / f"{job.submission}.parquet"
        try:
            async with asyncio.timeout(max(left_s, _PAUSE_S)):
                opinion = await self._form_opinion(job, path)
                await self._send(job, opinion)
        except TimeoutError:
            self._session.note(f"{job.submission}: not judged in {left_s:.0f} s; left to others")
        finally:
            path.unlink(missing_ok=True)

    async def _form_opinion(self, job: Job, path: Path) -> Opinion:
        policy = await self._shelf.find(job.version)
        if policy is None:
            return reject(Verdict.INCONCLUSIVE, [note_breach("weights", f"v{job.version} is not at hand")])
        self._version = max(self._version, job.version)
        try:
            # A coordinator that is away says nothing of the file: it is asked for until the claim ends.
            await self._session.waits.insist(
                "file",
                lambda: self._session.client.fetch_blob(job.submission, job.manifest.blob, job.manifest.size, path),
                for_whom="the coordinator",
                timeout_s=ASK_S,
            )
        except KeepError as error:
            return reject(Verdict.INCONCLUSIVE, [note_breach("file", str(error))])
        except RefusedError as error:
            self._session.note(f"{job.submission}: {error}")
            return reject(Verdict.INCONCLUSIVE, [note_breach("file", str(error))])
        with self._session.spans.span("judge", step=job.step, version=job.version):
            return await self._judge.judge(job, path, policy)

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

    def _describe_state(self) -> State:
        return State(version=self._version, metrics={"rollouts_done": sum(self.verdicts.values())})

    def _hear(self, answer: HeartbeatAnswer) -> None:
        self._finished = self._finished or answer.finished

    async def _pause(self, seconds: float) -> None:
        """Until the session stops, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._session.stopping.wait()
        except TimeoutError:
            return
