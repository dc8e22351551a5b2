"""Sums of digits modulo 10: `3825=` is answered by `33812358;8`, by `8`, or by anything in between or longer.

A step is a digit and the total so far. The number of steps is free: with all of them the answer is certain, with none
the model adds without writing, and it may go over the digits again. So a right answer can have any length, which target
lengths need (tasks/length.py).
"""

import random
import string
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.seeds import derive_seed
from shoal.tasks.base import Task, build_task
from shoal.tasks.options import STRICT, AnswerFamily

_ENDING = 3
"""characters after the steps: `;`, the answer, and the end token"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DigitSum(AnswerFamily):
    """Add digits modulo 10, with any number of written steps; only the result counts."""

    name: ClassVar[str] = "total"
    alphabet: ClassVar[str] = string.digits + "=;"

    min_length: Annotated[int, Field(ge=1, le=64)] = 4
    """fewest digits"""
    max_length: Annotated[int, Field(ge=1, le=64)] = 6
    """most digits"""
    passes: Annotated[int, Field(ge=0, le=8)] = 1
    """most passes over the digits in demonstrations; the number of steps follows from the problem"""
    heed: Annotated[int, Field(ge=0, le=100)] = 0
    """percentage of demonstrations that keep to the target length of their prompt, if there is one"""

    def make_task(self, rng: random.Random) -> Task:
        length = rng.randint(self.min_length, self.max_length)
        digits = [rng.choice(string.digits) for _ in range(length)]
        answer = str(sum(map(int, digits)) % 10)
        return build_task(self.name, f"{''.join(digits)}=", {"answer": answer}, kin="".join(sorted(digits)))

    def demonstrate(self, task: Task) -> str:
        most = self.passes * len(task.prompt.removesuffix("="))
        return _demonstrate_steps(task, random.Random(derive_seed("total", task.id)).randint(0, most))

    def demonstrate_target(self, task: Task, target: int) -> str:
        """A demonstration for a prompt with a target length; problem and target decide whether it keeps to it."""
        if random.Random(derive_seed("heed", task.id, target)).randrange(100) >= self.heed:
            return self.demonstrate(task)
        return _demonstrate_steps(task, max(0, (target - _ENDING) // 2))


def _demonstrate_steps(task: Task, count: int) -> str:
    steps = write_totals(task.prompt.removesuffix("="), count)
    return f"{steps};{task.info['answer']}" if steps else str(task.info["answer"])


def write_totals(digits: str, count: int) -> str:
    """`count` steps: each digit with the total so far; after the last digit it starts again from the first."""
    steps, total = "", 0
    for position in range(count):
        digit = int(digits[position % len(digits)])
        total = (digit if position % len(digits) == 0 else total + digit) % 10
        steps += f"{digit}{total}"
    return steps
