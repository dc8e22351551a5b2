"""Tasks: families of problems with demonstrations and verifiers, and the split into training and held-out tasks."""

from shoal.tasks.base import Family, Task
from shoal.tasks.options import OptionCard
from shoal.tasks.registry import FamilyCard, describe_family, list_families, load_family
from shoal.tasks.split import Split, draw_task, heldout_tasks, split_task, train_task

__all__ = [
    "Family",
    "FamilyCard",
    "OptionCard",
    "Split",
    "Task",
    "describe_family",
    "draw_task",
    "heldout_tasks",
    "list_families",
    "load_family",
    "split_task",
    "train_task",
]
