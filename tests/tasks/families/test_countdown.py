"""Countdown: the reader of expressions, the search, and a corpus of attacks."""

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.tasks.base import Task, build_task
from shoal.tasks.families.countdown import find_expression
from shoal.tasks.families.expression import MAX_DEPTH, ExpressionError, parse_expression
from shoal.tasks.registry import load_family
from shoal.tasks.split import train_task


def make_task(target: int, numbers: list[int], exact: bool) -> Task:
    return build_task(
        "countdown", f"{target} {exact} {numbers}", {"numbers": numbers, "target": target, "exact": exact}
    )


def join_terms(terms: list[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(["+", "-", " * ", "/"]).map(lambda sign: sign.join(terms))


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(inner.map("({})".format), st.lists(inner, min_size=2, max_size=3).flatmap(join_terms)),
    max_leaves=12,
)
EXACT = make_task(24, [2, 4, 6, 9], exact=True)
LOOSE = make_task(24, [2, 4, 6, 9], exact=False)


@pytest.mark.parametrize(
    "answer", ["((9-6)*2)*4", "(9-6)*2*4", " ( 9 - 6 ) * 4 * 2 ", "4*2*(9-6)", "((((9-6))))*(2*4)"]
)
def test_any_expression_that_reaches_the_target_is_correct(answer: str) -> None:
    score = load_family("countdown", {}).score(EXACT, answer)
    assert (score.value, score.reason) == (1.0, "correct")


def test_fractions_on_the_way_are_allowed() -> None:
    task = make_task(24, [1, 3, 4, 6], exact=True)
    assert load_family("countdown", {"operators": "+"}).score(task, "6/(1-3/4)").value == 1.0


def test_fewer_numbers_are_allowed_only_without_all() -> None:
    family = load_family("countdown", {})
    assert family.score(LOOSE, "6*4").value == 1.0
    assert family.score(EXACT, "6*4").reason == "number not used: 2"


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("6*2*2", "number not given, or used too often: 2"),
        ("24", "number not given, or used too often: 24"),
        ("24+0*2", "number not given, or used too often: 0"),
        ("6*4+9-9", "number not given, or used too often: 9"),
        ("6 4", "not an expression: unexpected 4"),
        ("6*04", "not an expression: leading zero"),
        ("00", "not an expression: leading zero"),
        ("-6*-4", "not an expression: unexpected -"),
        ("+24", "not an expression: unexpected +"),
        ("2**4", "not an expression: unexpected *"),
        ("9**9**9**9", "not an expression: unexpected *"),
        ("9^9^9", "not an expression: unexpected ^"),
        ("9e999999", "not an expression: unexpected e"),
        ("6//4", "not an expression: unexpected /"),
        ("24.0", "not an expression: unexpected ."),
        ("0x18", "not an expression: unexpected x"),
        ("6*4=24", "not an expression: unexpected ="),
        ("6*4#", "not an expression: unexpected #"),
        ("9/(6-4-2)", "not an expression: division by zero"),
        ("6*", "not an expression: unexpected end"),
        ("(6*4", "not an expression: missing )"),
        ("6*4)", "not an expression: unexpected )"),
        ("()", "not an expression: unexpected )"),
        ("6(4)", "not an expression: unexpected ("),
        ("9" * 7, "not an expression: number too large"),
        ("9" * 200, "not an expression: number too large"),
        ("9" * 5000, "not an expression: expression too long"),
        ("(" * 60_000, "not an expression: expression too long"),
        ("(" * 33 + "6" + ")" * 33 + "*4", "not an expression: parentheses too deep"),
        ("\u0666*\u0664", "not an expression: unexpected \\u0666"),
        ("6\u00d74", "not an expression: unexpected \\xd7"),
        ("\uff16*4", "not an expression: unexpected \\uff16"),
        ("6*4\0", "not an expression: unexpected \\x00"),
        ("6\u00a0*4", "not an expression: unexpected \\xa0"),
        ("6\n*4", "not an expression: unexpected \\n"),
        ("__import__('os').system('true')", "not an expression: unexpected _"),
        ("(lambda: 24)()", "not an expression: unexpected l"),
        ("[6*4][0]", "not an expression: unexpected ["),
        ("\ud800", "not an expression: unexpected \\ud800"),
        ("9-6", "wrong value: 3, expected 24"),
        ("9/6", "wrong value: 3/2, expected 24"),
        ("6*4;6*2", "wrong value: 12, expected 24"),
        ("6*4;", "no answer"),
    ],
)
def test_attacks_score_zero_and_say_why(attack: str, reason: str) -> None:
    score = load_family("countdown", {}).score(LOOSE, attack)
    assert (score.value, score.reason) == (0.0, reason)


def test_parentheses_up_to_the_limit_are_read() -> None:
    assert parse_expression("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH).value == 7


def test_operators_bind_and_associate_as_in_mathematics() -> None:
    assert parse_expression("9-4-2").value == 3
    assert parse_expression("2+3*4").value == 14
    assert parse_expression("12/3*2").value == 8
    assert parse_expression("1/3").value == Fraction(1, 3)
    assert parse_expression("7 - (2 + 1)").numbers == (7, 2, 1)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text("0123456789+-*/() ", max_size=40), EXPRESSIONS))
def test_the_reader_agrees_with_python_on_what_it_accepts(text: str) -> None:
    try:
        expression = parse_expression(text)
    except ExpressionError:
        return
    assert expression.value == evaluate_tree(ast.parse(text.strip(), mode="eval").body)


def evaluate_tree(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    apply = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    return apply[type(node.op)](evaluate_tree(node.left), evaluate_tree(node.right))


def test_the_search_finds_nothing_where_there_is_nothing() -> None:
    assert find_expression([1, 1], 5, "+-*/", exact=True) is None
    assert find_expression([1, 1, 1, 1, 1, 1], 999, "+-*/", exact=False) is None


def test_the_search_prefers_few_numbers_when_it_may() -> None:
    assert find_expression([2, 4, 6, 9], 24, "+-*", exact=False) == "6*4"
    assert find_expression([2, 4, 6, 9], 9, "+-*", exact=False) == "9"


def test_targets_stay_within_their_limit() -> None:
    family = load_family("countdown", {"max_target": 20, "max_numbers": 6})
    assert all(1 <= train_task(family, seed).info["target"] <= 20 for seed in range(200))


def test_without_all_no_number_is_its_own_answer() -> None:
    family = load_family("countdown", {"exact": False})
    for seed in range(200):
        task = train_task(family, seed)
        assert task.info["target"] not in task.info["numbers"]


def test_targets_that_cannot_be_reached_are_an_error() -> None:
    family = load_family(
        "countdown", {"operators": "+", "min_numbers": 6, "max_numbers": 6, "max_target": 4, "max_number": 9}
    )
    with pytest.raises(ConfigError, match=r"tasks.options.max_target = 4: no target was reached"):
        train_task(family, 0)
