"""The offline filter: how often a model solves each task of a set, k samples per task.

    tasks -> k rollouts each -> OUT.work.jsonl, a line per task -> OUT: the set with pass rates by model -> report

Invariants:
- the rollouts of a task follow only from (seed, task id, weights): not from order, slots, or interruptions;
- each line of the work file is a finished task; after a kill the same command continues with the others, and the result
  is the same, bit for bit. A work file of another model, set, k or verifier is refused, never mixed in;
- nothing is removed: every task keeps its place and gets a pass rate. `tasks.filter` decides what is trained on;
- tasks whose prompts leave no room in the model's context get no rate, and are counted.
"""

import hashlib
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.config.run import MAX_SLOTS, EngineConfig
from shoal.config.tasks import FilterConfig
from shoal.engine import open_engine
from shoal.errors import ConfigError
from shoal.group import GroupPlan, GroupShape, generate_groups, request_rollouts
from shoal.learner.checkpoint import find_newest
from shoal.policy.model import Policy, choose_device, find_policy, open_policy
from shoal.rollout import Group
from shoal.seeds import derive_seed
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import TaskSet
from shoal.tasks.stats import SOLVED
from shoal.train.report import draw_png
from shoal.util.files import append_lines, hash_dir, repair_jsonl, write_atomic

_BARS = 40
"""longest bar of the histogram in text"""
OnProgress = Callable[["FilterProgress"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterPlan:
    """What is measured, and the bounds of what would be kept."""

    places: tuple[str, ...]
    model: str
    """folder or hub id of a policy, or a run directory"""
    out: Path
    name: str = ""
    """name of the model in the set; empty: the last part of `model`"""
    k: int = 8
    low: float = 0.125
    high: float = 0.5
    max_tokens: int = 256
    temperature: float = 1.0
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    slots: int = 256

    @property
    def work(self) -> Path:
        """The work file, with one line per finished task."""
        return self.out.with_name(f"{self.out.name}.work.jsonl")

    @property
    def column(self) -> str:
        """The model's name in the set."""
        return self.name or self.model.rstrip("/").rpartition("/")[2] or "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterProgress:
    """Progress of a filter."""

    done: int
    total: int
    rate: float
    """mean pass rate so far"""
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """Result of a filter."""

    column: str
    k: int
    low: float
    high: float
    counts: tuple[int, ...]
    """tasks with 0, 1, ... k solved attempts"""
    num_skipped: int
    num_tokens: int
    hash: str
    """hash of the set with its pass rates"""

    @property
    def num_kept(self) -> int:
        """Tasks within the bounds."""
        return sum(count for solved, count in enumerate(self.counts) if self.low <= solved / self.k <= self.high)

    def to_text(self) -> str:
        """The histogram, and how many tasks the bounds keep."""
        total, most = sum(self.counts), max(1, *self.counts)
        lines = [f"pass rate of {self.column}, {self.k} attempts at each of {total} tasks", ""]
        for solved, count in enumerate(self.counts):
            mark = "*" if self.low <= solved / self.k <= self.high else " "
            bar = "#" * -(-_BARS * count // most)
            lines.append(f"{solved / self.k:6.3f} {mark} {count:7d}  {bar}".rstrip())
        share = self.num_kept / total if total else 0.0
        lines += ["", f"kept (*): {self.num_kept} of {total} tasks, {share:.1%}, from {self.low:g} to {self.high:g}"]
        if self.num_skipped:
            lines.append(f"not measured because their prompts are too long: {self.num_skipped}")
        lines += [f"generated tokens: {self.num_tokens}", f"task set: {self.hash}"]
        return "\n".join(lines) + "\n"


def run_filter(plan: FilterPlan, on_progress: OnProgress = lambda _: None) -> FilterReport:
    """Measure the remaining tasks, and write the set, the report and its picture."""
    tasks = open_set(plan.places)
    family = SetFamily(tasks, FilterConfig(), {})
    family.check_tasks()
    policy, weights = _open_model(plan)
    done = open_work(plan, family, weights)
    waiting, skipped = _list_waiting(plan, family, policy, done)
    engine = open_engine(EngineConfig(slots=min(plan.slots, MAX_SLOTS)), policy.model, eos_id=policy.eos_id)
    started, tokens = time.perf_counter(), 0
    size, total = max(1, plan.slots // plan.k), len(done) + len(waiting)
    for start in range(0, len(waiting), size):
        groups = generate_groups(engine, family, policy.tokenizer, waiting[start : start + size])
        lines = [_describe_task(group) for group in groups]
        append_lines(plan.work, [json.dumps(line) for line in lines])
        done |= {line["id"]: line for line in lines}
        tokens += sum(line["tokens"] for line in lines)
        rate = sum(line["solved"] for line in done.values()) / (plan.k * len(done))
        per_s = tokens / max(time.perf_counter() - started, 1e-9)
        on_progress(FilterProgress(done=len(done), total=total, rate=rate, tokens_per_s=per_s))
    return _finish(plan, tasks, done, skipped)


def open_work(plan: FilterPlan, family: SetFamily, weights: str) -> dict[str, dict[str, Any]]:
    """The tasks that an earlier process finished; ConfigError if its settings differ."""
    head = {
        "tasks": family.tasks.hash,
        "weights": weights,
        "k": plan.k,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "verifiers": family.stamp_verifiers(),
    }
    repair_jsonl(plan.work)
    if not plan.work.exists() or not plan.work.stat().st_size:
        append_lines(plan.work, [json.dumps(head)])
        return {}
    try:
        known, *lines = (json.loads(line) for line in plan.work.read_bytes().splitlines())
        done = {str(line["id"]): {key: line[key] for key in ("id", "solved", "tokens")} for line in lines}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{plan.work}: not a work file of a filter; remove it or choose another --out") from None
    if known != head:
        changed = next(key for key in head if not isinstance(known, dict) or known.get(key) != head[key])
        raise ConfigError(f"{plan.work}: was started with another {changed}; remove it or choose another --out")
    return done


def _open_model(plan: FilterPlan) -> tuple[Policy, str]:
    """The policy, and the identifier of its weights."""
    newest = find_newest(Path(plan.model) / "checkpoints")
    place = find_policy(plan.model if newest is None else newest / "policy")
    policy = open_policy(place, dtype=getattr(torch, plan.dtype), device=choose_device(plan.device))
    policy.model.eval()
    name = hash_dir(Path(place)) if Path(place).is_dir() else place
    return policy, hashlib.sha256(f"{name} {plan.dtype}".encode()).hexdigest()


def _list_waiting(
    plan: FilterPlan, family: SetFamily, policy: Policy, done: dict[str, dict[str, Any]]
) -> tuple[list[GroupPlan], int]:
    """The remaining tasks in order of ids, and how many cannot be measured."""
    shape = GroupShape(size=plan.k, max_tokens=plan.max_tokens, temperature=plan.temperature)
    room = int(policy.model.config.max_position_embeddings) - plan.max_tokens
    plans, skipped = [], 0
    for index, task in enumerate(sorted(family.list_tasks(), key=lambda task: task.id)):
        if task.id in done:
            continue
        seeds = [derive_seed("filter", plan.seed, task.id, sample) for sample in range(plan.k)]
        requests = request_rollouts(policy.tokenizer, task, shape, f"f{index}", seeds)
        if len(requests[0].prompt_ids) > room:
            skipped += 1
        else:
            plans.append(GroupPlan(index=index, task=task, requests=requests))
    return plans, skipped


def _describe_task(group: Group) -> dict[str, Any]:
    solved = sum(score.value >= SOLVED for score in group.scores)
    return {"id": group.task_id, "solved": solved, "tokens": group.num_tokens}


def _finish(plan: FilterPlan, tasks: TaskSet, done: dict[str, dict[str, Any]], skipped: int) -> FilterReport:
    """Write the set with its pass rates, and the report."""
    records = []
    for record in tasks.records:
        rates = {model: rate for model, rate in record.difficulty.items() if model != plan.column}
        if record.id in done:
            rates[plan.column] = done[record.id]["solved"] / plan.k
        records.append(replace(record, difficulty=rates))
    measured = TaskSet(records, name=str(plan.out))
    measured.save(plan.out)
    counts = [0] * (plan.k + 1)
    for line in done.values():
        counts[line["solved"]] += 1
    report = FilterReport(
        column=plan.column,
        k=plan.k,
        low=plan.low,
        high=plan.high,
        counts=tuple(counts),
        num_skipped=skipped,
        num_tokens=sum(line["tokens"] for line in done.values()),
        hash=measured.hash,
    )
    write_atomic(plan.out.with_name(f"{plan.out.name}.report.txt"), report.to_text().encode())
    if (picture := draw_histogram(report)) is not None:
        write_atomic(plan.out.with_name(f"{plan.out.name}.report.png"), picture)
    return report


def draw_histogram(report: FilterReport) -> bytes | None:
    """The histogram as a PNG file; None if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    rates = [solved / report.k for solved in range(report.k + 1)]
    colours = ["C0" if report.low <= rate <= report.high else "0.75" for rate in rates]
    with draw_png(figsize=(7, 4), dpi=110) as (axes, picture):
        axes.bar(rates, report.counts, width=0.8 / report.k, color=colours)
        kept = f"{report.num_kept} of {sum(report.counts)} kept"
        axes.set(xlabel=f"pass rate, {report.k} attempts", ylabel="tasks", title=f"{report.column}: {kept}")
    return picture.getvalue()
