"""Countdown: `24 from all 2 4 6 9=` is answered by an expression such as `((9-6)*2)*4`.

- An answer is worth 1 if it evaluates to the target and uses each given number at most once; `all` in the prompt
  demands exactly once. It may use + - * / and parentheses whatever the options; fractions on the way are allowed.
- Problems are built backwards from a random expression over positive whole numbers, so each has an answer.
"""

import random
import string
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import Task, build_task, grade_answer, quote_text
from shoal.tasks.expression import ExpressionError, parse_expression
from shoal.tasks.options import STRICT, check_order
from shoal.tasks.search import combine_values, find_expression

_MAX_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Countdown:
    """Reach a target from given numbers with + - * / and parentheses, each number used at most once."""

    name: ClassVar[str] = "countdown"
    alphabet: ClassVar[str] = string.digits + "+-*/()= " + "aflmor"

    min_numbers: Annotated[int, Field(ge=2, le=6)] = 3
    """fewest numbers"""
    max_numbers: Annotated[int, Field(ge=2, le=6)] = 4
    """most numbers"""
    max_number: Annotated[int, Field(ge=2, le=999)] = 9
    """largest number given"""
    max_target: Annotated[int, Field(ge=2, le=9999)] = 99
    """largest target"""
    operators: Literal["+", "+-", "+*", "+-*", "+-*/"] = "+-*"
    """operators that problems and demonstrations are built from"""
    exact: bool = True
    """every number must be used, exactly once"""

    def __post_init__(self) -> None:
        check_order("min_numbers", self.min_numbers, "max_numbers", self.max_numbers)

    def make_task(self, rng: random.Random) -> Task:
        for _ in range(_MAX_DRAWS):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.max_number) for _ in range(count)]
            target = _draw_target(rng, numbers, self.operators)
            # Without `all` a target among the numbers would be its own answer.
            if target <= self.max_target and (self.exact or target not in numbers):
                return self._build_task(numbers, target)
        raise ConfigError(
            f"tasks.options.max_target = {self.max_target}: no target was reached in {_MAX_DRAWS} draws; raise it"
        )

    def demonstrate(self, task: Task) -> str:
        found = find_expression(task.info["numbers"], task.info["target"], self.operators, exact=task.info["exact"])
        assert found is not None, f"{task.prompt} was built from an expression, so there is one"
        return found

    def score(self, task: Task, completion: str) -> Score:
        info = task.info
        return grade_answer(completion, lambda answer: _judge(answer, info["numbers"], info["target"], info["exact"]))

    def _build_task(self, numbers: list[int], target: int) -> Task:
        words = ["from", "all"] if self.exact else ["from"]
        prompt = " ".join([str(target), *words, *map(str, numbers)]) + "="
        info = {"numbers": numbers, "target": target, "exact": self.exact}
        # whoever can solve a problem can solve it in any order, and with or without leave to omit numbers
        return build_task(self.name, prompt, info, kin=f"{target} {sorted(numbers)}")


def _draw_target(rng: random.Random, numbers: Sequence[int], operators: str) -> int:
    """The value of a random expression that uses every number once."""
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        left, right = values.pop(), values.pop()
        results = [value for value, operator in combine_values(left, right) if operator in operators]
        values.append(rng.choice(results))
    return values[0]


def _judge(answer: str, numbers: Sequence[int], target: int, exact: bool) -> Score:
    try:
        expression = parse_expression(answer)
    except ExpressionError as error:
        return Score(0.0, f"not an expression: {error}")
    used, given = Counter(expression.numbers), Counter(numbers)
    if extra := used - given:
        return Score(0.0, f"number not given, or used too often: {min(extra)}")
    if exact and (rest := given - used):
        return Score(0.0, f"number not used: {min(rest)}")
    if expression.value != target:
        return Score(0.0, f"wrong value: {quote_text(str(expression.value))}, expected {target}")
    return Score(1.0, "correct")
