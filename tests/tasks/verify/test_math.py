"""Right answers in every usual form, wrong ones, and tricks: only the one right answer scores."""

import random
import string
import time

import pytest

from shoal.errors import ConfigError
from shoal.sandbox import pool
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.programs.algebra import compare_trees
from shoal.tasks.verify.base import is_firm, score_safely
from shoal.tasks.verify.math import verifier as module
from shoal.tasks.verify.math.clean import clean_answer
from shoal.tasks.verify.math.parse import parse_answer
from shoal.tasks.verify.math.verifier import MathVerifier

GSM8K = "gsm8k_train_2000.jsonl"


@pytest.fixture(scope="module")
def judge():
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def box(judge, gold, answer, prompt=""):
    return judge.score({"answer": gold}, prompt, f"so it is \\boxed{{{answer}}}")


def test_gold_solutions_of_gsm8k_are_right_and_perturbed_ones_wrong(judge, load_lines, capsys):
    rows, right, boxed, wrong, num_wrongs = load_lines(GSM8K), 0, 0, [], 0
    for row in rows:
        work, _, gold = row["answer"].rpartition("####")
        info, value = {"answer": gold.strip()}, int(gold.replace(",", ""))
        right += judge.score(info, row["question"], row["answer"]).value
        boxed += judge.score(info, row["question"], f"{work}\\boxed{{{value}}}").value
        others = {
            value + 1,
            value - 1,
            value * 10 or 10,
            -value or 1,
            f"{value}.5",
            f"{value}{value or 1}",
            f"{value + 1}/7",
        }
        wrongs = [
            *(f"{work}#### {other}" for other in others),
            f"{row['answer']}\n#### {value + 1}",
            work,
            f"{work}#### ",
        ]
        wrong += [text for text in wrongs if judge.score(info, row["question"], text).value]
        num_wrongs += len(wrongs)
    with capsys.disabled():
        print(
            f"\nGSM8K, scored: {right:.0f} of {len(rows)} gold solutions, {boxed:.0f} of {len(rows)} with a box,",
            end=" ",
        )
        print(f"{len(wrong)} of {num_wrongs} perturbed")
    assert wrong == []
    assert right == boxed == len(rows)


RIGHT = [
    ("72", "72"),
    ("72", "72.0"),
    ("1080", "1,080"),
    ("1080", "1{,}080"),
    ("1080", r"1,\!080"),
    ("0.5", r"\frac{1}{2}"),
    ("0.5", r"\dfrac12"),
    ("1/2", "0.50"),
    ("2.5", r"2\frac{1}{2}"),
    ("2.5", "2 1/2"),
    ("1500", r"1.5\times10^3"),
    ("-3", "\u22123"),
    ("-1/2", r"\frac{-1}{2}"),
    ("50%", r"50\%"),
    ("50%", "0.5"),
    ("0.5", "50%"),
    ("5 cm", r"5\text{ cm}"),
    ("5", "5 cm"),
    ("5", "5 apples"),
    ("5 apples", "5"),
    ("5 apples", r"5\text{ apples}"),
    ("5", r"5 \text{ red marbles}"),
    ("5", "5 apples in total"),
    ("5 cm", "5"),
    ("$5", "5 dollars"),
    ("5", r"\$5.00"),
    ("60 mph", "60 miles per hour"),
    ("12 square feet", r"12 \text{ ft}^2"),
    ("90^\\circ", "90"),
    ("[1,2)", "[1, 2)"),
    (r"(-\infty, 3]", r"\left(-\infty,3\right]"),
    (r"[1,2]\cup[3,4]", r"[3,4] \cup [1,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2,1"),
    ("(1,2)", "(1, 2)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\pi}{4}", r"\pi/4"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sin^2 x", r"1-\cos^2(x)"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"3\pm\sqrt{2}", r"3-\sqrt2, 3+\sqrt2"),
    (r"\log 100 + \sqrt2", r"2+\sqrt{2}"),
    ("x_1+x_2", "x_2+x_1"),
    (r"3!\sqrt2", r"6\sqrt2"),
    (r"2\sqrt{3}", "2\u221a3"),
    (r"2\sqrt{3}", r"2\sqrt{3} \text{ units}"),
    (r"3\pi \text{ cm}^2", r"3\pi"),
    (r"3\pi \text{ cm}^2", r"3\pi \text{ square centimeters}"),
    ("[0,100]", "[0, 100]"),
    (r"\{100,200\}", r"\{200, 100\}"),
    (r"\frac{1,000\pi}{3}", r"\frac{1000\pi}{3}"),
    ("10^{-60}", "100^{-30}"),
    ("12 square feet", "12 ft\u00b2"),
    ("x^2+1", "x\u00b2 + 1"),
    ("A", "(A)"),
    ("Monday", r"\text{Monday}"),
]
WRONG = [
    ("72", "73"),
    ("72", "7 2"),
    ("5 cm", "5 kg"),
    ("5", "5 dozen"),
    ("5", "5 thousand"),
    ("5", "5 apples or 6"),
    ("5", "5 halves"),
    ("5", "5 hundred apples"),
    ("5", "5 times eggs"),
    ("5 apples", "5 oranges"),
    ("5 cm", "5 apples"),
    ("6xyz", "6"),
    ("5", "5 sqrt"),
    ("5", "$5 million"),
    ("(0,100)", "100"),
    (r"3\pi \text{ cm}", r"3\pi \text{ kg}"),
    (r"3\pi", r"3\pi \text{ thousand}"),
    ("10^{-60}", "2^{-200}"),
    ("5", "5 plus eggs"),
    ("5", "5 if not six"),
    ("5", "5 apples and six pears"),
    ("0.5", "0.5%"),
    ("1080", "1,08"),
    ("1080", "10,80"),
    ("[1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("1,2", "1,2,2"),
    ("1,2", "1,1"),
    (r"\{1,2\}", "(1,2)"),
    (r"[1,2]\cup[3,4]", "[1,2]"),
    (r"2\sqrt{3}", "3.4641016"),
    (r"2\sqrt{3}", r"2\sqrt{3}+10^{-30}"),
    ("x+1", "x+1+0y"),
    ("x+1", "y+1"),
    ("x", r"\sqrt{x^2}"),
    ("x=5", "y=5"),
    ("A", "B"),
    ("Monday", "Monday or Tuesday"),
    (r"\frac{1}{x}", r"\frac{1}{0}"),
]
TRICKS = {
    "empty box": "",
    "blank box": " ",
    "only signs": r"\,",
    "a list with the answer": "70, 71, 72, 73",
    "a set with the answer": r"\{71, 72\}",
    "x or y": "72 or 73",
    "x or y in LaTeX": r"72 \text{ or } 73",
    "x and y": "72 and 73",
    "either": "x = 71 or x = 72",
    "range": "1-100",
    "interval": "[72, 72]",
    "an interval with the answer": "(0, 100)",
    "plus or minus": r"\pm 72",
    "inequality": r"x \ge 72",
    "chain": "72 = 73",
    "chain with itself": "72 = 72",
    "comparison chain": "71 < 72 < 73",
    "sum": "48 + 24",
    "product": r"36 \times 2",
    "quotient": "144/2",
    "quotient in LaTeX": r"\frac{144}{2}",
    "expression": "72 + 0x",
    "power": "72^1",
    "root": r"\sqrt{5184}",
    "factorial": "72!",
    "floor": r"\lfloor 72.5 \rfloor",
    "nan": "nan",
    "infinite": r"\infty",
    "inf": "inf",
    "wide digits": "\uff17\uff12",
    "arabic digits": "\u0667\u0662",
    "superscript": "7\u00b2",
    "underscore": "7_2",
    "python": "int('72')",
    "import": "__import__('os').system('true')",
    "hexadecimal": "0x48",
    "exponent": "7.2e1",
    "signs": "--72",
    "plus minus": "+-72",
    "a word": "the answer",
    "the word answer": "answer",
    "nested box": r"\boxed{72}",
    "question": "How many clips did Natalia sell altogether?",
    "not": "not 73",
    "almost": "72.0000000001",
    "dozens": "6 dozen",
    "wrong unit of a percentage": "7200 percentages",
    "too long": "72" + " " * 600 + "0",
    "nul": "72\x00",
    "zero width": "7\u200b2",
    "comment": "72 % 100",
    "text before": r"\text{not }72",
}
TEXTS = {
    "no answer": "I worked long on this. It may be 72",
    "several boxes": r"\boxed{71} \boxed{72}",
    "several boxes, right one last": r"\boxed{1} or \boxed{2} or \boxed{72}",
    "a box and hashes": "\\boxed{72}\n#### 71",
    "hashes twice": "#### 71\n#### 72",
    "every number": " ".join(f"\\boxed{{{n}}}" for n in range(100)),
    "only thoughts": r"<think>\boxed{72}</think>",
    "endless thoughts": r"<think>\boxed{72}",
    "open box": r"\boxed{72",
    "echo": "What is 72? The answer to the question is written above.",
    "two sentences": "The answer is 71. The answer is 72.",
    "hedged sentence": "The answer is 71 or 72.",
    "deep braces": "\\boxed{" * 5000 + "72" + "}" * 5000,
    "brackets": "\\boxed{" + "(" * 400 + "72" + ")" * 100 + "}",
    "too long": "x" * 70_000 + r"\boxed{72}",
}


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_a_right_answer_scores_in_any_usual_form(judge, gold, answer):
    assert box(judge, gold, answer).value == 1.0


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_wrong_answer_scores_nothing(judge, gold, answer):
    assert box(judge, gold, answer).value == 0.0


@pytest.mark.parametrize("answer", TRICKS.values(), ids=TRICKS)
def test_a_trick_scores_nothing(judge, answer):
    assert box(judge, "72", answer).value == 0.0


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_without_one_answer_scores_nothing(judge, text):
    assert score_safely(judge, {"answer": "72"}, "", text).value == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{72}",
        "#### 72",
        "work\n#### $72",
        r"First \boxed{72}, and again \boxed{72.0}.",
        r"<think>\boxed{71}</think> so \boxed{72}",
        "The final answer is 72.",
        "**Final Answer:** 72",
        "The answer is: $72$. I hope that helps",
        r"\fbox{72}",
    ],
)
def test_the_answer_is_found_where_people_write_it(judge, text):
    assert judge.score({"answer": "72"}, "", text).value == 1.0


def test_a_percentage_needs_no_sign_where_the_question_has_it(judge):
    assert box(judge, "50", r"50\%", "What percent of them are blue?").value == 1.0
    assert box(judge, "50", r"50\%", "How many of them are blue?").value == 0.0


BOMBS = [
    "10^{10^{10}}",
    "9^{9^{9^{9}}}",
    "1000000000!",
    "9!!!!!",
    r"\exp(\exp(\exp(\exp(9))))",
    r"\sqrt[10^{99}]{2}^{10^{99}}",
    r"\tan(10^{99})",
    "x^{x^{x^{x^{99}}}}",
    r"\frac{1}{10^{-99999}}",
    "(" * 30 + "x" + "^9)" * 30,
    "(x+1)^{99999}",
    "9" * 120 + "^{" + "9" * 120 + "}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_at_once_and_on_every_machine(judge, bomb):
    box(judge, r"\sqrt{x}", r"\sqrt{x}+0")  # start the sandbox before measuring
    start = time.monotonic()
    score = box(judge, r"\sqrt{2}+x-x", bomb)
    assert score.value == 0.0 and is_firm(score)
    assert time.monotonic() - start < 5.0


def test_a_comparison_that_does_not_end_is_stopped_and_inconclusive(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(
        "from shoal.sandbox.forkserver import Program, ProgramSet\nfrom shoal.sandbox.isolate import RUN_CODE\n"
        "def run(channel, job):\n  while True: pass\n"
        "PROGRAMS = ProgramSet(programs={'compare': Program(run)}, profile=RUN_CODE, warm_up=lambda: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_PROGRAMS", "endless")
    stuck = MathVerifier(limits=SandboxLimits(cpu_s=1, wall_s=3.0, memory_bytes=1 << 26))
    for _ in range(2):
        score = box(stuck, r"\sqrt{2}+x", r"x+\sqrt{2}")
        assert score.value == 0.0 and not is_firm(score)
    stuck.close()


def test_near_integers_are_no_integers():
    gold = parse_answer("262537412640768744")
    assert not compare_trees(parse_answer(r"\exp(\pi\sqrt{163})"), gold, [])
    assert compare_trees(parse_answer(r"\sqrt{262537412640768744^2}"), gold, [])


def test_no_text_makes_the_verifier_raise_or_take_long(judge):
    rng, pieces = random.Random(0), [*string.printable, r"\frac", r"\sqrt", r"\boxed{", "}", r"\pm", "####", "</think>"]
    start = time.process_time()
    for _ in range(400):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(80)))
        assert judge.score({"answer": "72"}, "", text + r"\boxed{" + text[:60] + "}").value == 0.0
        clean_answer(text)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("info", [{}, {"answer": ""}, {"answer": 72}, {"answer": "x" * 600}])
def test_info_without_an_answer_is_refused(judge, info):
    with pytest.raises(ConfigError):
        judge.check_info(info)


@pytest.mark.parametrize("line", [r"#### \boxed{42}", r"#### $\boxed{42}$.", r"#### **\boxed{42}**"])
def test_a_line_that_is_but_a_box_is_one_answer(judge, line):
    assert judge.score({"answer": "42"}, "", f"6 * 7\n{line}").value == 1.0
    assert judge.score({"answer": "42"}, "", f"6 * 7\n{line}\n#### 41").value == 0.0


@pytest.mark.parametrize("line", [r"#### 41 \boxed{42}", r"#### \boxed{42} 41", r"#### \boxed{42}\boxed{41}"])
def test_a_line_that_is_more_than_a_box_is_an_answer_of_its_own(judge, line):
    assert [judge.score({"answer": gold}, "", line).value for gold in ("41", "42")] == [0.0, 0.0]


def test_long_answers_beside_the_last_are_neither_read_nor_kept(judge):
    text = "\\boxed{42" + " " * 600 + "+ 1} \\boxed{42}"
    assert judge.score({"answer": "42"}, "", text).value == 0.0


def test_a_machine_without_boxes_refuses_tasks_that_need_one(monkeypatch):
    monkeypatch.setattr(pool, "_BOOT", "import sys; sys.platform = 'darwin'\n" + pool._BOOT)
    verifier = MathVerifier()
    verifier.check_info({"answer": "72"})
    verifier.check_info({"answer": "Monday"})
    verifier.check_info({"answer": "(B)"})
    with pytest.raises(ConfigError, match="available on Linux only"):
        verifier.check_info({"answer": r"2\sqrt{3}"})
