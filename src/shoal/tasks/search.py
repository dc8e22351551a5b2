"""Finds an expression over given numbers that reaches a target, by meeting in the middle.

All values on the way are positive whole numbers, and division leaves no remainder. Tables of reachable values are made
for at most three numbers; above that one side is enumerated and the value that the other side must have is looked up,
so six numbers take some ten thousand steps where a forward search takes millions. The result is deterministic.
"""

from collections.abc import Iterator, Sequence

_TABLE_NUMBERS = 3


def combine_values(x: int, y: int) -> Iterator[tuple[int, str]]:
    """Every (value, operator) of `x operator y` that stays a positive whole number."""
    yield x + y, "+"
    yield x * y, "*"
    if x > y:
        yield x - y, "-"
    if x % y == 0:
        yield x // y, "/"


def find_expression(numbers: Sequence[int], target: int, operators: str, *, exact: bool) -> str | None:
    """An expression worth `target`: over all numbers if `exact`, else over as few as possible."""
    search = _Search(numbers, operators)
    full = (1 << len(numbers)) - 1
    masks = [full] if exact else sorted(range(1, full + 1), key=lambda mask: (mask.bit_count(), mask))
    for mask in masks:
        if found := search.solve(mask, target):
            return found[1:-1] if found.startswith("(") else found
    return None


class _Search:
    """Numbers are subsets by bit mask; texts of two and more numbers are in parentheses."""

    def __init__(self, numbers: Sequence[int], operators: str) -> None:
        self.numbers = numbers
        self.operators = operators
        self.tables: dict[int, dict[int, str]] = {}
        self.solved: dict[tuple[int, int], str | None] = {}

    def solve(self, mask: int, target: int) -> str | None:
        """An expression over exactly the numbers of `mask` that is worth `target`."""
        if mask.bit_count() <= _TABLE_NUMBERS:
            return self.table(mask).get(target)
        key = mask, target
        if key not in self.solved:
            self.solved[key] = next(self._complete(mask, target), None)
        return self.solved[key]

    def table(self, mask: int) -> dict[int, str]:
        """Every value that exactly the numbers of `mask` can reach, with the first expression found for it."""
        if mask not in self.tables:
            self.tables[mask] = self._fill_table(mask)
        return self.tables[mask]

    def _fill_table(self, mask: int) -> dict[int, str]:
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
    """Each positive y for which x and y make `target`, with what stands before and after y's expression."""
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
