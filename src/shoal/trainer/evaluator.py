"""`shoal evaluator`: evaluates versions as the trainer writes them, in a process of its own: training never waits.

    v0, every `eval.every`-th version and the last -> held-out tasks -> one line of eval.jsonl each

Invariants:
- each version that is due is evaluated once, also across restarts; a line names the one version that wrote all of it;
- the trainer keeps the folder of a version that is due until its line is there;
- one evaluator per run (flock on <run>/evaluator/.lock, given up by the kernel when the process ends).
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from shoal.config import RunConfig
from shoal.disk import guard_disk
from shoal.engine.torch import TorchEngine
from shoal.eval import EvalResult, evaluate
from shoal.files import repair_jsonl
from shoal.node.room import outlast_disk
from shoal.node.spans import SpanLog
from shoal.node.stop import catch_signals
from shoal.node.waits import Note, RoleWaits, WaitError
from shoal.policy.model import open_policy
from shoal.rundir import append_metrics, lock_dir
from shoal.runtime import tune_process
from shoal.shardcast.pool import run_blocking
from shoal.tasks.source import open_tasks
from shoal.trainer.evals import NAME, find_next, list_awaited
from shoal.trainer.versions import path_of

POLL_S, PATIENCE_S = 0.5, 600.0
Report = Callable[[int, EvalResult], None]


async def run_evaluator(
    config: RunConfig, run: Path, *, note: Note = lambda _: None, report: Report = lambda _version, _result: None
) -> int:
    """Evaluate what is due in a run directory until the last version is, or until a signal comes."""
    stopping = asyncio.Event()
    with ExitStack() as stack:
        lock = lock_dir(run / "evaluator")
        stack.callback(os.close, lock)
        stack.enter_context(guard_disk(run))
        repair_jsonl(run / NAME)
        spans = SpanLog(run / "evaluator" / "spans.jsonl", "evaluator")
        stack.callback(spans.close)
        stack.enter_context(catch_signals(stopping, note))
        waits = RoleWaits("evaluator", spans=spans, note=note)
        evaluator = Evaluator(config, run, spans)
        while not evaluator.is_done and not stopping.is_set():
            try:
                await waits.bound(
                    "version", _await_version(config, run, stopping), for_whom="the trainer", timeout_s=PATIENCE_S
                )
            except WaitError as error:
                note(str(error))
                continue
            done = await outlast_disk(evaluator.evaluate_beside, run, waits, stopping=stopping)
            if done is not None:
                report(*done)
    return 0


async def _await_version(config: RunConfig, run: Path, stopping: asyncio.Event) -> None:
    while find_next(config, run) is None and not stopping.is_set():
        await asyncio.sleep(POLL_S)


class Evaluator:
    """Evaluates the versions of one run directory."""

    def __init__(self, config: RunConfig, run: Path, spans: SpanLog | None = None) -> None:
        self._config, self._run = config, run
        self._spans = spans or SpanLog(None, "evaluator")
        self._family = open_tasks(config)
        tune_process(config.threads)

    def evaluate_next(self) -> tuple[int, EvalResult] | None:
        """Evaluate the lowest version that is there and due, and record it; None if there is none now."""
        version = find_next(self._config, self._run)
        if version is None:
            return None
        with self._spans.span("evaluate", version=version):
            result = self._evaluate(version)
        append_metrics(self._run / NAME, version, result.metrics())
        return version, result

    async def evaluate_beside(self) -> tuple[int, EvalResult] | None:
        """The same beside the event loop."""
        return await run_blocking(None, self.evaluate_next)

    @property
    def is_done(self) -> bool:
        """Whether every version that is due, the last one included, was evaluated."""
        return not list_awaited(self._config, self._run)

    def _evaluate(self, version: int) -> EvalResult:
        config = self._config
        policy = open_policy(path_of(self._run / "versions", version), dtype=getattr(torch, config.policy.dtype))
        engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=config.engine.slots, version=version)
        return evaluate(
            engine, self._family, policy, config.eval, seed=config.seed, max_tokens=config.engine.max_tokens
        )
