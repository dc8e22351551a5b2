"""The synchronous loop: `shoal train`. The distributed forms of the loop are compared with this one.

    step n:  groups by v{n-1-k} -> filter -> train v{n-1} on them -> v{n}     (k = async_level, 0 here unless simulated)

- Only `_train_step` advances the counter.
- Staleness is asserted when the batch is cut: no group older than the bound is trained on.
- v0 is evaluated and saved before the first step, the last version after the last one.
- A checkpoint is written after everything that is recorded about its step. So a resumed run repeats no step, writes no
  line twice and misses none.
"""

import logging
import time
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from shoal.config.run import RunConfig
from shoal.engine import open_engine
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest
from shoal.learner.learner import Metrics
from shoal.learner.parallel import ONE, Ranks
from shoal.learner.sharded import build_whole
from shoal.policy.lora import copy_merged
from shoal.policy.model import cast_weights, find_policy
from shoal.rollout import Group
from shoal.tasks.open import check_tasks, draw_tasks, open_tasks, pin_tasks
from shoal.tasks.stats import STATS_NAME, Curriculum, TaskStats
from shoal.train.eval import evaluate
from shoal.train.report import describe_gain, write_report
from shoal.train.resume import open_state
from shoal.train.rollout_files import write_groups
from shoal.train.rundir import RunDir, is_swarms, run_path
from shoal.train.sampler import SampledBatch, Sampler
from shoal.train.sft import fix_threads
from shoal.train.trackers import Tracker, open_tracker
from shoal.util.console import Console
from shoal.util.disk import guard_disk
from shoal.util.process import tune_process

logger = logging.getLogger(__name__)


def run_training(config: RunConfig, *, fresh: bool = False, ranks: Ranks = ONE) -> int:
    """Train to the last step, from the newest checkpoint if there is one. Rank 0 calls this."""
    config = settle_config(config)
    if not fresh and is_swarms(path := run_path(config)):
        raise ConfigError(
            f"{path}: holds the run of a swarm, which `shoal run` resumes; use --fresh, another name or seed"
        )
    run = RunDir.open(config, fresh)
    with ExitStack() as stack:
        stack.callback(run.close)
        stack.enter_context(guard_disk(run.path))
        console = Console(run.log_path)
        stack.callback(console.close)
        tracker = open_tracker(config, run.path)
        stack.callback(tracker.close)
        TrainingLoop(config, run, console, tracker, ranks).run()
    return 0


def settle_config(config: RunConfig) -> RunConfig:
    """The settings as the run will store them. Rejects what can be rejected before any work."""
    if config.policy.dtype != "float32":
        _check_frozen(config)
    config = check_tasks(pin_tasks(config))
    tasks = draw_tasks(open_tasks(config), config)
    if not config.policy.path:
        longest, context = max(len(task.prompt) for task in tasks), config.policy.tiny.context
        if longest >= context:
            text = f"must be larger, since prompts take up to {longest} positions (tasks.filter.max_chars limits them)"
            raise ConfigError(f"policy.tiny.context: {text}, got {context}")
        if longest + config.engine.max_tokens > context:
            text = f"must be at most {context - longest}, since prompts take up to {longest} of {context} positions"
            raise ConfigError(f"engine.max_tokens: {text}, got {config.engine.max_tokens}")
        return fix_threads(config)
    # A folder by its real path: `latest` will point elsewhere soon.
    policy = config.policy.model_copy(update={"path": find_policy(config.policy.path)})
    return fix_threads(config.model_copy(update={"policy": policy}))


def _check_frozen(config: RunConfig) -> None:
    """Reject weights in bfloat16 unless they stay as they are, and products are in bfloat16 anyway."""
    dtype = config.policy.dtype
    if not config.policy.lora.rank or config.sft.steps:
        raise ConfigError(
            f"policy.dtype: training needs float32; {dtype} would round small updates away. Only fixed weights may "
            "have it: set policy.lora.rank, and sft.steps to 0"
        )
    others = {"policy.publish_dtype": config.policy.publish_dtype, "learner.precision": config.learner.precision}
    for name, value in others.items():
        if value != dtype:
            raise ConfigError(f"policy.dtype: {dtype} needs {name}={dtype}, got {value}")


class TrainingLoop:
    """Policy, learner, engine and versions of one run."""

    def __init__(self, config: RunConfig, run: RunDir, console: Console, tracker: Tracker, ranks: Ranks = ONE) -> None:
        tune_process(ranks.divide_threads(config.threads))
        self._config, self._run, self._console, self._tracker = config, run, console, tracker
        self._family = open_tasks(config)
        self._checkpoint = find_newest(run.checkpoints_path)
        self._state = open_state(config, self._checkpoint, ranks)
        self._published = getattr(torch, config.policy.publish_dtype)
        self._keep_version()
        policy = self._state.policy
        sampled = cast_weights(self._copy_model(), self._published)
        self._engine = open_engine(config.engine, sampled, eos_id=policy.eos_id, version=self.step)
        self._stats = TaskStats(run.path / STATS_NAME, last=self.step if self._checkpoint is not None else -1)
        curriculum = Curriculum(self._stats, config.batch) if config.batch.curriculum else None
        self._sampler = Sampler(self._engine, self._family, policy.tokenizer, config, curriculum)

    @property
    def step(self) -> int:
        """Steps done, which is also the current version."""
        return self._state.step

    def run(self) -> None:
        """Evaluate v0, train to the last step, evaluate and report."""
        config, console = self._config, self._console
        self._run.truncate_after(self.step if self._checkpoint is not None else -1)
        logger.info(f"{self._state.policy.describe_size()}, run directory {self._run.path}")
        console.start(config.steps, self.step)
        if self._checkpoint is None:
            self._evaluate()
            self._save()
        self._run.link()
        while self.step < config.steps:
            self._train_step()
            last = self.step == config.steps
            if last or (config.eval.every and self.step % config.eval.every == 0):
                self._evaluate()
            if last or self.step % config.checkpoint.every == 0:
                self._save()
        self._state.finish()
        logger.info(describe_gain(self._run.path))
        logger.info(f"model: {find_newest(self._run.checkpoints_path)}/policy")
        logger.info(f"report: {write_report(self._run.path)}")

    def _train_step(self) -> None:
        """Step n: sample, train v{n-1} to v{n}, record."""
        started = time.perf_counter()
        step = self.step + 1
        self._load_sampler(step)
        drawn = self._sampler.draw_batch(step)
        sampled = time.perf_counter()
        self._check_staleness(step, drawn.batch.groups)
        metrics = self._state.train(drawn.batch.groups)
        trained = time.perf_counter()
        self._state.step = step
        self._keep_version()
        metrics |= drawn.metrics(step)
        metrics |= {
            "perf/tokens_per_s": metrics["train/generated_tokens"] / (sampled - started),
            "perf/sample_s": sampled - started,
            "perf/train_s": trained - sampled,
        }
        self._record(metrics, drawn)

    def _load_sampler(self, step: int) -> None:
        """Load the newest version that the async level allows for sampling step n into the engine."""
        version = max(0, step - 1 - self._config.async_level)
        if self._engine.version != version:
            self._engine.swap_weights(version, self._state.versions[version])

    def _check_staleness(self, step: int, groups: tuple[Group, ...]) -> None:
        oldest = step - 1 - self._config.async_level
        stale = [group.index for group in groups for rollout in group.rollouts if rollout.version < oldest]
        assert not stale, f"groups {stale[:5]} of step {step} are older than v{oldest}"

    def _keep_version(self) -> None:
        """Keep the current weights, merged with adapters, and drop those that no later step samples with."""
        versions = self._state.versions
        versions[self.step] = self._state.gather(self._published)
        while next(iter(versions)) < self.step - self._config.async_level:
            versions.popitem(last=False)

    def _copy_model(self) -> PreTrainedModel:
        """The whole model, for the engine in this process."""
        model = self._state.policy.model
        if self._state.ranks.mesh is None:
            return copy_merged(model, self._published)
        return build_whole(model, self._state.versions[self.step])

    def _record(self, metrics: Metrics, drawn: SampledBatch) -> None:
        if self._config.rollouts:
            write_groups(self._run.rollouts_path(self.step), drawn.batch.groups, self._state.policy.tokenizer.decode)
        if drawn.batch.exhausted:
            kept, wanted = len(drawn.batch.groups), self._config.batch.groups
            logger.warning(f"step {self.step}: only {kept} of {wanted} groups have a learning signal")
        if self._config.batch.statistics:
            self._stats.add(self.step, drawn.groups, {group.index for group in drawn.batch.groups})
        self._run.append_metrics(self.step, metrics)
        self._tracker.log(self.step, metrics)
        self._console.report_step(self.step, metrics)

    def _evaluate(self) -> None:
        if self._engine.version != self.step:
            self._engine.swap_weights(self.step, self._state.versions[self.step])
        result = evaluate(self._engine, self._family, self._state.policy, self._config)
        self._run.append_metrics(self.step, result.metrics())
        self._tracker.log(self.step, result.metrics())
        self._console.report_eval(self.step, result.metrics())

    def _save(self) -> None:
        self._state.save(self._run.checkpoints_path, self._config.checkpoint.keep)
