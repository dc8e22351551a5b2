"""What a question asks for, and whether an answer has the form that it asks for.

    percentage              a number without a sign is a percentage, on both sides
    decimal, fraction ...   the answer is written like the right one, and a fraction is reduced
    simplify, factor        the answer is the right expression up to the order of terms and factors and the way to write
    or expand               quotients and roots: an equal expression may be the question itself
    an expression that      the same: equal.py evaluates the expressions of a question, because there is no list of all
    equals the right one    the ways to ask for a simpler one
    anything else           an expression uses no kind of operation that the right one does without, and is not a part
                            of an expression of the question

So `\\sqrt{12}` is `2\\sqrt{3}`, unless that is what was to be simplified.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from shoal.tasks.verify.math.clean import clean_answer
from shoal.tasks.verify.math.number import Number
from shoal.tasks.verify.math.parse import FUNCTIONS, ParseError, Tree, is_scalar, list_symbols, parse_answer
from shoal.tasks.verify.math.units import list_asked_nouns, list_asked_units

Canon = tuple[Any, ...]


class Wanted(StrEnum):
    """The forms that a question may ask for."""

    SIMPLIFIED = "simplified"
    FACTORED = "factored"
    EXPANDED = "expanded"
    WRITTEN = "written in a given way"


@dataclass(frozen=True)
class Question:
    """What a question asks for."""

    is_known: bool
    """whether there is a question; a task may have none"""
    asks_percent: bool
    nouns: frozenset[str]
    units: frozenset[str]
    wanted: frozenset[Wanted]
    trees: tuple[Tree, ...]
    """the expressions in it"""

    @property
    def is_counted(self) -> bool:
        """Whether it asks how many things there are."""
        return any(not noun.startswith("per ") for noun in self.nouns)

    @cached_property
    def expressions(self) -> frozenset[Canon]:
        """Its expressions and their parts."""
        return frozenset(canon for tree in self.trees for canon in _list_parts(tree))


_PERCENT = re.compile(
    r"(?:\b(?:what|which|how many|as an?|in|nearest(?: (?:whole|tenth|hundredth)(?: of an?)?)?"
    r"|(?:what's|is|was|be|find|calculate|compute|determine|give|state|estimate) (?:the|his|her|their|its)"
    r"(?: (?:total|average|overall|approximate|exact|whole|new|final|combined|correct))?)) ?"
    r"(?:percent(?:age)?s?\b|\\?%)"
)
_FORMS = {
    Wanted.FACTORED: re.compile(
        r"\bfactor(?:i[sz]e)?\b(?!s? of)|\bfactor(?:ed|i[sz]ed)\b|\bas (?:an? |the )?product\b"
    ),
    Wanted.EXPANDED: re.compile(
        r"\bexpand(?:ed)?\b|\bexpansion\b|\bmultipl(?:y|ied)\b|\bdistribute\b|\bas a polynomial\b"
    ),
    Wanted.SIMPLIFIED: re.compile(
        r"\bsimplif(?:y|ied)\b|\bsimplest\b|\blowest terms\b|\breduced?\b|\brationali[sz]e|\blike terms\b"
        r"|\bcomplet(?:e|ing) the square\b|\bsingle (?:fraction|power|logarithm|radical)\b|\bpartial fractions?\b"
        r"|\bcommon fraction\b|\bin the form\b|\b(?:standard|vertex|slope-intercept|radical) form\b|\brewrite\b"
    ),
    Wanted.WRITTEN: re.compile(
        r"\b(?:as|to|into|in) (?:an? |the )?(?:exact |common |improper |proper |simplified |reduced )?"
        r"(?:decimal|fraction|mixed number|scientific notation)"
    ),
}
_MATHS = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SPLIT = re.compile(r"=|<|>|\\(?:leq?|geq?|neq|approx|quad|text)(?![A-Za-z])|\bfor\b|\bwhere\b|\bif\b|\bwhen\b|[?:;]")
_WORD = re.compile(rf"(?<![A-Za-z\\])(?!(?:{'|'.join(FUNCTIONS)}|pi)(?![A-Za-z]))[A-Za-z]{{2,}}")
_OPERATION = re.compile(r"[0-9A-Za-z)}].*[-+*/^!]|\\[A-Za-z]|[A-Za-z]{2}", re.DOTALL)
"""what a piece of a sentence has if it is an expression: an operation after something, or a function"""
_MAX_EXPRESSIONS = 64
_MAX_QUESTION_CHARS = 1 << 14
_FAMILIES = {
    **dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc"), "trigonometric"),
    **dict.fromkeys(("arcsin", "arccos", "arctan"), "inverse trigonometric"),
    "sqrt": "root",
    "exp": "exponential",
    "abs": "absolute value",
}
_MAX_COPIES = 16


@lru_cache(maxsize=512)
def read_question(prompt: str) -> Question:
    """What a prompt asks for."""
    prompt = prompt[-_MAX_QUESTION_CHARS:]
    words = " ".join(prompt.lower().split())
    return Question(
        is_known=words != "",
        asks_percent=_PERCENT.search(words) is not None,
        nouns=frozenset(list_asked_nouns(prompt)),
        units=frozenset(list_asked_units(prompt)),
        wanted=frozenset(form for form, pattern in _FORMS.items() if pattern.search(words)),
        trees=_find_expressions(prompt),
    )


def has_form(answer: Number, gold: Number, question: Question) -> bool:
    """Whether a right number is written as the question asks."""
    if Wanted.WRITTEN in question.wanted and (answer.form != gold.form or (answer.percent and not gold.percent)):
        return False
    if answer.is_reduced or not gold.is_reduced:
        return True
    is_restated = any(_read_quotient(canon) == abs(answer.value) for canon in question.expressions)
    return not question.wanted and not is_restated


def _read_quotient(canon: Canon) -> Fraction | None:
    match canon:
        case (_, (("number", int(top)),), (("number", int(low)),)):
            return Fraction(top, low)
    return None


def is_wanted_form(answer: Tree, gold: Tree, question: Question) -> bool:
    """Whether an expression that may be equal to the right one would answer the question."""
    if has_same_form(answer, gold, question):
        return True
    if question.wanted - {Wanted.WRITTEN} or find_canon(answer) in question.expressions:
        return False
    return _list_kinds(answer) <= _list_kinds(gold)


def has_same_form(answer: Tree, gold: Tree, question: Question) -> bool:
    """Whether an expression is the right one up to order and spelling."""
    opens = Wanted.FACTORED in question.wanted
    return find_canon(answer, opens=opens) == find_canon(gold, opens=opens)


def find_canon(tree: Tree, *, opens: bool = False) -> Canon:
    """The same for two expressions that differ only in order, quotients, signs and roots; nothing is computed. `opens`:
    a power is the product that it stands for."""
    sign, tops, lows = _list_factors(tree, opens)
    return sign, tuple(sorted(tops, key=repr)), tuple(sorted(lows, key=repr))


def _list_factors(tree: Tree, opens: bool) -> tuple[int, list[Canon], list[Canon]]:
    """Sign, factors, and factors of the denominator."""
    match tree:
        case ["number", str(digits)]:
            value = Fraction(digits)
            pair = ([("number", part)] if part != 1 else [] for part in (value.numerator, value.denominator))
            return 1, *pair  # type: ignore[return-value]
        case ["neg", inner]:
            sign, tops, lows = _list_factors(inner, opens)
            return -sign, tops, lows
        case ["mul" | "div" as kind, left, right]:
            mine, theirs = _list_factors(left, opens), _list_factors(right, opens)
            near, far = (1, 2) if kind == "mul" else (2, 1)
            return mine[0] * theirs[0], mine[1] + theirs[near], mine[2] + theirs[far]  # type: ignore[operator]
        case ["add", _, _]:
            sign, terms = _list_terms(tree, opens)
            return sign, [("sum", *terms)], []
    return _list_power(tree, opens)


def _list_power(tree: Tree, opens: bool) -> tuple[int, list[Canon], list[Canon]]:
    match tree:
        case ["pow", base, ["neg", power]]:
            sign, tops, lows = _list_power(["pow", base, power], opens)
            return sign, lows, tops
        case ["pow", base, ["number", str(digits)]] if opens and digits.isdigit() and int(digits) <= _MAX_COPIES:
            sign, tops, lows = _list_factors(base, opens)
            return sign ** int(digits), tops * int(digits), lows * int(digits)
        case ["pow", base, power]:
            return 1, [("power", find_canon(base, opens=opens), find_canon(power, opens=opens))], []
        case ["function", "sqrt", inner]:
            half = find_canon(["div", ["number", "1"], ["number", "2"]])
            return 1, [("power", find_canon(inner, opens=opens), half)], []
        case ["function", "exp", inner]:
            return _list_power(["pow", ["constant", "e"], inner], opens)
    parts = (find_canon(part, opens=opens) if isinstance(part, list) else part for part in tree[1:])
    return 1, [(tree[0], *parts)], []


def _list_terms(tree: Tree, opens: bool) -> tuple[int, list[Canon]]:
    """The terms of a sum in order, the first of them positive, and the sign that was taken out."""
    terms: list[Canon] = []
    stack = [(1, tree)]
    while stack:
        sign, part = stack.pop()
        if part[0] == "neg":
            stack.append((-sign, part[1]))
        elif part[0] == "add":
            stack += [(sign, part[1]), (sign, part[2])]
        else:
            found = find_canon(part, opens=opens)
            terms.append((sign * found[0], *found[1:]))
    terms.sort(key=lambda term: (repr(term[1:]), term[0]))
    first = terms[0][0]
    return first, [(first * term[0], *term[1:]) for term in terms]


def _list_kinds(tree: Any) -> frozenset[str]:
    """The kinds of operations that an expression leaves to its reader."""
    if not isinstance(tree, list):
        return frozenset()
    inner = frozenset().union(*map(_list_kinds, tree[1:]))
    has_variables = bool(list_symbols(tree))
    match tree:
        case ["function", ("ln" | "log"), _]:  # the logarithm of a power or product is a matter of taste
            return (inner - {"root", "power", "arithmetic"}) | {"logarithm"}
        case ["function", str(name), _]:
            return inner | {_FAMILIES[name]}
        case ["pow", base, power]:
            return _list_power_kinds(base, power, inner)
        case ["factorial", _]:
            return inner | {"factorial"}
        case ["div", _, low] if list_symbols(low) and not inner:  # not tan x as sin x / cos x
            return frozenset({"quotient"})
        case ["add" | "mul", left, right] if _is_number(left) and _is_number(right) and not has_variables:
            return inner | {"arithmetic"}
    return inner


def _list_power_kinds(base: Tree, power: Tree, inner: frozenset[str]) -> frozenset[str]:
    if base == ["constant", "e"] or list_symbols(power):
        return inner | {"exponential"}
    match power:
        case ["neg", ["number", _]] if list_symbols(base) and not inner:
            return frozenset({"quotient"})
        case ["number", str(digits)] | ["neg", ["number", str(digits)]] if digits.isdigit():
            return inner if list_symbols(base) else inner | {"power"}
    return inner | {"root"}


def _is_number(tree: Any) -> bool:
    return tree[0] == "number" or (tree[0] == "neg" and _is_number(tree[1]))


def _find_expressions(prompt: str) -> tuple[Tree, ...]:
    texts = [next(filter(None, match.groups())) for match in _MATHS.finditer(prompt)]
    texts += [piece for piece in _WORD.split(prompt.replace("$", " ")) if _OPERATION.search(piece)]
    found: dict[Canon, Tree] = {}
    for text in texts[:_MAX_EXPRESSIONS]:
        for piece in _SPLIT.split(text)[:_MAX_EXPRESSIONS]:
            try:
                tree = parse_answer(clean_answer(piece.strip(" .,!")))
            except ParseError:
                continue
            for part in [tree] if is_scalar(tree) else tree[1:]:
                if isinstance(part, list) and is_scalar(part):
                    found.setdefault(find_canon(part), part)
    return tuple(found.values())


def _list_parts(tree: Tree) -> Iterator[Canon]:
    yield find_canon(tree)
    for part in tree[1:]:
        if isinstance(part, list):
            yield from _list_parts(part)
