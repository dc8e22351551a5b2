"""Whether an answer equals the right one: exact and cheap if possible, in a sandbox if it must be evaluated.

numbers       as fractions, with percent and units (number.py, units.py); a number must be answered by a number
collections   sets, lists and unions in any order, points and intervals in order, part by part
expressions   by value (sandbox/programs/algebra.py), only over the variables of the right answer
texts         yes, (B), Monday: character by character, ignoring case

Numbers and expressions must also have the form that the question asks for (form.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from shoal.tasks.verify.math.clean import clean_answer
from shoal.tasks.verify.math.extract import MAX_ANSWER_CHARS
from shoal.tasks.verify.math.form import Question, has_form, has_same_form, is_wanted_form
from shoal.tasks.verify.math.number import Number, equal_numbers, read_number, read_quotient
from shoal.tasks.verify.math.parse import ParseError, Tree, count_nodes, is_scalar, list_symbols, parse_answer
from shoal.tasks.verify.math.units import is_other_unit, read_unit

MAX_PARTS = 16
_NAMED = re.compile(
    r"(?P<name>[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?)\s*(?:=|\\in(?![A-Za-z]))\s*(?P<rest>.*)", re.DOTALL
)
_MEASURED = re.compile(
    r"(?P<rest>.*?\S) (?P<unit>(?:(?:square|sq|cubic) )?[A-Za-z]{2,24}(?: ?\^ ?\{?[23]\}?)?)", re.DOTALL
)
_AND = re.compile(r",? (?:and|or) ")
_SPARE_NODES = 32
Judge = Callable[[Tree, Tree], bool]
"""whether two expressions are equal"""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer: a number, a tree (many numbers are both), or only a text."""

    text: str
    name: str
    """the variable whose value it states"""
    number: Number | None
    tree: Tree | None
    unit: str = ""
    """unit of a tree that is not a number"""


@lru_cache(maxsize=4096)
def read_answer(raw: str, nouns: frozenset[str] = frozenset()) -> ParsedAnswer:
    """Parse an answer; `nouns` are those that the question asks for."""
    text = clean_answer(raw[:MAX_ANSWER_CHARS])
    name = ""
    if (match := _NAMED.fullmatch(text)) and "=" not in match["rest"]:
        name, text = match["name"], match["rest"]
    number, tree = read_number(text, nouns), _read_tree(text)
    if number is None and tree is None and (measured := _MEASURED.fullmatch(text)):
        unit = read_unit(measured["unit"], "")
        if unit and (tree := _read_tree(measured["rest"])) is not None and is_scalar(tree):
            return ParsedAnswer(text, name, None, tree, unit)
    return ParsedAnswer(text, name, number or (None if tree is None else read_quotient(tree)), tree)


def _read_tree(text: str) -> Tree | None:
    try:
        text = _AND.sub(",", text)
        if text.count("\\pm") == 1:
            return ["list", *(parse_answer(text.replace("\\pm", sign)) for sign in "+-")]
        return parse_answer(text)
    except ParseError:
        return None


def same_text(left: str, right: str, nouns: frozenset[str]) -> bool:
    """Whether two spellings of an answer are the same, as far as that is visible without evaluating anything."""
    mine, theirs = read_answer(left, nouns), read_answer(right, nouns)
    if mine.number is not None and theirs.number is not None:
        return _identify(mine.number) == _identify(theirs.number)
    return mine.text == theirs.text


def _identify(number: Number) -> tuple[Fraction, bool, str]:
    return number.value, number.percent, number.unit


def equal_answers(answer: ParsedAnswer, gold: ParsedAnswer, question: Question, judge: Judge) -> bool:
    """Whether an answer is correct."""
    if answer.name and gold.name and answer.name != gold.name:
        return False
    if gold.number is not None:
        return answer.number is not None and _is_right_number(answer.number, gold.number, question)
    if gold.tree is None:
        return _fold_text(answer.text) == _fold_text(gold.text) != ""

    def judge_form(left: Tree, right: Tree) -> bool:
        if left == right:
            return True
        is_equal = is_wanted_form(left, right, question) and judge(left, right)
        return is_equal and (has_same_form(left, right, question) or not _is_rewriting(right, question, judge))

    is_same_unit = answer.unit == gold.unit or not (answer.unit and gold.unit)
    if not is_same_unit or (not gold.unit and _is_other_unit(answer.unit, question)):
        return False
    return answer.tree is not None and _equal_trees(answer.tree, gold.tree, judge_form)


def _is_rewriting(gold: Tree, question: Question, judge: Judge) -> bool:
    """Whether the question has an expression that equals the right one, so that an equal one need not answer it."""
    alike = [tree for tree in question.trees if list_symbols(tree) == list_symbols(gold)]
    return any(judge(tree, gold) for tree in alike[:MAX_PARTS])


def _is_right_number(answer: Number, gold: Number, question: Question) -> bool:
    if not gold.unit and _is_other_unit(answer.unit, question):
        return False
    is_equal = equal_numbers(answer, gold, asks_percent=question.asks_percent)
    return is_equal and has_form(answer, gold, question)


def _is_other_unit(unit: str, question: Question) -> bool:
    return question.is_known and is_other_unit(unit, question.units, is_counted=question.is_counted)


def _equal_trees(answer: Tree, gold: Tree, judge: Judge) -> bool:
    kinds = (answer[0], gold[0])
    if kinds[1] in ("list", "set", "union"):
        is_same_kind = kinds[0] == kinds[1] or set(kinds) == {"list", "set"}
        return is_same_kind and _match_parts(answer[1:], gold[1:], judge)
    if kinds == ("group", "group"):
        is_same_shape = answer[1] == gold[1] and len(answer) == len(gold)
        return is_same_shape and all(_equal_trees(*pair, judge) for pair in zip(answer[2:], gold[2:], strict=True))
    if not (is_scalar(answer) and is_scalar(gold)):
        return answer == gold
    return _equal_scalars(answer, gold, judge)


def _match_parts(answer: list[Tree], gold: list[Tree], judge: Judge) -> bool:
    """Whether each part has a match, in any order."""
    if len(answer) != len(gold) or len(gold) > MAX_PARTS:
        return False
    left = list(answer)
    for wanted in gold:
        found = next((place for place, part in enumerate(left) if _equal_trees(part, wanted, judge)), None)
        if found is None:
            return False
        del left[found]
    return True


def _equal_scalars(answer: Tree, gold: Tree, judge: Judge) -> bool:
    right = _read_rational(gold)
    if right is not None:  # here too, a number must be answered by a number
        found = _read_rational(answer)
        return found == right and (answer[0] != "div" or right.denominator > 1)
    if not list_symbols(answer) <= list_symbols(gold) or count_nodes(answer) > 2 * count_nodes(gold) + _SPARE_NODES:
        return False
    return judge(answer, gold)


def _read_rational(tree: Tree) -> Fraction | None:
    """The value of a number, with its sign, or of a quotient of two; None if it must be evaluated."""
    match tree:
        case ["number", str(digits)]:
            return Fraction(digits)
        case ["neg", inner]:
            value = _read_rational(inner)
            return None if value is None else -value
        case ["div", ["number", str(top)], ["number", str(low)]]:
            return Fraction(top) / Fraction(low) if Fraction(low) else None
    return None


def _fold_text(text: str) -> str:
    words = " ".join(text.casefold().split()).strip(" .,;:!\"'")
    return words[1:-1] if len(words) == 3 and words[0] == "(" and words[2] == ")" else words
