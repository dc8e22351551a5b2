"""Numbers as people write them: 1,080, -3.5, 2/3, \\frac{2}{3}, 2 1/2, 1.5*10^{3}, 50%, $7, 7 cm, 7 apples. Exact, as
fractions.

Expressions that must be evaluated (6*7, sqrt 16, 144/2 for 72) are not numbers here: such an answer must be evaluated.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import gcd
from typing import Any

from shoal.tasks.verify.math.units import MONEY, lacks_scale, read_phrase, read_unit

MAX_DIGITS = 128
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_SHAPE = re.compile(
    rf"""
    (?P<sign>[+-]?)\s*(?P<money>\$|\\pounds|\\euro)?\s*(?P<inner>-?)\s*
    (?:
        (?P<whole>[0-9]+)?\s*\\frac\s*(?:\{{\s*(?P<top>-?[0-9]+)\s*\}}|(?P<top1>[0-9]))
        \s*(?:\{{\s*(?P<low>[0-9]+)\s*\}}|(?P<low1>[0-9]))
      | (?:(?P<whole2>[0-9]+)\s+)?(?P<top2>[0-9]+)\s*/\s*(?P<low2>[0-9]+)
      | (?P<mantissa>{_PLAIN})\s*\*\s*10\s*\^\s*(?:\{{\s*(?P<power>-?[0-9]{{1,3}})\s*\}}|(?P<power1>[0-9]))
      | (?P<plain>{_PLAIN})
    )
    \s*(?P<percent>%|\bper\s?cent\b)?\s*(?P<unit>[A-Za-z][A-Za-z ]*?(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?)?
    """,
    re.VERBOSE,
)


class Form(StrEnum):
    """How a number is written."""

    PLAIN = "plain"
    FRACTION = "fraction"
    MIXED = "mixed number"
    SCIENTIFIC = "scientific notation"


@dataclass(frozen=True, slots=True)
class Number:
    """A number, its unit, and how it is written."""

    value: Fraction
    percent: bool
    unit: str
    """empty for none"""
    form: Form
    is_reduced: bool
    """whether it is no fraction that should have been reduced"""

    @property
    def worked(self) -> bool:
        """Whether it is a quotient with a whole value, which should have been evaluated."""
        return self.form in (Form.FRACTION, Form.MIXED) and self.value.denominator == 1


def read_number(text: str, asked: frozenset[str] = frozenset()) -> Number | None:
    """Parse a cleaned answer as a number; None if it is anything else. `asked`: nouns that the question asks for."""
    match = _SHAPE.fullmatch(text)
    if match is None or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    parts = match.groupdict()
    value, words, money = _read_value(parts), parts["unit"] or "", MONEY.get(parts["money"] or "", "")
    unit = read_unit(words, money)
    if unit is None and text[match.start("unit") - 1] == " ":  # 6 eggs, but not 6xyz
        unit = read_phrase(words.removeprefix("of ").removeprefix("the ") if parts["percent"] else words, money, asked)
    if value is None or unit is None or lacks_scale(words, asked) or (parts["sign"] and parts["inner"]):
        return None
    sign = -1 if "-" in (parts["sign"], parts["inner"]) else 1
    form, is_reduced = _read_form(parts)
    return Number(sign * value, parts["percent"] is not None, unit, form, is_reduced)


def read_quotient(tree: list[Any]) -> Number | None:
    """A number that is written with brackets or an inner sign: (1/2), (-1)/2."""
    match tree:
        case ["number", str(digits)]:
            return Number(Fraction(digits), percent=False, unit="", form=Form.PLAIN, is_reduced=True)
        case ["neg", inner] if (number := read_quotient(inner)) is not None:
            return replace(number, value=-number.value)
        case ["div", top, low]:
            upper, lower = read_quotient(top), read_quotient(low)
            if upper is None or lower is None or lower.value == 0 or {upper.form, lower.form} != {Form.PLAIN}:
                return None
            if upper.value.denominator == lower.value.denominator == 1:
                is_reduced = gcd(int(upper.value), int(lower.value)) == 1
                value = upper.value / lower.value
                return Number(value, percent=False, unit="", form=Form.FRACTION, is_reduced=is_reduced)
    return None


def _read_form(parts: dict[str, str | None]) -> tuple[Form, bool]:
    if parts["plain"] is not None:
        return Form.PLAIN, True
    if parts["mantissa"] is not None:
        return Form.SCIENTIFIC, True
    top, low, whole = _read_quotient(parts)
    return Form.FRACTION if whole is None else Form.MIXED, gcd(top, low) == 1


def _read_quotient(parts: dict[str, str | None]) -> tuple[int, int, int | None]:
    whole = parts["whole"] or parts["whole2"]
    top = int(parts["top"] or parts["top1"] or parts["top2"] or "0")
    low = int(parts["low"] or parts["low1"] or parts["low2"] or "0")
    return top, low, None if whole is None else int(whole)


def _read_value(parts: dict[str, str | None]) -> Fraction | None:
    if parts["plain"] is not None:
        return Fraction(parts["plain"].replace(",", "").rstrip("."))
    if parts["mantissa"] is not None:
        mantissa = Fraction(parts["mantissa"].replace(",", "").rstrip("."))
        return mantissa * Fraction(10) ** int(parts["power"] or parts["power1"] or "0") if 1 <= mantissa < 10 else None
    top, low, whole = _read_quotient(parts)
    if low == 0 or (whole is not None and not 0 <= top < low):
        return None
    return Fraction(top, low) + (whole or 0)


def equal_numbers(answer: Number, gold: Number, *, asks_percent: bool) -> bool:
    """Whether an answer is the right number, in an equal unit.

    A percent sign is a division by 100. If the question asks for a percentage, a number without a sign has one.
    """
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if answer.worked and not gold.worked:
        return False
    if asks_percent:
        return answer.value == gold.value
    return _scale(answer) == _scale(gold)


def _scale(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value
