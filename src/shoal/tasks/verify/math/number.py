"""Numbers as people write them: 1,080, -3.5, 2/3, \\frac{2}{3}, 2 1/2, 1.5*10^{3}, 50%, $7, 7 cm, 7 apples. Exact, as
fractions.

Expressions that must be evaluated (6*7, sqrt 16, 144/2 for 72) are not numbers here: such an answer must be evaluated.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

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
    \s*(?P<percent>%|\bpercent\b)?\s*(?P<unit>[A-Za-z][A-Za-z ]*?(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?)?
    """,
    re.VERBOSE,
)
_MONEY = {"$": "dollar", "\\pounds": "pound sterling", "\\euro": "euro"}
_UNITS = {
    name: group[0]
    for group in (
        *(("mm", "millimeter", "millimetre"), ("cm", "centimeter", "centimetre"), ("m", "meter", "metre")),
        *(("km", "kilometer", "kilometre"), ("inch", "in", "inches"), ("foot", "ft", "feet"), ("yard", "yd")),
        *(("mile", "mi"), ("second", "s", "sec"), ("minute", "min"), ("hour", "h", "hr"), ("day",), ("week",)),
        *(("month",), ("year", "yr"), ("mg", "milligram"), ("g", "gram"), ("kg", "kilogram"), ("pound", "lb")),
        *(("ounce", "oz"), ("ton",), ("ml", "milliliter", "millilitre"), ("l", "liter", "litre"), ("gallon",)),
        *(("dollar", "usd"), ("cent",), ("euro",), ("degree", "deg"), ("unit",), ("mph", "mile per hour")),
        *(("kmh", "kph", "km per hour"), ("point",), ("people", "person"), ("item",), ("time",)),
    )
    for name in group
}
_NOUN = re.compile(r"[a-z]{3,24}(?: (?:[a-z]{3,24}|in|of|a)){0,3}")
_RATES = ("per ", "every ", "each ")
_COUNTED = """
one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety
zero hundred thousand million billion trillion dozen score gross grand half halve third fourth quarter fifth sixth
seventh eighth ninth tenth hundredth thousandth millionth percent permille point plus minus time over mod modulo
remainder squared cubed square cubic factorial root power and nor not but than less more least most about almost
nearly around sin cos tan cot sec csc sqrt log exp abs arcsin arccos arctan inf infty infinity nan
"""
_NO_NOUNS = frozenset(_COUNTED.split())
"""words that change the number before them, or make it invalid"""
_SQUARES = {"square": "^2", "sq": "^2", "cubic": "^3"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number, and its unit."""

    value: Fraction
    percent: bool
    unit: str
    """empty for none"""
    worked: bool
    """whether it is a quotient with a whole value, which should have been evaluated"""


def read_number(text: str) -> Number | None:
    """Parse a cleaned answer as a number; None if it is anything else."""
    match = _SHAPE.fullmatch(text)
    if match is None or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    parts = match.groupdict()
    value = _read_value(parts)
    unit = read_unit(parts["unit"] or "", _MONEY.get(parts["money"] or "", ""))
    if unit is None and text[match.start("unit") - 1] == " ":  # 6 eggs, but not 6xyz
        unit = _read_noun(parts["unit"] or "", _MONEY.get(parts["money"] or "", ""))
    if value is None or unit is None or (parts["sign"] and parts["inner"]):
        return None
    is_quotient = parts["plain"] is None and parts["mantissa"] is None
    sign = -1 if "-" in (parts["sign"], parts["inner"]) else 1
    return Number(sign * value, parts["percent"] is not None, unit, is_quotient and value.denominator == 1)


def _read_value(parts: dict[str, str | None]) -> Fraction | None:
    if parts["plain"] is not None:
        return Fraction(parts["plain"].replace(",", "").rstrip("."))
    if parts["mantissa"] is not None:
        mantissa = Fraction(parts["mantissa"].replace(",", "").rstrip("."))
        return mantissa * Fraction(10) ** int(parts["power"] or parts["power1"] or "0") if 1 <= mantissa < 10 else None
    top = int(parts["top"] or parts["top1"] or parts["top2"] or "0")
    low = int(parts["low"] or parts["low1"] or parts["low2"] or "0")
    whole = parts["whole"] or parts["whole2"]
    if low == 0 or (whole is not None and not 0 <= top < low):
        return None
    return Fraction(top, low) + int(whole or 0)


def read_unit(text: str, money: str) -> str | None:
    """The canonical name of a unit, empty without one, None for a word that is not a unit."""
    words = text.lower().replace("{", "").replace("}", "").replace(" ", "  ").strip()
    if not words:
        return money
    words, caret, power = words.partition("^")
    first, _, rest = words.strip().partition("  ")
    square = _SQUARES.get(first, "")
    name = _find_unit(" ".join((rest if square else words).split()))
    if name is None or money not in ("", name) or (square and caret):
        return None
    return name + (square or (caret + power.strip()))


def _read_noun(text: str, money: str) -> str | None:
    """What is counted, in the singular; None if it may be more than a name. For money only how often it is paid."""
    words = text.lower().split()
    singular = [word.removesuffix("s") for word in words]
    noun = " ".join(singular)
    if _NOUN.fullmatch(noun) is None or _NO_NOUNS.intersection(words + singular):
        return None
    return noun if not money else money if noun.startswith(_RATES) else None


def _find_unit(name: str) -> str | None:
    first, per, rest = name.partition(" per ")
    singular = first if first in _UNITS else first.removesuffix("s")
    if not per:
        return _UNITS.get(singular)
    return _UNITS.get(f"{singular} per {rest}") or _UNITS.get(f"{_UNITS.get(singular, '')} per {rest}")


def equal_numbers(answer: Number, gold: Number, *, about_percent: bool) -> bool:
    """Whether an answer is the expected number. `about_percent`: the question is about a percentage, so that 50 and 50%
    are the same answer."""
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if answer.worked and not gold.worked:
        return False
    is_alike = answer.percent == gold.percent or gold.percent or about_percent
    return (is_alike and answer.value == gold.value) or _scale(answer) == _scale(gold)


def _scale(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value
