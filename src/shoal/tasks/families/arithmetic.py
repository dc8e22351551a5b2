"""Written arithmetic: `57+68=` is answered by `7+8+0=15,5+6+1=12;125`.

Columns are processed from the right, one step each, and every step is a true equation that names all its inputs:

    57+68=  7+8+0=15,5+6+1=12;125        digit + digit + carry = total
    52-38=  2-8-0=4-10,5-3-1=1;14        digit - digit - borrow = digit, -10 if it borrows
    57*8=   7*8+0=56,5*8+5=45;456        digit * factor + carry = total; the factor is a single digit

Both numbers have the same number of digits and a difference is never negative. The answer is the plain decimal number:
no leading zero, no sign, ASCII digits.
"""

import random
import string
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.tasks.base import Task, build_task
from shoal.tasks.options import STRICT, AnswerFamily


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Arithmetic(AnswerFamily):
    """Add, subtract or multiply column by column, with carry, in written steps; only the result counts."""

    name: ClassVar[str] = "arithmetic"
    alphabet: ClassVar[str] = string.digits + "+-*=,;"

    min_digits: Annotated[int, Field(ge=1, le=32)] = 2
    """fewest digits of a number"""
    max_digits: Annotated[int, Field(ge=1, le=32)] = 4
    """most digits of a number; with steps a completion has about 10 characters per digit"""
    operators: Literal["+", "-", "*", "+-", "+*", "-*", "+-*"] = "+"
    """operators that occur"""
    steps: bool = True
    """demonstrations write every column, not only the result"""

    def make_task(self, rng: random.Random) -> Task:
        num_digits = rng.randint(self.min_digits, self.max_digits)
        operator = rng.choice(self.operators)
        left = _draw_number(rng, num_digits)
        right = rng.randint(2, 9) if operator == "*" else _draw_number(rng, num_digits)
        if operator == "-" and left < right:
            left, right = right, left
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
        info = {"left": left, "operator": operator, "right": right, "answer": str(result)}
        low, high = sorted((left, right))
        kin = f"{low}+{high}" if operator == "+" else f"{left}{operator}{right}"
        return build_task(self.name, f"{left}{operator}{right}=", info, kin=kin)

    def demonstrate(self, task: Task) -> str:
        info = task.info
        answer = str(info["answer"])
        return f"{write_steps(info['left'], info['operator'], info['right'])};{answer}" if self.steps else answer


def write_steps(left: int, operator: str, right: int) -> str:
    """The columns from the right, separated by commas."""
    upper = str(left)[::-1]
    lower = str(right) * len(upper) if operator == "*" else str(right)[::-1]
    steps, carry = [], 0
    for x, y in zip(upper, lower, strict=True):
        step, carry = _work_column(int(x), operator, int(y), carry)
        steps.append(step)
    return ",".join(steps)


def _work_column(x: int, operator: str, y: int, carry: int) -> tuple[str, int]:
    if operator == "-":
        digit = (x - y - carry) % 10
        borrows = x - y - carry < 0
        return f"{x}-{y}-{carry}={digit}" + "-10" * borrows, int(borrows)
    total = x + y + carry if operator == "+" else x * y + carry
    return f"{x}{operator}{y}+{carry}={total}", total // 10


def _draw_number(rng: random.Random, num_digits: int) -> int:
    low = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return rng.randint(low, 10**num_digits - 1)
