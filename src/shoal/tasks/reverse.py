"""Reversal: `shoal=` is answered by `laohs`."""

import random
import string
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.rollout import Score
from shoal.tasks.base import Task, build_task, match_answer
from shoal.tasks.options import STRICT, check_order


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reverse:
    """Write a string of lower-case letters backwards."""

    name: ClassVar[str] = "reverse"
    alphabet: ClassVar[str] = string.ascii_lowercase + "="

    min_length: Annotated[int, Field(ge=1, le=256)] = 4
    """fewest letters"""
    max_length: Annotated[int, Field(ge=1, le=256)] = 8
    """most letters"""
    letters: Annotated[int, Field(ge=2, le=26)] = 26
    """how many letters of the alphabet occur, from a on"""

    def __post_init__(self) -> None:
        check_order("min_length", self.min_length, "max_length", self.max_length)

    def make_task(self, rng: random.Random) -> Task:
        length = rng.randint(self.min_length, self.max_length)
        text = "".join(rng.choice(string.ascii_lowercase[: self.letters]) for _ in range(length))
        return build_task(self.name, f"{text}=", {"answer": text[::-1]})

    def demonstrate(self, task: Task) -> str:
        return str(task.info["answer"])

    def score(self, task: Task, completion: str) -> Score:
        return match_answer(completion, task.info["answer"])
