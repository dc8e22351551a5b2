"""Held-out evaluation: sampled pass@1 and pass@k, greedy, length, each with a 95 % interval.

Tasks and sampling seeds derive from `seed` alone, so two evaluations of a run compare the same tasks with the same
random numbers. Intervals are over tasks: samples of one task are not independent. A result names the one version that
generated all its completions.

`run_table` evaluates several models on several kinds of tasks: a table with one row per model and one column per kind.
All models of a column get the same tasks and the same sampling seeds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from shoal.config.run import EvalConfig, PolicyConfig, RunConfig
from shoal.config.tasks import FilterConfig
from shoal.engine import open_engine
from shoal.engine.base import Engine
from shoal.errors import ConfigError
from shoal.group import GroupPlan, GroupShape, generate_groups, request_rollouts
from shoal.learner.checkpoint import find_newest, load_checkpoint_policy, read_state
from shoal.policy.model import Policy, reopen_policy
from shoal.rollout import Group
from shoal.seeds import derive_seed
from shoal.tasks.base import Family
from shoal.tasks.length import aim_family, read_target
from shoal.tasks.open import check_tasks, draw_tasks, fit_evaluation, open_tasks
from shoal.tasks.registry import load_family
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.train.sft import load_start
from shoal.util.files import check_output, write_output
from shoal.util.process import tune_process

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
    """Results of one version on held-out tasks."""

    version: int
    num_tasks: int
    num_samples: int
    k: int
    pass_1: Estimate
    """sampled at temperature 1, mean over tasks"""
    pass_k: Estimate
    """at least one of k samples passes, unbiased"""
    greedy: Estimate
    reward: Estimate
    """of a sampled completion; it differs from `pass_1` where tasks give partial rewards"""
    mean_length: Estimate
    """tokens of a sampled completion"""
    budget_errors: dict[int, Estimate] = field(default_factory=dict)
    """distance of sampled completions from their target length in tokens, by target; empty if tasks have no target"""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/pass_at_1": self.pass_1.value,
            f"eval/pass_at_{self.k}": self.pass_k.value,
            "eval/greedy": self.greedy.value,
            "eval/reward": self.reward.value,
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
            ("mean reward, sampled", self.reward),
            ("mean length (tokens)", self.mean_length),
            *((f"off the target of {target} (tokens)", error) for target, error in self.budget_errors.items()),
        ]
        lines = [f"| v{self.version} on {self.num_tasks} held-out tasks | value | 95 % interval |", "|---|---|---|"]
        lines += [f"| {name} | {e.value:.3f} | {e.low:.3f} to {e.high:.3f} |" for name, e in rows]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class EvalTable:
    """Results by model, then by kind of tasks."""

    models: tuple[str, ...]
    columns: tuple[str, ...]
    results: tuple[tuple[EvalResult, ...], ...]
    """one row per model"""

    def to_markdown(self) -> str:
        lines = [f"| model | {' | '.join(self.columns)} |", "|---" * (1 + len(self.columns)) + "|"]
        for model, row in zip(self.models, self.results, strict=True):
            lines.append(f"| {model} | {' | '.join(str(result.pass_1) for result in row)} |")
        sizes = ", ".join(
            f"{name}: {result.num_tasks}" for name, result in zip(self.columns, self.results[0], strict=True)
        )
        return "\n".join([*lines, "", f"pass@1, sampled, with 95 % intervals; held-out tasks of {sizes}"]) + "\n"

    def to_json(self) -> str:
        cells = {
            model: {column: asdict(result) for column, result in zip(self.columns, row, strict=True)}
            for model, row in zip(self.models, self.results, strict=True)
        }
        return json.dumps(cells, indent=2) + "\n"


def evaluate(engine: Engine, family: Family, policy: Policy, config: RunConfig) -> EvalResult:
    """Evaluate the engine's weights with the run's settings."""
    return summarise_groups(answer_tasks(engine, family, policy, config), config.eval)


def answer_tasks(engine: Engine, family: Family, policy: Policy, config: RunConfig) -> list[Group]:
    """The held-out tasks, each with its samples and, last, its greedy completion."""
    num_samples, max_tokens = config.eval.samples, config.engine.max_tokens
    sampled = GroupShape(size=num_samples, max_tokens=max_tokens, temperature=1.0)
    greedy = GroupShape(size=1, max_tokens=max_tokens, temperature=0.0)
    plans = []
    for index, task in enumerate(draw_tasks(family, config)):
        seeds = [derive_seed("eval", config.seed, index, sample) for sample in range(num_samples)]
        requests = request_rollouts(policy.tokenizer, task, sampled, f"s{index}", seeds)
        requests += request_rollouts(policy.tokenizer, task, greedy, f"greedy{index}", [0])
        plans.append(GroupPlan(index=index, task=task, requests=requests))
    return generate_groups(engine, family, policy.tokenizer, plans)


def run_eval(config: RunConfig, run_dir: Path | None, *, json_path: Path | None, markdown_path: Path | None) -> int:
    """`shoal eval`: the newest checkpoint of a run, or the starting policy if there is no run."""
    tune_process(config.threads)
    check_outputs(json_path, markdown_path)
    config = check_tasks(config)
    family = open_tasks(config)
    policy, version = _open_version(config, run_dir)
    engine = open_engine(config.engine, policy.model, eos_id=policy.eos_id, version=version)
    result = evaluate(engine, family, policy, config)
    print(result.to_markdown(), end="")
    write_figures(result, json_path, markdown_path)
    return 0


def check_outputs(*paths: Path | None) -> None:
    """Raise before the work if the output files cannot be written."""
    for path in filter(None, paths):
        check_output(path)


def write_figures(figures: EvalResult | EvalTable, json_path: Path | None, markdown_path: Path | None) -> None:
    """Write results to the files that the user named."""
    for path, text in ((json_path, figures.to_json()), (markdown_path, figures.to_markdown())):
        if path is not None:
            write_output(path, text.encode())


def run_table(
    config: RunConfig,
    models: Sequence[str],
    columns: Sequence[str],
    *,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
) -> EvalTable:
    """Evaluate each model on each kind of tasks: names of families, places of task sets, or else the run's own."""
    tune_process(config.threads)
    check_outputs(json_path, markdown_path)
    families = [aim_family(open_column(column), config.length) for column in columns] or [open_tasks(config)]
    pairs = [(family, fit_evaluation(family, config)) for family in families]
    results = tuple(_evaluate_model(config.policy, model, pairs) for model in models)
    table = EvalTable(_name_models(models), tuple(columns) or (_name_tasks(config),), results)
    write_figures(table, json_path, markdown_path)
    return table


def open_column(name: str) -> Family:
    """A family by name, or a task set by its place."""
    if ":" in name or Path(name).exists():
        family = SetFamily(open_set([name]), FilterConfig(), {})
        family.check_tasks()
        return family
    return load_family(name, {})


def _evaluate_model(
    config: PolicyConfig, model: str, pairs: Sequence[tuple[Family, RunConfig]]
) -> tuple[EvalResult, ...]:
    policy = _open_model(model, config)
    engine = open_engine(pairs[0][1].engine, policy.model, eos_id=policy.eos_id)
    return tuple(evaluate(engine, family, policy, config) for family, config in pairs)


def _open_model(model: str, config: PolicyConfig) -> Policy:
    """The newest checkpoint of a run directory, a checkpoint, or a folder or hub id."""
    newest = find_newest(Path(model) / "checkpoints")
    if newest is None and (Path(model) / "checkpoints").exists():
        raise ConfigError(f"{model}: has no checkpoint yet")
    policy = (newest or Path(model)) / "policy"
    return reopen_policy(policy if policy.is_dir() else model, config)


def _name_models(models: Sequence[str]) -> tuple[str, ...]:
    """The last parts of their paths; the whole paths if two of those are equal."""
    names = tuple(model.rstrip("/").rpartition("/")[2] or model for model in models)
    return names if len(set(names)) == len(names) else tuple(models)


def _name_tasks(config: RunConfig) -> str:
    tasks = config.tasks
    return ", ".join(Path(place).name for place in tasks.set) or tasks.environment or tasks.name


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

    If all tasks agree, their spread is uninformative, so Wilson's interval is used. A task then counts as one draw,
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
    """The results of held-out tasks; each group holds a task's samples, then its greedy completion."""
    versions = {span.version for group in groups for rollout in group.rollouts for span in rollout.versions}
    assert len(versions) == 1, f"weights changed during the evaluation: versions {sorted(versions)}"
    rewards = np.array([[score.value for score in group.scores] for group in groups])
    right = rewards >= 1.0
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
        reward=estimate_mean(rewards[:, :-1].mean(axis=1)),
        mean_length=estimate_mean(lengths),
        budget_errors=_measure_budgets(groups),
    )


def _measure_budgets(groups: Sequence[Group]) -> dict[int, Estimate]:
    """By target: the distance of a task's samples from it, mean over its tasks."""
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
        raise ConfigError(f"{run_dir}: has no checkpoint yet")
    step = read_state(path).step
    return load_checkpoint_policy(path, config.policy), step
