"""A small parser for untrusted arithmetic expressions.

    sum    := product (("+" | "-") product)*
    product := atom (("*" | "/") atom)*
    atom   := number | "(" sum ")"

- ASCII digits, the four operators, parentheses and spaces between them; no sign, no power, no names.
- Length, depth and size of numbers are limited, so time and memory are bounded for any input.
- Values are exact fractions: 1/3*6 is 2.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from shoal.tasks.base import quote_text

MAX_CHARS = 256
MAX_DEPTH = 32
MAX_DIGITS = 6

_DIGITS = frozenset("0123456789")


class ExpressionError(ValueError):
    """The text is not an expression; the message gives the reason in a few words."""


@dataclass(frozen=True, slots=True)
class Expression:
    """The value of an expression, and the numbers in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


def parse_expression(text: str) -> Expression:
    """Parse and evaluate an expression; ExpressionError for anything else."""
    if len(text) > MAX_CHARS:
        raise ExpressionError("expression too long")
    reader = _ExpressionReader(text)
    value = reader.read_sum()
    if reader.peek():
        raise ExpressionError(f"unexpected {quote_text(reader.peek())}")
    return Expression(value, tuple(reader.numbers))


@dataclass(slots=True)
class _ExpressionReader:
    """A position in a text, and one method per rule of the grammar."""

    text: str
    position: int = 0
    depth: int = 0
    numbers: list[int] = field(default_factory=list)

    def peek(self) -> str:
        """The next character that is not a space, or an empty string at the end."""
        while self.text[self.position : self.position + 1] == " ":
            self.position += 1
        return self.text[self.position : self.position + 1]

    def read_sum(self) -> Fraction:
        value = self.read_product()
        while (operator := self.peek()) and operator in "+-":
            self.position += 1
            term = self.read_product()
            value = value + term if operator == "+" else value - term
        return value

    def read_product(self) -> Fraction:
        value = self.read_atom()
        while (operator := self.peek()) and operator in "*/":
            self.position += 1
            factor = self.read_atom()
            if operator == "/" and factor == 0:
                raise ExpressionError("division by zero")
            value = value * factor if operator == "*" else value / factor
        return value

    def read_atom(self) -> Fraction:
        head = self.peek()
        if head == "(":
            return self.read_group()
        if head not in _DIGITS:
            raise ExpressionError(f"unexpected {quote_text(head)}" if head else "unexpected end")
        return self.read_number()

    def read_group(self) -> Fraction:
        if self.depth == MAX_DEPTH:
            raise ExpressionError("parentheses too deep")
        self.depth += 1
        self.position += 1
        value = self.read_sum()
        if self.peek() != ")":
            raise ExpressionError("missing )")
        self.position += 1
        self.depth -= 1
        return value

    def read_number(self) -> Fraction:
        start = self.position
        while self.text[self.position : self.position + 1] in _DIGITS:
            self.position += 1
        digits = self.text[start : self.position]
        if len(digits) > MAX_DIGITS:
            raise ExpressionError("number too large")
        if digits != str(int(digits)):
            raise ExpressionError("leading zero")
        self.numbers.append(int(digits))
        return Fraction(int(digits))
