"""Countdown: `24 from all 2 4 6 9=` is answered by an expression such as `((9-6)*2)*4`.

- An answer scores 1 if it evaluates to the target and uses each given number at most once; `all` in the prompt requires
  exactly once. It may use + - * / and parentheses whatever the options; intermediate fractions are allowed.
- Problems are built backwards from a random expression over positive whole numbers, so each has an answer.

The solver finds an expression over given numbers that reaches a target, by meeting in the middle. All intermediate
values are positive whole numbers, and division leaves no remainder. Tables of reachable values are built for at most
three numbers; above that one side is enumerated and the value that the other side must have is looked up, so six
numbers take some ten thousand steps where a forward search takes millions. The result is deterministic.
"""

import random
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import Task, build_task, grade_answer, quote_text
from shoal.tasks.families.expression import ExpressionError, parse_expression
from shoal.tasks.options import STRICT, AnswerFamily

_TABLE_NUMBERS = 3


def combine_values(x: int, y: int) -> Iterator[tuple[int, str]]:
    """Every (value, operator) for which `x operator y` is a positive whole number."""
    yield x + y, "+"
    yield x * y, "*"
    if x > y:
        yield x - y, "-"
    if x % y == 0:
        yield x // y, "/"


def find_expression(numbers: Sequence[int], target: int, operators: str, *, exact: bool) -> str | None:
    """An expression with value `target`: over all numbers if `exact`, else over as few as possible."""
    search = _Search(numbers, operators)
    full = (1 << len(numbers)) - 1
    masks = [full] if exact else sorted(range(1, full + 1), key=lambda mask: (mask.bit_count(), mask))
    for mask in masks:
        if found := search.solve(mask, target):
            return found[1:-1] if found.startswith("(") else found
    return None


class _Search:
    """Subsets of numbers are bit masks; texts of two or more numbers are in parentheses."""

    def __init__(self, numbers: Sequence[int], operators: str) -> None:
        self.numbers, self.operators = numbers, operators
        self.solve, self.table = cache(self._solve), cache(self._fill_table)

    def _solve(self, mask: int, target: int) -> str | None:
        """An expression over exactly the numbers of `mask` with value `target`."""
        if mask.bit_count() <= _TABLE_NUMBERS:
            return self.table(mask).get(target)
        return next(self._complete(mask, target), None)

    def _fill_table(self, mask: int) -> dict[int, str]:
        """Every value that exactly the numbers of `mask` can reach, with the first expression found for it."""
        if mask.bit_count() == 1:
            number = self.numbers[mask.bit_length() - 1]
            return {number: str(number)}
        table: dict[int, str] = {}
        for part in _proper_parts(mask):
            for x, left in self.table(part).items():
                for y, right in self.table(mask ^ part).items():
                    for value, operator in combine_values(x, y):
                        if operator in self.operators:
                            table.setdefault(value, f"({left}{operator}{right})")
        return table

    def _complete(self, mask: int, target: int) -> Iterator[str]:
        for part in _proper_parts(mask):
            if 2 * part.bit_count() > mask.bit_count():
                continue
            for x, text in self.table(part).items():
                for needed, before, operator, after in _missing_values(x, text, target):
                    if operator in self.operators and (other := self.solve(mask ^ part, needed)):
                        yield f"({before}{other}{after})"


def _proper_parts(mask: int) -> Iterator[int]:
    part = (mask - 1) & mask
    while part:
        yield part
        part = (part - 1) & mask


def _missing_values(x: int, text: str, target: int) -> Iterator[tuple[int, str, str, str]]:
    """Each positive y for which x and y make `target`, with the text before and after y's expression."""
    if target > x:
        yield target - x, f"{text}+", "+", ""
    if x > target:
        yield x - target, f"{text}-", "-", ""
    yield target + x, "", "-", f"-{text}"
    if target % x == 0:
        yield target // x, f"{text}*", "*", ""
    if x % target == 0:
        yield x // target, f"{text}/", "/", ""
    yield target * x, "", "/", f"/{text}"


_MAX_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Countdown(AnswerFamily):
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

    def make_task(self, rng: random.Random) -> Task:
        for _ in range(_MAX_DRAWS):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.max_number) for _ in range(count)]
            target = _draw_target(rng, numbers, self.operators)
            # Without `all` a target among the numbers would be its own answer.
            if target <= self.max_target and (self.exact or target not in numbers):
                return self._build_task(numbers, target)
        raise ConfigError(
            f"tasks.options.max_target = {self.max_target}: no target was reached in {_MAX_DRAWS} draws; increase it"
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
        # A model that can solve a problem can solve it in any order, and with or without permission to omit numbers.
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
