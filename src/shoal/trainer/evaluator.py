"""`shoal evaluator`: evaluates versions as the trainer writes them, in a separate process, so training never waits.

    v0, every `eval.every`-th version and the last -> held-out tasks -> one line of eval.jsonl each

Invariants:
- each version that is due is evaluated once, also across restarts; a line names the one version that it belongs to;
- the trainer keeps the folder of a version that is due until its line is written;
- one evaluator per run (flock on <run>/evaluator/.lock, released by the kernel when the process ends).

Results are in <run>/eval.jsonl, which only the evaluator writes.

One line per version, as in metrics.jsonl: {"step": version, "time": unix seconds, name: value, ...}. It is a separate
file because the trainer truncates its metrics when it resumes, while evaluations are not repeated.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.config.run import RunConfig
from shoal.engine import open_engine
from shoal.node.disk_full import outlast_disk
from shoal.policy.model import choose_device, open_policy
from shoal.tasks.open import open_tasks
from shoal.train.eval import EvalResult, evaluate
from shoal.train.report import read_metrics
from shoal.train.rundir import append_metrics, hold_dir
from shoal.trainer.versions import list_due, list_versions, path_of
from shoal.util.aio import catch_signals, run_blocking
from shoal.util.disk import guard_disk
from shoal.util.files import repair_jsonl
from shoal.util.process import release_memory, tune_memory, tune_process
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits, WaitError

logger = logging.getLogger(__name__)

NAME = "eval.jsonl"


def read_evals(run: Path) -> list[dict[str, Any]]:
    """The evaluations so far."""
    path = run / NAME
    return read_metrics(path) if path.exists() else []


def list_awaited(config: RunConfig, run: Path) -> list[int]:
    """Versions that are due and not evaluated yet, whether they exist yet or not."""
    done = {int(line["step"]) for line in read_evals(run)}
    return [version for version in list_due(config) if version not in done]


def find_next(config: RunConfig, run: Path) -> int | None:
    """The lowest version that exists and is due."""
    there = set(list_versions(run / "versions"))
    return next((version for version in list_awaited(config, run) if version in there), None)


POLL_S, PATIENCE_S = 0.5, 600.0
Report = Callable[[int, EvalResult], None]


async def run_evaluator(config: RunConfig, run: Path, *, report: Report = lambda _version, _result: None) -> int:
    """Evaluate what is due in a run directory, until the last version is done or a signal arrives."""
    stopping = asyncio.Event()
    with ExitStack() as stack:
        stack.enter_context(hold_dir(run / "evaluator", "stop it"))
        stack.enter_context(guard_disk(run))
        repair_jsonl(run / NAME)
        spans = SpanLog(run / "evaluator" / "spans.jsonl", "evaluator")
        stack.callback(spans.close)
        stack.enter_context(catch_signals(stopping))
        waits = RoleWaits("evaluator", spans=spans)
        evaluator = Evaluator(config, run, spans)
        while not evaluator.is_done and not stopping.is_set():
            try:
                await waits.with_timeout(
                    "version", _await_version(config, run, stopping), waiting_for="the trainer", timeout_s=PATIENCE_S
                )
            except WaitError as error:
                logger.warning(str(error))
                continue
            done = await outlast_disk(
                lambda: run_blocking(None, evaluator.evaluate_next), run, waits, stopping=stopping
            )
            if done is not None:
                report(*done)
        if evaluator.is_done:
            logger.info("finished: every version that was due is evaluated")
        else:
            logger.info("stopped; the same command resumes")
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
        self._model_bytes = 0
        tune_process(config.threads)

    def evaluate_next(self) -> tuple[int, EvalResult] | None:
        """Evaluate the lowest version that exists and is due, and record it; None if no version is due."""
        version = find_next(self._config, self._run)
        if version is None:
            return None
        with self._spans.span("evaluate", version=version):
            result = self._evaluate(version)
        release_memory(self._model_bytes)  # the next version may be far away
        append_metrics(self._run / NAME, version, result.metrics())
        return version, result

    @property
    def is_done(self) -> bool:
        """Whether every version that is due, including the last one, was evaluated."""
        return not list_awaited(self._config, self._run)

    def _evaluate(self, version: int) -> EvalResult:
        config = self._config
        policy = open_policy(
            path_of(self._run / "versions", version),
            dtype=getattr(torch, config.policy.publish_dtype),
            device=choose_device(config.policy.device),
        )
        self._model_bytes = policy.num_bytes
        tune_memory(self._model_bytes)
        engine = open_engine(config.engine, policy.model, eos_id=policy.eos_id, version=version)
        return evaluate(engine, self._family, policy, config)
