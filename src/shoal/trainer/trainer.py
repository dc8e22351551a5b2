"""The trainer's loop: step n takes batch n, trains v{n-1} to v{n}, writes it, and continues while it is published.

    step n:  batch n -> train (in a thread) -> write v{n}, enqueue it -> metrics -> checkpoint, if due -> step n + 1
    concurrently:  publishing v{n} as it is written;  reading batch n + 1 if the async level lets it be cut;  heartbeats

Invariants:
- only `_train_step` advances the counter;
- a step's result is a function of the checkpoint before it and the batches since: killed at any point, the trainer
  resumes from its newest checkpoint, computes the same versions again, bit for bit, and checks that they are equal.
  With another number or kind of devices it does not; then the version on disk stands, and it continues from that;
- v0 is published before the first batch is requested; the last step publishes its version and ends;
- the loop waits only for batches. It does not depend on who fetches a version, or how slowly;
- a trainer that is asked to stop leaves a checkpoint of its newest step, whenever the signal arrived.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shoal.config.run import LengthConfig, RunConfig
from shoal.learner.advantage import NO_LENGTH
from shoal.learner.checkpoint import find_newest
from shoal.learner.learner import Metrics
from shoal.train.resume import TrainState
from shoal.train.rollout_files import write_groups
from shoal.train.rundir import RunDir
from shoal.train.sampler import describe_groups
from shoal.train.trackers import Tracker
from shoal.trainer.batch import BatchReader, TrainBatch
from shoal.trainer.publish import Publisher
from shoal.trainer.versions import Versions
from shoal.util.aio import outlast, run_blocking, run_together, run_until_set
from shoal.util.console import Console
from shoal.util.process import tune_process
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits, WaitError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_S = 600.0
"""after which a wait for a batch is overdue; the trainer keeps waiting"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReporter:
    """Where a trainer reports to."""

    run: RunDir
    console: Console
    tracker: Tracker
    spans: SpanLog


class Trainer:
    """Trains a swarm's policy. One per run directory."""

    def __init__(
        self,
        config: RunConfig,
        reporter: TrainerReporter,
        batches: BatchReader,
        publisher: Publisher,
        versions: Versions,
        waits: RoleWaits,
        *,
        stopping: asyncio.Event,
        state: TrainState,
    ) -> None:
        self._config, self._reporter, self._batches, self._publisher = config, reporter, batches, publisher
        self._versions, self._waits, self._stopping, self._state = versions, waits, stopping, state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-train")
        self._ahead: tuple[int, asyncio.Task[TrainBatch]] | None = None
        self._saved = -1
        """step of the newest checkpoint"""

    @property
    def step(self) -> int:
        """Steps done, which is also the current version."""
        return self._state.step

    async def run(self) -> None:
        """Train to the last step, or until `stopping` is set."""
        try:
            await run_together(self._train_all(), self._publisher.run())
        finally:
            await self._drop_ahead()
            self._thread.shutdown()

    async def _train_all(self) -> None:
        await self._run_thread(tune_process, self._state.ranks.divide_threads(self._config.threads))
        await self._publish_start()
        self._reporter.console.start(self._config.steps, self.step)
        while self.step < self._config.steps:
            started = time.perf_counter()
            batch = await self._await_batch(self.step + 1)
            if batch is None:
                break
            await self._train_step(batch, time.perf_counter() - started)
        if self._saved < self.step:
            await self._run_thread(self._save)
        await self._run_thread(self._state.finish)
        await self._drain()

    async def _publish_start(self) -> None:
        """Enqueue every version on disk that is not in the ledger yet, and always the one to start with."""
        if find_newest(self._reporter.run.checkpoints_path) is None:
            await self._run_thread(self._save)
        self._saved = self.step
        newest = self._publisher.newest
        if self.step < newest:
            logger.info(f"v{newest} was published: the steps after {self.step} are repeated from the ledger")
        if self.step >= newest:
            await self._run_thread(self._versions.write, self.step, self._state)
        for version in range(max(0, min(newest + 1, self.step)), self.step + 1):
            self._publisher.enqueue(version, await self._batches.find_hash(version) if version else "")

    async def _await_batch(self, step: int) -> TrainBatch | None:
        """The batch of step n; None if the trainer is asked to stop first."""
        reading = self._read_ahead(step)
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while not reading.done() and not stop.done():
                try:
                    await self._waits.with_timeout(
                        "batch",
                        asyncio.wait((reading, stop), return_when=asyncio.FIRST_COMPLETED),
                        waiting_for=f"the groups of step {step}",
                        timeout_s=PATIENCE_S,
                        step=step,
                    )
                except WaitError as error:
                    logger.warning(f"{error}; {self._batches.reason or 'its files are still arriving'}")
        finally:
            stop.cancel()
        return None if self._stopping.is_set() else reading.result()

    def _read_ahead(self, step: int) -> "asyncio.Task[TrainBatch]":
        """The task that reads batch n, started now unless it is running."""
        if self._ahead is None or self._ahead[0] != step:
            assert self._ahead is None or self._ahead[1].done(), "batches are read in order"
            self._ahead = step, asyncio.create_task(self._batches.read_batch(step))
        return self._ahead[1]

    async def _drain(self) -> None:
        """Wait until all versions are published; once the trainer is asked to stop, only briefly."""
        if not await run_until_set(self._stopping, self._publisher.drain(patient=True)):
            await self._publisher.drain(patient=False)

    async def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            await asyncio.gather(self._ahead[1], return_exceptions=True)

    async def _train_step(self, batch: TrainBatch, wait_s: float) -> None:
        """Step n: train v{n-1} to v{n}, write it, enqueue it for publishing, record."""
        step, started = batch.step, time.perf_counter()
        assert step == self.step + 1, "steps are done in order"
        if self._config.async_level and step < self._config.steps:
            self._read_ahead(step + 1)  # concurrently with training: step n + 1 is open already
        with self._reporter.spans.span("train", step=step):
            metrics = await self._run_thread(self._state.train, batch.groups)
        trained = time.perf_counter()
        self._state.step = step
        with self._reporter.spans.span("write", step=step):
            await self._write_version(step, batch.hash)
            times = {"perf/wait_s": wait_s, "perf/train_s": trained - started}
            times["perf/write_s"] = time.perf_counter() - trained
            await self._run_thread(self._record, batch, metrics | describe_batch(batch, times, self._config.length))
            if self._is_save_due():
                await self._run_thread(self._save)
        self._batches.drop_files(step)

    async def _write_version(self, version: int, batch: str) -> None:
        """Write a version, and enqueue it as soon as the origin can begin to publish it."""
        begun = asyncio.Event()
        begin = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
        write = self._run_thread(self._versions.write, version, self._state, begin)
        writing, waiting = asyncio.create_task(write), asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((writing, waiting), return_when=asyncio.FIRST_COMPLETED)
            if begun.is_set():  # always, unless writing failed before
                self._publisher.enqueue(version, batch)
            await writing
        finally:
            waiting.cancel()
            await outlast(writing)

    def _record(self, batch: TrainBatch, metrics: Metrics) -> None:
        reporter, wanted = self._reporter, self._config.batch.groups
        if self._config.rollouts:
            write_groups(reporter.run.rollouts_path(batch.step), batch.groups, self._state.policy.tokenizer.decode)
        for index, reason in batch.left_out.items():
            logger.warning(f"step {batch.step}: group {index} is left out: {reason}")
        if len(batch.groups) + len(batch.left_out) < wanted:
            logger.warning(f"step {batch.step}: only {len(batch.groups)} of {wanted} groups have a learning signal")
        reporter.run.append_metrics(batch.step, metrics)
        reporter.tracker.log(batch.step, metrics)
        reporter.console.report_step(batch.step, metrics)

    def _is_save_due(self) -> bool:
        last = self.step == self._config.steps or self._stopping.is_set()
        return last or self.step % self._config.checkpoint.every == 0

    def _save(self) -> None:
        self._state.save(self._reporter.run.checkpoints_path, self._config.checkpoint.keep)
        self._saved = self.step

    async def _run_thread(self, call: Callable[..., T], *args: object) -> T:
        """Run in the one thread that touches the weights: in order, and without blocking the event loop."""
        return await run_blocking(self._thread, call, *args)


def describe_batch(batch: TrainBatch, times: dict[str, float], length: LengthConfig = NO_LENGTH) -> Metrics:
    """Metrics of a batch; rewards and lengths are over its groups, because the trainer sees no others.

    Groups are drawn by index without gaps, so the highest index gives a lower bound of how many were drawn, and thus of
    what the online filter cost in groups that are not trained on.
    """
    ages = [batch.step - 1 - rollout.version for group in batch.groups for rollout in group.rollouts]
    metrics = describe_groups(batch.step, batch.groups, length)
    metrics |= {"batch/groups": float(len(batch.groups)), "batch/left_out": float(len(batch.left_out))}
    if batch.groups:
        metrics["batch/extra_share"] = (batch.groups[-1].index + 1) / len(batch.groups) - 1
    if ages:
        metrics["off_policy/lag_max"] = float(max(ages))
    metrics["perf/tokens_per_s"] = metrics["train/generated_tokens"] / max(sum(times.values()), 1e-9)
    return metrics | times
