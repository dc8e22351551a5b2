"""Chains of reductions: `((3+4)*(2-9))=` is answered by `(7*(2-9));(7*3);1`, all modulo 10.

Every step rewrites the leftmost `(a+b)` of two single digits as one digit and copies the rest, so each step is as local
as possible, and values stay single digits however deep the expression.
"""

import random
import re
import string
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.tasks.base import Task, build_task
from shoal.tasks.options import STRICT, AnswerFamily

_PAIR = re.compile(r"\(([0-9])([+*-])([0-9])\)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExpressionChain(AnswerFamily):
    """Evaluate a nested expression of single digits modulo 10, reducing one pair at a time; only the result counts."""

    name: ClassVar[str] = "chain"
    alphabet: ClassVar[str] = string.digits + "+-*()=;"

    min_ops: Annotated[int, Field(ge=1, le=16)] = 2
    """fewest operations"""
    max_ops: Annotated[int, Field(ge=1, le=16)] = 5
    """most operations; with steps a completion has about 2 ops^2 characters"""
    operators: Literal["+", "-", "*", "+-", "+*", "-*", "+-*"] = "+-*"
    """operators that occur"""
    steps: bool = True
    """demonstrations write every reduction, not only the result"""

    def make_task(self, rng: random.Random) -> Task:
        text = _draw_expression(rng, rng.randint(self.min_ops, self.max_ops), self.operators)
        return build_task(self.name, f"{text}=", {"answer": reduce_expression(text)[-1]})

    def demonstrate(self, task: Task) -> str:
        steps = reduce_expression(task.prompt.removesuffix("="))
        return ";".join(steps) if self.steps else steps[-1]


def reduce_expression(text: str) -> list[str]:
    """The expression after each reduction; the last one is the result."""
    steps = []
    while match := _PAIR.search(text):
        x, y = int(match[1]), int(match[3])
        value = {"+": x + y, "-": x - y, "*": x * y}[match[2]] % 10
        text = f"{text[: match.start()]}{value}{text[match.end() :]}"
        steps.append(text)
    return steps


def _draw_expression(rng: random.Random, num_ops: int, operators: str) -> str:
    if num_ops == 0:
        return rng.choice(string.digits)
    num_left = rng.randrange(num_ops)
    left = _draw_expression(rng, num_left, operators)
    right = _draw_expression(rng, num_ops - 1 - num_left, operators)
    return f"({left}{rng.choice(operators)}{right})"
