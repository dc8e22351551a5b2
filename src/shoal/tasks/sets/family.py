"""A task set as a family: tasks are drawn like from any other, and scored by the verifier of their type.

Choosing a task: a draw uses a random source r that follows from the group's seed (tasks/split.py, group.py):

    weight W = sum of the sources' weights;  r.randrange(W) selects one of the sources, in order of their names
    its n tasks are in order of their ids;   r.randrange(n) is the task

It is repeated until the task is on the required side of the split. So a group's task follows only from beacon, index,
the set's hash, its filter and its weights.

With a schedule the filter is that of the group's step: a public function of the step and of the set's own pass rates,
so every node draws the same task for (step, index). Evaluation has no step, and draws from all tasks the filter keeps.

Changing breaks: every group of every run on a task set.
"""

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache, cached_property
from itertools import accumulate

from shoal.config.tasks import FilterConfig, ScheduleStage
from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import Task
from shoal.tasks.sets.record import RecordError, TaskRecord
from shoal.tasks.sets.taskset import SetError, TaskSet, is_kept, weigh_sources
from shoal.tasks.split import Split, split_task
from shoal.tasks.verify.base import Attempt, Verifier, open_verifier

_KIN_HEX = 16


class SetFamily:
    """The tasks of a set that a filter keeps, mixed by source."""

    name = "set"

    def __init__(
        self, tasks: TaskSet, wanted: FilterConfig, weights: Mapping[str, int], stages: Sequence[ScheduleStage] = ()
    ) -> None:
        """`stages` narrow the filter, each from the step on at which it begins; the first begins at step 1."""
        self.tasks = tasks
        self._records = {record.id: record for record in tasks.records}
        self._keep(wanted, weights)
        self._starts = [stage.step for stage in stages]
        self._stages = [self._open_stage(stage, weights) for stage in stages]

    def at_step(self, step: int) -> "SetFamily":
        """The tasks that are drawn for a step."""
        if not self._stages:
            return self
        assert step >= 1, "steps begin with 1"
        return self._stages[bisect_right(self._starts, step) - 1]

    @cached_property
    def alphabet(self) -> str:
        """The alphabet of the whole set, whatever the filter."""
        letters: set[str] = set()
        for record in self.tasks.records:
            letters.update(record.text, str(record.metadata.get("solution", "")))
        return "".join(sorted(letters))

    def is_expensive(self, task: Task) -> bool:
        """Whether the verifier of a task is expensive."""
        return find_verifier(task.verifier).expensive

    @property
    def num_kept(self) -> int:
        """Number of tasks that can be drawn, on both sides of the split."""
        return sum(len(pool) for pool in self._pools)

    def list_tasks(self) -> list[Task]:
        """All tasks that can be drawn."""
        return [make_task(record) for pool in self._pools for record in pool]

    def make_task(self, rng: random.Random) -> Task:
        pool = self._pools[bisect_right(self._ends, rng.randrange(self._ends[-1]))]
        return make_task(pool[rng.randrange(len(pool))])

    def demonstrate(self, task: Task) -> str:
        solution = self._records[task.id].metadata.get("solution")
        if not isinstance(solution, str):
            raise ConfigError(f"sft.steps: task {task.id} has no metadata.solution to train on; set sft.steps=0")
        return solution

    def score(self, task: Task, completion: str) -> Score:
        return self.score_many(task, [completion])[0]

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """The scores of several completions of one task; code runs in several sandboxes concurrently."""
        attempts = [Attempt(task.info, task.prompt, completion) for completion in completions]
        return [_clean_reason(score) for score in find_verifier(task.verifier).score_many(attempts)]

    def score_again(self, task: Task, completion: str, first: Score) -> Iterator[Score]:
        """Scores of a completion under other conditions."""
        return find_verifier(task.verifier).score_again(Attempt(task.info, task.prompt, completion), first)

    def _keep(self, wanted: FilterConfig, weights: Mapping[str, int]) -> None:
        """Draw from the tasks that a filter keeps."""
        self.filter, kept = wanted, self.tasks.keep(wanted)
        self.weights = weigh_sources(weights, {source: len(records) for source, records in kept.items()})
        self._pools = [kept[source] for source in self.weights]
        self._ends = list(accumulate(self.weights.values()))

    def _open_stage(self, wanted: ScheduleStage, weights: Mapping[str, int]) -> "SetFamily":
        """The same set from a step on; SetError if no task could be trained on."""
        stage, step = copy(self), wanted.step
        stage._stages = []
        rates = {"min": max(self.filter.min, wanted.min), "max": min(self.filter.max, wanted.max)}
        narrowed = self.filter.model_copy(update=rates)
        left = {record.source for record in self.tasks.records if is_kept(record, narrowed)}
        named = {source: weight for source, weight in weights.items() if source in left}
        try:
            stage._keep(narrowed, named if left & weights.keys() else weights)
        except SetError as error:
            raise SetError(f"tasks.schedule: from step {step} on: {error}") from None
        if not any(split_task(make_task(record)) is Split.TRAIN for pool in stage._pools for record in pool):
            raise SetError(f"tasks.schedule: from step {step} on no task is left to train on, all are held out")
        return stage

    def stamp_verifiers(self) -> dict[str, str]:
        """Name and version of each verifier that scores the set, for the recipe."""
        return {task_type: find_verifier(task_type).stamp for task_type in self.tasks.task_types}

    def check_tasks(self) -> None:
        """Reject tasks that no completion could solve; called before a loaded set is used."""
        for record in self.tasks.records:
            try:
                find_verifier(record.task_type).check_info(record.info)
            except (ConfigError, RecordError) as error:
                raise SetError(f"{self.tasks.name}: task {record.id}: {error}") from None


def _clean_reason(score: Score) -> Score:
    """The score with its reason in ASCII, as submissions require, whatever a completion contains."""
    return score if score.reason.isascii() else Score(score.value, score.reason.encode("ascii", "replace").decode())


@cache
def find_verifier(task_type: str) -> Verifier:
    """One verifier per type for the whole process: some hold sandboxes to run code in."""
    return open_verifier(task_type)


def make_task(record: TaskRecord) -> Task:
    """The task of a record. Equal prompts are of one kin, so no problem is on both sides of the split.

    Metadata may name another kin: what variants of one problem share, or the kin that a family gave to its task.
    """
    kin = record.metadata.get("kin")
    if not isinstance(kin, str):
        kin = f"set-{hashlib.sha256(record.text.encode()).hexdigest()[:_KIN_HEX]}"
    return Task(
        id=record.id,
        prompt=record.text,
        verifier=record.task_type,
        info=record.info,
        kin=kin,
        messages=record.messages,
    )
