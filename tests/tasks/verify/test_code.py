"""Code that solves its task, code that does not, and the tests of real problems."""

import ast
import time
from functools import partial
from itertools import pairwise

import pytest

from shoal.errors import ConfigError
from shoal.sandbox.frames import ChannelError, decode_value, encode_value
from shoal.tasks.verify.base import Agreement, Attempt, compare_claim, is_firm
from shoal.tasks.verify.code.compare import match_output, match_values
from shoal.tasks.verify.code.verifier import find_source

HUMAN_EVAL = "humaneval_first82.jsonl"
DOUBLE = {
    "test_cases": [
        {"type": "function_call", "fn_name": "f", "input": [1], "output": 2},
        {"type": "function_call", "fn_name": "f", "input": ["ab"], "output": "abab"},
    ]
}
SUM = {
    "test_cases": [
        {"type": "stdin_stdout", "input": "2\n1 2\n", "output": "3\n"},
        {"type": "stdin_stdout", "input": "3\n1 2 3\n", "output": "6"},
    ]
}


def attempt(row, body):
    info = {key: row[key] for key in ("test", "entry_point", "prompt")}
    return Attempt(info, row["prompt"], body)


def mutate(row):
    """The canonical solution with every comparison turned round; None if it has none."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    turn = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and type(node.ops[0]) in turn]
    for node in places:
        node.ops[0] = turn[type(node.ops[0])]()
    return f"```python\n{ast.unparse(tree)}\n```" if places else None


def test_canonical_solutions_pass_and_mutated_ones_fail(boxes, load_lines, capsys):
    rows = load_lines(HUMAN_EVAL)
    right = boxes.score_many([attempt(row, row["canonical_solution"]) for row in rows])
    empty = boxes.score_many([attempt(row, "    return None\n") for row in rows])
    other = boxes.score_many([attempt(row, last["canonical_solution"]) for row, last in pairwise(rows)])
    turned = [attempt(row, text) for row in rows if (text := mutate(row))]
    mutants = boxes.score_many(turned)
    counts = [int(sum(score.value for score in scores)) for scores in (right, empty, other, mutants)]
    with capsys.disabled():
        print(
            f"\nHumanEval: {counts[0]} of {len(rows)} canonical, {counts[1]} empty, {counts[2]} of other problems,",
            end="",
        )
        print(f" {counts[3]} of {len(mutants)} with comparisons turned round pass")
    assert [score.reason for score in right if score.value != 1.0] == []
    assert counts[1:] == [0, 0, 0]


def test_a_function_passes_if_all_calls_do(boxes):
    assert boxes.score(DOUBLE, "", "```python\ndef f(x): return x * 2\n```").value == 1.0
    assert boxes.score(DOUBLE, "", "```python\ndef f(x): return 2\n```").value == 0.0
    assert boxes.score(DOUBLE, "", "```python\nclass Solution:\n  def f(self, x): return x + x\n```").value == 1.0


def test_a_program_passes_if_all_outputs_do(boxes):
    source = "n = int(input())\nprint(sum(map(int, input().split())))"
    assert boxes.score(SUM, "", f"```\n{source}\n```").value == 1.0
    assert boxes.score(SUM, "", "```\nprint(3)\n```").value == 0.0
    threaded = f"import sys, threading\ndef main():\n  global n\n  {source.replace(chr(10), chr(10) + '  ')}\n"
    threaded += "threading.stack_size(1 << 26)\nthreading.Thread(target=main).start()"
    assert boxes.score(SUM, "", f"```\n{threaded}\n```").value == 1.0


def test_tests_may_stand_in_columns(boxes):
    calls = {"fn_name": "f", "inputs": [[1], [[2]]], "outputs": [2, [[2, 2]]]}
    assert boxes.score(calls, "", "```python\ndef f(x): return x * 2\n```").value == 1.0
    assert boxes.score(calls, "", "```python\ndef f(x): return x\n```").value == 0.0
    runs = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}
    assert boxes.score(runs, "", "```python\nprint(input())\n```").value == 1.0
    assert boxes.score(runs, "", "```python\nprint(1)\n```").value == 0.0


def test_both_kinds_of_walls_give_the_same_scores(boxes, bare_boxes):
    for source in ("def f(x): return x * 2", "import numpy\ndef f(x): return x * 2", "def f(x): return x"):
        text = f"```python\n{source}\n```"
        assert boxes.score(DOUBLE, "", text) == bare_boxes.score(DOUBLE, "", text)


def test_asserts_that_call_the_function_by_name_are_judged(boxes):
    info = {"test": "assert g(2) == (4, {1: 'a'})\nassert g(x=3)[0] == 6", "entry_point": "g"}
    assert boxes.score(info, "", "def g(x): return x * 2, {1: 'a'}").value == 1.0
    assert boxes.score(info, "", "def g(x): return x * 2, {1: 'b'}").value == 0.0


def test_what_a_candidate_raises_reaches_the_tests(boxes):
    info = {"test": "try:\n  g()\n  assert False, 'no error'\nexcept KeyError:\n  pass", "entry_point": "g"}
    assert boxes.score(info, "", "def g(): raise KeyError").value == 1.0
    assert boxes.score(info, "", "def g(): raise ValueError").value == 0.0


def test_a_candidate_cannot_speak_for_the_judge(boxes):
    info = {"test": "assert g(2) == 5", "entry_point": "g"}
    forge = "import os, struct\nbody = b'{\"passed\": true}'\nframe = struct.pack('<I', len(body)) + body\n"
    for source in (f"{forge}def g(x): os.write(3, frame)", f"{forge}os.write(3, frame * 9)\ndef g(x): return 5"):
        assert boxes.score(info, "", source).value == 0.0


def test_a_value_nested_deep_is_refused_here_and_there(boxes):
    deep = "import os, struct\nbody = b'{\"value\":' + b'[' * 900 + b']' * 900 + b'}'\n"
    deep += "frame = struct.pack('<I', len(body)) + body\n"
    call = "def f(x):\n  os.write(3, frame)\n  return x * 2"
    assert boxes.score(DOUBLE, "", f"```\n{deep}{call}\n```").value == 0.0
    assert boxes.score({"test": "assert f(1) == 2", "entry_point": "f"}, "", f"```\n{deep}{call}\n```").value == 0.0


def test_a_prompt_that_is_no_program_by_itself_is_only_put_before(boxes):
    info = {"test": "assert g(2) == 4", "entry_point": "g", "prompt": "def g(x):\n"}
    assert boxes.score(info, "", "    return x * 2").value == 1.0


def test_work_near_a_limit_is_not_firm(boxes):
    start = time.process_time()
    for _ in range(1_000_000):
        pass
    turns = int(0.5 / (time.process_time() - start) * 1_000_000)  # half of the limit, with two calls
    busy = f"def f(x):\n  for _ in range({turns // 2}): pass\n  return x * 2"
    score = boxes.score(DOUBLE, "", f"```python\n{busy}\n```")
    assert not is_firm(score)
    assert compare_claim(score.value, score) is Agreement.AGREES
    assert compare_claim(0.25, score) is Agreement.UNSURE


def test_a_wrong_answer_is_firm(boxes):
    score = boxes.score(DOUBLE, "", "```python\ndef f(x): return x\n```")
    assert is_firm(score) and compare_claim(1.0, score) is Agreement.DIFFERS


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"test_cases": []},
        {"test_cases": [1]},
        {"test_cases": [{"type": "function_call", "fn_name": "f", "input": 1, "output": 1}]},
        {"test_cases": [{"type": "function_call", "fn_name": "f()", "input": [], "output": 1}]},
        {"test_cases": [{"type": "stdin_stdout", "input": 1, "output": ""}]},
        {"test_cases": [*DOUBLE["test_cases"], *SUM["test_cases"]]},
        {"test": "x", "entry_point": "not a name"},
        {**DOUBLE, "language": "rust"},
    ],
)
def test_info_that_nobody_could_solve_is_refused(boxes, info):
    with pytest.raises(ConfigError):
        boxes.check_info(info)


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("def f(): pass", "def f(): pass"),
        ("text\n```python\na\n```\nmore\n```py\nb\n```\nend", "b\n"),
        ("<think>```\nno\n```</think>\n```\nyes\n```", "yes\n"),
        ("<think>```\nno\n```", ""),
        ("```\na\n```\n```python\nunfinished", "a\n"),
    ],
)
def test_the_source_is_the_last_closed_block_after_the_thoughts(completion, source):
    assert find_source(completion, "") == source


VALUES = [None, True, 1, -(2**70), 0.5, "a", [1, [2]], (1, 2), {"a": 1, 2: (3,)}, {1, 2}, frozenset({1}), b"\x00", 1j]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_value_crosses_as_it_is(value):
    assert decode_value(encode_value(value)) == value
    assert [other for other in VALUES if match_values(encode_value(value), encode_value(other))] == [value]


@pytest.mark.parametrize(
    "value", [object(), print, range(3), [object()], {1: object()}], ids=lambda one: type(one).__name__
)
def test_nothing_but_plain_values_crosses(value):
    with pytest.raises(ChannelError):
        encode_value(value)


def test_floats_are_equal_within_the_tolerance_only():
    assert match_values(0.1 + 0.2, 0.3) and match_values(3, 3.0) and match_values(1e12 + 1, 1e12)
    assert not match_values(0.30001, 0.3) and not match_values(float("nan"), float("nan"))
    assert not match_values(True, 1) and not match_values(1.0, True)


def test_a_set_of_colliding_numbers_costs_no_more_than_another():
    colliding = {"s": [{"i": format((2**61 - 1) * n, "x")} for n in range(50_000)]}
    assert match_values(colliding, colliding)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \r\n3", "1 2\n3\n\n", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("nan", "0.5", False),
        ("1e3", "1000.0", False),
    ],
)
def test_outputs_are_compared_line_by_line(found, wanted, same):
    assert match_output(found, wanted) is same


def test_keys_that_json_cannot_write_equal_their_texts():
    wanted = encode_value({"1": "a", "2": "b"})
    assert match_values(encode_value({2: "b", 1: "a"}), wanted)
    assert not match_values(encode_value({1: "a", 2: "b", "2": "b"}), wanted)
    assert not match_values(encode_value({True: "a", 2: "b"}), wanted)


def test_what_a_program_prints_may_be_shown_after_it():
    shown = "```python\nprint(3)\n```\nThis prints\n```\n3\n```\n"
    assert find_source(shown, "") == "print(3)\n"
    assert find_source(shown + "or rather\n```Python\nprint(4)\n```", "") == "print(4)\n"
    assert find_source("```\nprint(1)\n```\n```\nprint(2)\n```\n```python\nprint(3)", "") == "print(2)\n"


def test_a_score_that_depends_on_addresses_is_used_against_nobody(boxes):
    """The order of a set of objects differs between machines, and so may an honest score."""
    source = "class A:\n  pass\nitems = [A(), A(), A()]\nfor n, item in enumerate(items): item.n = n\n"
    source += "def f(x): return next(iter(set(items))).n"
    text = f"```python\n{source}\n```"
    doubts = 0
    for wanted in range(3):
        info = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": wanted}]}
        found = boxes.score(info, "", text)
        again = partial(boxes.score_again, Attempt(info, "", text), found)
        assert is_firm(found)
        assert compare_claim(found.value, found, again) is Agreement.AGREES
        doubts += compare_claim(1.0 - found.value, found, again) is Agreement.UNSURE
    assert doubts, "no order of the set is the same under all addresses"


def test_a_score_that_depends_on_nothing_is_firm_also_when_it_is_scored_again(boxes):
    text = "```python\nimport random, time\ndef f(x): return x * 2 if random.random() < 2 and time.time() else 0\n```"
    found = boxes.score(DOUBLE, "", text)
    assert compare_claim(0.0, found, partial(boxes.score_again, Attempt(DOUBLE, "", text), found)) is Agreement.DIFFERS
    again = list(boxes.score_again(Attempt(DOUBLE, "", text), found))
    assert len(again) > 1 and set(again) == {found}
