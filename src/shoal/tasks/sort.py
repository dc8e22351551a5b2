"""Sorting: `5391=` is answered by `1359`, `40 7 23=` by `7 23 40`."""

import random
import string
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.rollout import Score
from shoal.tasks.base import Task, build_task, match_answer
from shoal.tasks.options import STRICT, check_order

_ITEMS = {
    "digits": list(string.digits),
    "letters": list(string.ascii_lowercase),
    "numbers": [str(number) for number in range(100)],
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sort:
    """Sort digits, letters or numbers in ascending order; repeats stay."""

    name: ClassVar[str] = "sort"
    alphabet: ClassVar[str] = string.digits + string.ascii_lowercase + " ="

    items: Literal["digits", "letters", "numbers"] = "digits"
    """what is sorted: digits, lower-case letters, or numbers from 0 to 99"""
    min_length: Annotated[int, Field(ge=1, le=64)] = 4
    """fewest items"""
    max_length: Annotated[int, Field(ge=1, le=64)] = 8
    """most items"""

    def __post_init__(self) -> None:
        check_order("min_length", self.min_length, "max_length", self.max_length)

    def make_task(self, rng: random.Random) -> Task:
        length = rng.randint(self.min_length, self.max_length)
        items = [rng.choice(_ITEMS[self.items]) for _ in range(length)]
        # The list above is in ascending order, so its index sorts letters and numbers alike.
        ordered = sorted(items, key=_ITEMS[self.items].index)
        # Single characters need no gap, and half the tokens is twice the speed.
        gap = " " if self.items == "numbers" else ""
        answer = gap.join(ordered)
        return build_task(self.name, f"{gap.join(items)}=", {"answer": answer}, kin=answer)

    def demonstrate(self, task: Task) -> str:
        return str(task.info["answer"])

    def score(self, task: Task, completion: str) -> Score:
        return match_answer(completion, task.info["answer"])
