"""The synchronous loop: `shoal train`. Every later, distributed form of the loop is measured against this one.

    step n:  groups by v{n-1-k} -> filter -> train v{n-1} on them -> v{n}     (k = async_level, 0 here unless simulated)

- Nothing but `_train_step` advances the counter.
- Staleness is asserted where the batch is cut: no group older than the bound is trained.
- v0 is always evaluated first, the last version always last; a resumed run repeats no step and writes no line twice.
"""

import time
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

from shoal.config import RunConfig
from shoal.console import Console
from shoal.engine.torch import TorchEngine
from shoal.eval import EvalResult, evaluate
from shoal.learner.checkpoint import (
    Weights,
    list_checkpoints,
    load_checkpoint_policy,
    load_versions,
    prune_checkpoints,
    read_state,
    restore_learner,
    save_checkpoint,
)
from shoal.learner.learner import Learner, Metrics
from shoal.parquet import write_groups
from shoal.policy.model import Policy
from shoal.report import write_report
from shoal.rollout import Group
from shoal.rundir import RunDir
from shoal.runtime import tune_process
from shoal.sampler import Drawn, Sampler
from shoal.tasks.registry import load_family
from shoal.track import Tracker, open_tracker
from shoal.warmup import load_start


def run_training(config: RunConfig, *, fresh: bool = False) -> int:
    """Train to the last step, from the newest checkpoint if there is one."""
    run = RunDir.open(config, fresh)
    console = Console(run.log_path)
    try:
        tracker = open_tracker(config, run.path)
        training = Training(config, run, console, tracker)
        training.run()
        tracker.close()
    finally:
        console.close()
        run.close()
    return 0


class Training:
    """Policy, learner, engine and versions of one run."""

    def __init__(self, config: RunConfig, run: RunDir, console: Console, tracker: Tracker) -> None:
        tune_process(config.threads)
        self._config, self._run, self._console, self._tracker = config, run, console, tracker
        self._family = load_family(config.tasks.name, config.tasks.options)
        self._start = load_start(config, console.note)
        self._checkpoint = self._find_checkpoint()
        self.step = 0 if self._checkpoint is None else read_state(self._checkpoint).step
        self.policy = self._open_policy()
        self._learner = self._open_learner()
        self._versions: OrderedDict[int, Weights] = OrderedDict()
        if self._checkpoint is not None:
            self._versions.update(load_versions(self._checkpoint))
        self._keep_version()
        self._engine = TorchEngine(
            deepcopy(self.policy.model), eos_id=self.policy.eos_id, slots=config.engine.slots, version=self.step
        )
        self._sampler = Sampler(self._engine, self._family, self.policy.tokenizer, config)

    def run(self) -> None:
        """Evaluate v0, train to the last step, evaluate and report."""
        config, console = self._config, self._console
        self._run.truncate_after(self.step if self._checkpoint is not None else -1)
        console.note(f"{self.policy.num_parameters:,} parameters, run directory {self._run.path}")
        console.start(config.steps, self.step)
        if self._checkpoint is None:
            self._evaluate()
        while self.step < config.steps:
            self._train_step()
            last = self.step == config.steps
            if last or (config.eval.every and self.step % config.eval.every == 0):
                self._evaluate()
            if last or self.step % config.checkpoint.every == 0:
                self._save()
        console.note(f"report: {write_report(self._run.path)}")

    def _find_checkpoint(self) -> Path | None:
        found = list_checkpoints(self._run.checkpoints_path)
        return found[-1][1] if found else None

    def _open_policy(self) -> Policy:
        if self._checkpoint is None:
            return deepcopy(self._start)
        self._console.note(f"resumes after step {self.step}")
        return load_checkpoint_policy(self._checkpoint, self._start.model.dtype)

    def _open_learner(self) -> Learner:
        settings = self._config.learner
        learner = Learner(
            self.policy.model,
            settings,
            max_tokens=self._config.engine.max_tokens,
            reference=self._start.model.eval() if settings.loss.kl > 0 else None,
        )
        if self._checkpoint is not None:
            restore_learner(learner, self._checkpoint)
        return learner

    def _train_step(self) -> None:
        """Step n: sample, train v{n-1} to v{n}, record."""
        started = time.perf_counter()
        step = self.step + 1
        self._load_sampler(step)
        drawn = self._sampler.draw_batch(step)
        sampled = time.perf_counter()
        self._check_staleness(step, drawn.batch.groups)
        metrics = self._learner.train_step(drawn.batch.groups)
        trained = time.perf_counter()
        self.step = step
        self._keep_version()
        metrics |= drawn.metrics(step)
        metrics |= {
            "perf/tokens_per_s": metrics["train/generated_tokens"] / (sampled - started),
            "perf/sample_s": sampled - started,
            "perf/train_s": trained - sampled,
        }
        self._record(metrics, drawn)

    def _load_sampler(self, step: int) -> None:
        """Give the engine the newest version that the async level allows step n to be sampled with."""
        version = max(0, step - 1 - self._config.async_level)
        if self._engine.version != version:
            self._engine.swap_weights(version, self._versions[version])

    def _check_staleness(self, step: int, groups: tuple[Group, ...]) -> None:
        oldest = step - 1 - self._config.async_level
        stale = [group.index for group in groups for rollout in group.rollouts if rollout.version < oldest]
        assert not stale, f"groups {stale[:5]} of step {step} are older than v{oldest}"

    def _keep_version(self) -> None:
        """Remember the current weights, and forget those that no later step may be sampled with."""
        weights = self.policy.model.state_dict()
        self._versions[self.step] = {name: tensor.clone() for name, tensor in weights.items()}
        while next(iter(self._versions)) < self.step - self._config.async_level:
            self._versions.popitem(last=False)

    def _record(self, metrics: Metrics, drawn: Drawn) -> None:
        if self._config.rollouts:
            write_groups(self._run.rollouts_path(self.step), drawn.batch.groups)
        if drawn.batch.exhausted:
            kept, wanted = len(drawn.batch.groups), self._config.batch.groups
            self._console.note(f"step {self.step}: only {kept} of {wanted} groups have a learning signal")
        self._run.append_metrics(self.step, metrics)
        self._tracker.log(self.step, metrics)
        self._console.report_step(self.step, metrics)

    def _evaluate(self) -> EvalResult:
        self._engine.swap_weights(self.step, self._versions[self.step])
        config = self._config
        result = evaluate(
            self._engine, self._family, self.policy, config.eval, seed=config.seed, max_tokens=config.engine.max_tokens
        )
        self._run.append_metrics(self.step, result.metrics())
        self._tracker.log(self.step, result.metrics())
        self._console.report_eval(self.step, result.metrics())
        return result

    def _save(self) -> None:
        older = {version: weights for version, weights in self._versions.items() if version != self.step}
        save_checkpoint(self._run.checkpoints_path, self.step, self.policy, self._learner, older)
        prune_checkpoints(self._run.checkpoints_path, self._config.checkpoint.keep)

