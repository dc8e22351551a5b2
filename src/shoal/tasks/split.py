"""Training and held-out tasks that cannot overlap.

- The side of a task follows from its kin alone: not from seed, options or order of drawing. A problem that is easy in
  SFT and hard in evaluation is on the same side for both, and so are the shuffles of one list.
- Drawing is deterministic in (family, options, split, seed), and ends instead of looping forever.
"""

import hashlib
import random
from enum import StrEnum

from shoal.errors import ConfigError
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task, list_tasks

HELDOUT_ONE_IN = 8
"""One task in eight is held out. Changing breaks: every comparison with earlier evaluations, and held-out purity."""
SPLIT_SALT = b"shoal-split-v1:"
"""Hashed before the kin. Changing breaks: the same."""
MAX_ATTEMPTS = 2_000
"""Draws without a new task before a family counts as exhausted; (7/8)^2000 is 1e-116."""


class Split(StrEnum):
    """Which side a task is on."""

    TRAIN = "train"
    HELDOUT = "heldout"


def split_task(task: Task) -> Split:
    """The side a task is on."""
    digest = hashlib.sha256(SPLIT_SALT + task.kin.encode()).digest()
    below = int.from_bytes(digest[:8], "big") < 2**64 // HELDOUT_ONE_IN
    return Split.HELDOUT if below else Split.TRAIN


def draw_task(family: Family, split: Split, seed: int) -> Task:
    """The task that belongs to a seed, on one side of the split."""
    for attempt in range(MAX_ATTEMPTS):
        task = family.make_task(random.Random(derive_seed("task", split, seed, attempt)))
        if split_task(task) is split:
            return task
    key, cure = ("tasks.options", "widen its ranges") if list_tasks(family) is None else ("tasks.set", "add tasks")
    raise ConfigError(
        f"{key}: {family.name} has too few problems, none of {MAX_ATTEMPTS} draws was a {split} task; {cure}"
    )


def train_task(family: Family, seed: int) -> Task:
    """The training task that belongs to a seed."""
    return draw_task(family, Split.TRAIN, seed)


def heldout_tasks(family: Family, count: int, seed: int) -> list[Task]:
    """`count` distinct held-out tasks, or all if there are fewer; a longer list begins with the shorter one."""
    tasks: dict[str, Task] = {}
    rng = random.Random(derive_seed("tasks", Split.HELDOUT, seed))
    stale = 0
    while len(tasks) < count and stale < MAX_ATTEMPTS:
        task = family.make_task(rng)
        fresh = split_task(task) is Split.HELDOUT and task.problem not in tasks
        stale = 0 if fresh else stale + 1
        if fresh:
            tasks[task.problem] = task
    if len(tasks) < count:  # draws rarely find the last tasks of a list
        for task in list_tasks(family) or ():
            if split_task(task) is Split.HELDOUT:
                tasks.setdefault(task.problem, task)
    return list(tasks.values())[:count]


def describe_heldout(family: Family, found: int) -> str:
    """How many held-out tasks there are, for an error or a warning."""
    listed = list_tasks(family)
    if listed is None:
        return f"{family.name} has only {found} different held-out tasks with these tasks.options"
    total = len({task.problem for task in listed})
    count = f"only {found}" if found else "none"
    return f"{count} of the {total:,} tasks are held out (one in {HELDOUT_ONE_IN}, by a hash of the prompt)"
