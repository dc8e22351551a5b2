"""Statistics per task, and a curriculum based on them.

    <run>/tasks.jsonl    {"step", "task", "index", "attempts", "solved", "tokens", "trained"}: one line per group drawn

Invariants:
- the statistics follow from the lines; a run that resumes after step n drops the lines of later steps, and so draws the
  same tasks as before;
- a line refers to the task without its target length;
- the curriculum draws the seed's own task unless it was solved too rarely or too often so far; then the next of a few
  that follow from the same seed. A task that was never tried is always drawn. When it is off, no draw changes.

It is for `shoal train` only: in a swarm tasks follow from the beacon alone, because workers and validators would
otherwise have to agree on statistics first.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.run import BatchConfig
from shoal.errors import ConfigError
from shoal.rollout import Group
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task
from shoal.tasks.length import strip_target
from shoal.tasks.split import train_task
from shoal.util.files import append_lines, repair_jsonl, write_atomic

STATS_NAME = "tasks.jsonl"
SOLVED = 1.0
"""task reward of a solved attempt, as in evaluation"""
MAX_TRIES = 8
"""tasks considered for one group; if none qualifies, the first is drawn"""


@dataclass(slots=True)
class TaskStat:
    """Statistics of one task."""

    attempts: int = 0
    solved: int = 0
    last_step: int = 0

    @property
    def rate(self) -> float:
        """Share of solved attempts."""
        return self.solved / self.attempts


class TaskStats:
    """Statistics of all tasks of a run, kept in a file that only this process writes."""

    def __init__(self, path: Path, *, last: int) -> None:
        """Resumes after step `last`; later lines are dropped, all of them for -1."""
        self._path = path
        self.tasks: dict[str, TaskStat] = {}
        if path.exists():
            repair_jsonl(path)
            self._load(last)

    def add(self, step: int, groups: Sequence[Group], trained: Collection[int]) -> None:
        """Record the groups that were drawn for a step; `trained` are the indices of its batch."""
        lines = [_describe_group(step, group, group.index in trained) for group in groups]
        append_lines(self._path, [json.dumps(line) for line in lines])
        for line in lines:
            self._count(line)

    def _load(self, last: int) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                if values["step"] <= last:
                    kept.append(line)
                    self._count(values)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{self._path}: line {number} is not a line of task statistics; remove the file"
                ) from None
        if len(kept) < len(lines):
            write_atomic(self._path, b"".join(kept))

    def _count(self, line: "dict[str, int | str | bool]") -> None:
        stat = self.tasks.setdefault(str(line["task"]), TaskStat())
        stat.attempts += int(line["attempts"])
        stat.solved += int(line["solved"])
        stat.last_step = max(stat.last_step, int(line["step"]))


class Curriculum:
    """Chooses tasks of medium difficulty."""

    def __init__(self, stats: TaskStats, config: BatchConfig) -> None:
        self._stats, self._low, self._high = stats, config.curriculum_min, config.curriculum_max
        self.num_passed = 0
        """tasks skipped so far"""

    def choose(self, family: Family, beacon: int, index: int) -> Task:
        """The task of a group."""
        first = train_task(family, derive_seed("task", beacon, index))
        task = first
        for attempt in range(1, MAX_TRIES):
            if self.allows(task):
                return task
            self.num_passed += 1
            task = train_task(family, derive_seed("task", beacon, index, attempt))
        return task if self.allows(task) else first

    def allows(self, task: Task) -> bool:
        """Whether a task was never tried, or solved neither too rarely nor too often."""
        stat = self._stats.tasks.get(task.problem)
        return stat is None or self._low <= stat.rate <= self._high


def _describe_group(step: int, group: Group, trained: bool) -> "dict[str, int | str | bool]":
    return {
        "step": step,
        "task": strip_target(group.task_id),
        "index": group.index,
        "attempts": len(group.scores),
        "solved": sum(score.value >= SOLVED for score in group.scores),
        "tokens": group.num_tokens,
        "trained": trained,
    }
