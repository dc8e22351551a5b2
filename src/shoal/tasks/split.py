"""Training and held-out tasks that cannot overlap.

- The side of a task follows from its kin alone: not from seed, options or order of drawing. A problem that is easy in
  SFT and hard in evaluation is on the same side for both, and so are the shuffles of one list.
- Drawing is deterministic in (family, options, split, seed), and fails with an error instead of looping forever.
"""

import hashlib
import random
from enum import StrEnum

from shoal.errors import ConfigError
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task

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
    raise ConfigError(
        f"tasks.options: {family.name} has too few problems, none of {MAX_ATTEMPTS} draws was a {split} task; "
        "widen its ranges"
    )


def train_task(family: Family, seed: int) -> Task:
    """The training task that belongs to a seed."""
    return draw_task(family, Split.TRAIN, seed)


def heldout_tasks(family: Family, count: int, seed: int) -> list[Task]:
    """`count` distinct held-out tasks; a longer list begins with the shorter one."""
    tasks: dict[str, Task] = {}
    rng = random.Random(derive_seed("tasks", Split.HELDOUT, seed))
    stale = 0
    while len(tasks) < count:
        task = family.make_task(rng)
        fresh = split_task(task) is Split.HELDOUT and task.problem not in tasks
        stale = 0 if fresh else stale + 1
        if fresh:
            tasks[task.problem] = task
        elif stale >= MAX_ATTEMPTS:
            raise ConfigError(
                f"tasks.options: {family.name} has too few problems, only {len(tasks)} distinct held-out tasks of "
                f"{count}; widen its ranges or evaluate fewer tasks"
            )
    return list(tasks.values())
