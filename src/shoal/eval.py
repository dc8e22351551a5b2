"""Held-out evaluation: sampled pass@1 and pass@k, greedy, length, each with a 95 % interval.

Tasks and sampling seeds derive from `seed` alone, so two evaluations of a run compare the same tasks with the same
luck. Intervals are over tasks: samples of one task are not independent. A result names the one version that wrote all
its completions.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from shoal.config import EvalConfig, RunConfig
from shoal.engine.base import Engine
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.files import check_output, write_output
from shoal.group import GroupShape, Plan, generate_groups, request_rollouts
from shoal.learner.checkpoint import find_newest, load_checkpoint_policy, read_state
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.runtime import tune_process
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task
from shoal.tasks.length import read_target
from shoal.tasks.source import open_tasks
from shoal.tasks.split import heldout_tasks
from shoal.warmup import load_start

_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What one version does on held-out tasks."""

    version: int
    num_tasks: int
    num_samples: int
    k: int
    pass_1: Estimate
    """sampled at temperature 1, mean over tasks"""
    pass_k: Estimate
    """at least one of k samples passes, unbiased"""
    greedy: Estimate
    mean_length: Estimate
    """tokens of a sampled completion"""
    budget_errors: dict[int, Estimate] = field(default_factory=dict)
    """tokens between a sampled completion and its target length, by target; none where tasks have no target"""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/pass_at_1": self.pass_1.value,
            f"eval/pass_at_{self.k}": self.pass_k.value,
            "eval/greedy": self.greedy.value,
            "eval/length": self.mean_length.value,
            **{f"eval/error_{target}": error.value for target, error in self.budget_errors.items()},
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_markdown(self) -> str:
        rows = [
            ("pass@1, sampled", self.pass_1),
            (f"pass@{self.k}, sampled", self.pass_k),
            ("pass@1, greedy", self.greedy),
            ("mean length (tokens)", self.mean_length),
            *((f"off the target of {target} (tokens)", error) for target, error in self.budget_errors.items()),
        ]
        lines = [f"| v{self.version} on {self.num_tasks} held-out tasks | value | 95 % interval |", "|---|---|---|"]
        lines += [f"| {name} | {e.value:.3f} | {e.low:.3f} to {e.high:.3f} |" for name, e in rows]
        return "\n".join(lines) + "\n"


def evaluate(
    engine: Engine, family: Family, policy: Policy, config: EvalConfig, *, seed: int, max_tokens: int
) -> EvalResult:
    """Evaluate the engine's weights."""
    groups = answer_tasks(engine, family, policy, config, seed=seed, max_tokens=max_tokens)
    return summarise_groups(groups, config)


def answer_tasks(
    engine: Engine, family: Family, policy: Policy, config: EvalConfig, *, seed: int, max_tokens: int
) -> list[Group]:
    """The held-out tasks, each with its samples and, last, its greedy completion."""
    tasks = draw_tasks(family, config, seed=seed)
    sampled = GroupShape(size=config.samples, max_tokens=max_tokens, temperature=1.0)
    greedy = GroupShape(size=1, max_tokens=max_tokens, temperature=0.0)
    plans = []
    for index, task in enumerate(tasks):
        seeds = [derive_seed("eval", seed, index, sample) for sample in range(config.samples)]
        requests = request_rollouts(policy.tokenizer, task, sampled, f"s{index}", seeds)
        requests += request_rollouts(policy.tokenizer, task, greedy, f"greedy{index}", [0])
        plans.append(Plan(index=index, task=task, requests=requests))
    return generate_groups(engine, family, policy.tokenizer, plans)


def draw_tasks(family: Family, config: EvalConfig, *, seed: int) -> list[Task]:
    """The held-out tasks of a run."""
    return heldout_tasks(family, config.tasks, derive_seed("eval", seed))


def run_eval(config: RunConfig, run_dir: Path | None, *, json_path: Path | None, markdown_path: Path | None) -> int:
    """`shoal eval`: the newest checkpoint of a run, or the starting policy where there is no run."""
    tune_process(config.threads)
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    family = open_tasks(config)
    policy, version = _open_version(config, run_dir)
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=config.engine.slots, version=version)
    result = evaluate(engine, family, policy, config.eval, seed=config.seed, max_tokens=config.engine.max_tokens)
    print(result.to_markdown(), end="")
    for path, text in ((json_path, result.to_json()), (markdown_path, result.to_markdown())):
        if path is not None:
            write_output(path, text.encode())
    return 0


def estimate_pass_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean over tasks, with the interval of the normal approximation."""
    array = np.asarray(values, dtype=np.float64)
    spread = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else 0.0
    mean = float(array.mean())
    return Estimate(mean, mean - _Z * spread, mean + _Z * spread)


def estimate_rate(values: Sequence[float]) -> Estimate:
    """Mean of per-task rates in [0, 1], with an interval inside it.

    Where all tasks agree their spread says nothing, so Wilson's interval stands in. There a task counts as one draw,
    however many samples it had.
    """
    estimate = estimate_mean(values)
    if estimate.low == estimate.high:
        share = estimate_share(estimate.value * len(values), len(values))
        return Estimate(estimate.value, share.low, share.high)
    return Estimate(estimate.value, max(0.0, estimate.low), min(1.0, estimate.high))


def estimate_share(num_right: float, num: int) -> Estimate:
    """Share with Wilson's interval, which stays inside [0, 1] and is not empty at its ends."""
    share, z2 = num_right / num, _Z * _Z
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def summarise_groups(groups: Sequence[Group], config: EvalConfig) -> EvalResult:
    """The figures of held-out tasks; each group holds a task's samples, then its greedy completion."""
    versions = {span.version for group in groups for rollout in group.rollouts for span in rollout.versions}
    assert len(versions) == 1, f"weights changed during the evaluation: versions {sorted(versions)}"
    right = np.array([[score.value >= 1.0 for score in group.scores] for group in groups])
    sampled, greedy = right[:, :-1], right[:, -1]
    passes = [estimate_pass_k(config.samples, int(row.sum()), config.k) for row in sampled]
    lengths = [float(np.mean([r.num_tokens for r in group.rollouts[:-1]])) for group in groups]
    return EvalResult(
        version=versions.pop(),
        num_tasks=len(groups),
        num_samples=config.samples,
        k=config.k,
        pass_1=estimate_rate(sampled.mean(axis=1)),
        pass_k=estimate_rate(passes),
        greedy=estimate_share(int(greedy.sum()), len(groups)),
        mean_length=estimate_mean(lengths),
        budget_errors=_measure_budgets(groups),
    )


def _measure_budgets(groups: Sequence[Group]) -> dict[int, Estimate]:
    """By target: how far the samples of a task are from it, mean over its tasks."""
    errors: dict[int, list[float]] = {}
    for group in groups:
        if target := read_target(group.task_id):
            misses = [abs(rollout.num_tokens - target) for rollout in group.rollouts[:-1]]
            errors.setdefault(target, []).append(float(np.mean(misses)))
    return {target: estimate_mean(errors[target]) for target in sorted(errors)}


def _open_version(config: RunConfig, run_dir: Path | None) -> tuple[Policy, int]:
    if run_dir is None:
        return load_start(config), 0
    path = find_newest(run_dir / "checkpoints")
    if path is None:
        raise ConfigError(f"{run_dir}: holds no checkpoint yet")
    step = read_state(path).step
    return load_checkpoint_policy(path, getattr(torch, config.policy.dtype)), step
