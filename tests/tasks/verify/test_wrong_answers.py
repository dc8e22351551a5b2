"""Answers of a different value or form than the one asked for score 0; correct ones of the same kind score 1."""

import hashlib
from fractions import Fraction

import pytest

from shoal.sandbox.programs.algebra import compare_trees
from shoal.tasks.verify.base import is_firm
from shoal.tasks.verify.math.form import find_canon, read_question
from shoal.tasks.verify.math.parse import list_symbols, parse_answer
from shoal.tasks.verify.math.verifier import MathVerifier


@pytest.fixture(scope="module")
def judge():
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def box(judge, gold, answer, prompt=""):
    return judge.score({"answer": gold}, prompt, f"so it is \\boxed{{{answer}}}").value


WORDS = """
twelfths quadrillion doubled tripled squared cubed factorial googol lakh crore myriad pairs couple halved inverted
negated ninths hundredths trillionths fold modulo prime k K M B bn mil mill pct bp permille ppm x i kilo mega deci
dozens scores reciprocal bits bytes hex binary octal bags boxes quarters dimes nickels pennies crates tens hundreds
point
"""
PHRASES = [
    *("per cent", "out of 10", "to the power of 2", "over two", "of six", "point five", "and a half", "or more"),
    *("at least", "per thousand", "per mille", "times two", "less than ten", "raised to three", "to one", "a dozen"),
    *("apples more than six", "per dozen apples", "thousand dollars", "a hundred apples", "dollars million"),
    *("dozen eggs", "million people", "pairs of shoes", "boxes of apples", "apples times six", "half apples"),
]
SQUARE = "Factor $x^2+2x+1$."
QUOTIENT = r"Simplify $\frac{x^2-1}{x-1}$."
ROOT = r"Simplify $\sqrt{12}$."
SALE = "A shirt of $50 is 20% off. How much is it now?"
WRONG = [
    # integers and rationals are exact
    *((r"2^{200}-1", other, "") for other in (r"2^{200}", r"2^{200}-2", r"2^{200}-1+10^{-60}", r"4^{100}")),
    *((r"100!", other, "") for other in ("100!-1", "100!+1", "100 * 98!")),
    *((r"\frac{1}{2^{400}}", other, "") for other in ("0", r"\frac{1}{2^{401}}", r"-\frac{1}{2^{400}}", "10^{-130}")),
    *(("1/3", other, "") for other in ("0.333333333333", "0.3333", "33/100", "33.3333%")),
    *(("72", other, "") for other in ("72.0000000000000000000000001", "71.9999999", r"7.2\times10^2", "72/1")),
    ("0.3333", "1/3", ""),
    ("x+1", r"x+1+\frac{x}{10^{90}}", ""),
    ("x^2", r"x^2+\frac{1}{2^{500}}", ""),
    # what is not rational differs by more than rounding
    *((r"\sqrt{2}", other, "") for other in (r"\sqrt{2}+10^{-200}", r"\sqrt{2}+10^{-900}", r"\sqrt{2}+10^{-9000}")),
    (r"\sqrt{2}", r"\sqrt{2+10^{-120}}", ""),
    (
        r"\sqrt{2}",
        "1.4142135623730950488016887242096980785696718753769480731766797379907324784621070388503875343276415",
        "",
    ),
    (r"\pi", r"\frac{355}{113}", ""),
    (r"\pi", "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534", ""),
    ("e^{x}", "e^x+10^{-500}", ""),
    ("3.14", r"\pi", ""),
    # not defined
    ("x+1", r"x+1+\frac{1}{0}", ""),
    (r"\sqrt{2}", r"\frac{\sqrt{2}}{\sqrt{2}-\sqrt{2}}", ""),
    # equal at some points only
    ("10-x", "|x-10|", ""),
    ("10-x", r"\sqrt{(x-10)^2}", ""),
    ("10-x", "|x-10^{99}|+10-10^{99}", ""),
    (r"\sqrt{x}", r"\sqrt{x}+\sqrt{(x-10^{150})^2}+x-10^{150}", ""),
    ("x", r"\sqrt{x^2}", ""),
    # an exact term that would be lost in one that is not exact
    *((r"\sqrt{2}+2^{200}", rf"\sqrt{{2}}+2^{{200}}+{term}", "") for term in ("2^{-9000}", "2^{-6300}", "3^{-5000}")),
    (r"\sqrt{2}+2^{200}", r"\sqrt{2+2^{-9000}}+2^{200}", ""),
    (r"2^{1/3}+2^{10}", r"2^{1/3+2^{-9000}}+2^{10}", ""),
    # a different unit than the question asks for
    *(
        ("12", f"12 {unit}", "How fast, in km per hour, did he drive?")
        for unit in ("mph", "km", "m/s", "miles per hour")
    ),
    *(("12", f"12 {unit}", "How many miles per hour did she drive?") for unit in ("km per hour", "kmh", "miles")),
    *(("12", f"12 {unit}", "How many square feet is it?") for unit in ("feet", "feet^3", "square meters")),
    *(("12", f"12 {unit}", "What is the perimeter in cm?") for unit in ("cm^2", "square cm", "cubic cm")),
    *(("7", f"7 {unit}", "How many times did it ring?") for unit in ("seconds", "days", "mph")),
    ("12", "12 eggs", "How many dozen eggs did she buy?"),
    ("5", "5 people", "How many thousand people live there?"),
    ("$5", "$5 per hour", "She worked for two hours. How much did she earn in total?"),
    ("12", "12 apples per child", "How many apples are there in total?"),
    ("5", "5 hours", "How many minutes does it take?"),
    ("5", "5 cents", "Each costs $2. How much is it?"),
    ("5", "5 km", "What is the length in meters?"),
    ("5", "5 grams", "How many kilograms does it weigh?"),
    ("5", "5 cents", "How many pages does she read?"),
    ("5", "5 hours", "How many pages does she read?"),
    ("5", "5 kg", "What is the perimeter?"),
    # a percent sign is a division by 100
    ("40", r"40\%", SALE),
    ("10", r"10\%", "What is 20 percent of 50?"),
    ("50", "50 percent", "60% of the 100 students passed. How many did not?"),
    ("25", r"25\%", "The price rose 25 percent. How many dollars is that?"),
    ("25", r"2500\%", "What percent of them are blue?"),
    ("25", "0.25", "What percent of 8 is 2?"),
    ("25%", "25", "What is the probability?"),
    ("0.5%", "0.5", ""),
    ("50%", "0.5%", "What percent is it?"),
    # the question itself, where it was to be rewritten
    *(("(x+1)^2", other, SQUARE) for other in ("x^2+2x+1", "x(x+2)+1", "1+x(2+x)", "(x^2+2x+1)^1")),
    ("(x-1)(x+1)", "x^2-1", "Factor x^2-1 completely."),
    ("2(x+1)(x-1)", "(2x+2)(x-1)", "Factorise $2x^2-2$."),
    *(("x^2+2x+1", other, "Expand $(x+1)^2$.") for other in ("(x+1)^2", "(x+1)(x+1)", "x(x+2)+1")),
    ("x^2+2x+1", "x^2+x+x+1", "Expand and simplify $(x+1)^2$."),
    *(("x+1", other, QUOTIENT) for other in (r"\frac{x^2-1}{x-1}", r"\frac{(x-1)(x+1)}{x-1}", "(x^2-1)(x-1)^{-1}")),
    ("5x", "2x+3x", "Simplify 2x+3x."),
    ("x^2", r"x\cdot x", "Simplify x * x"),
    *((r"2\sqrt{3}", other, ROOT) for other in (r"\sqrt{12}", "12^{1/2}", r"\sqrt{4*3}", r"\frac{\sqrt{48}}{2}")),
    (r"2\sqrt{3}", r"\sqrt{12}", r"What is $\sqrt{12}$?"),
    (r"2\sqrt{3}", r"\sqrt{12}", r"Write sqrt(12) in simplest radical form."),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", r"Rationalize the denominator of $\frac{1}{\sqrt2}$."),
    (r"\ln 8", r"\ln 2+\ln 4", r"Simplify $\ln 2+\ln 4$."),
    (r"\frac34", r"\frac68", r"Simplify $\frac{6}{8}$."),
    ("3/4", "6/8", "Reduce 6/8 to lowest terms."),
    ("3/4", "6/8", "What is 6/8?"),
    ("3/4", "12/16", "Express your answer as a common fraction."),
    (r"2\sqrt{3}", r"\sqrt{12}", "Find the value of sqrt(12) as it is known."),
    ("x^2+3x+2", "(x+2)(x+1)", "Find (x+1)(x+2)."),
    ("x^2+3x+2", "x(x+2)+(x+2)", "Multiply $(x+1)(x+2)$."),
    ("(x+1)(x+2)", "x(x+3)+2", "Write $x^2+3x+2$ as a product of two binomials."),
    ("(x+1)^2+2", "x^2+2x+3", "Write $x^2+2x+3$ in the form $(x+a)^2+b$."),
    ("x-3", r"\frac{x^2-5x+6}{x-2}", "Divide $x^2-5x+6$ by $x-2$."),
    ("x-3", "(x^2-5x+6)(x-2)^{-1}", ""),
    # an expression of the question in another spelling, whatever the words around it
    *(("x^2+3x+2", other, "Find $(x+1)(x+2)$.") for other in ("(x+1)(x+2)+0", "(x+1)(x+2)x^0", "(x+1)(2x+4)/2")),
    *(("4x", f"(x+1)^2-(x-1)^{other}", "What is $(x+1)^2-(x-1)^2$?") for other in ("2+0", "2+x-x")),
    ("4x", "(x+1)^2-(1-x)^2", "What is $(x+1)^2-(x-1)^2$?"),
    *(("6x", other, "What is 2x + 4x?") for other in ("2x+4x+0", "2(x+2x)", "x+5x", "1x+1x+4x")),
    (r"3+2\sqrt2", r"(1+\sqrt2)(1+\sqrt2)", r"Compute $(1+\sqrt2)^2$."),
    (r"5\sqrt2", r"\sqrt{8}+\sqrt{18}+0", r"Calculate $\sqrt{8}+\sqrt{18}$."),
    (r"2\sqrt{3}", r"\sqrt{12}+0", r"What is $\sqrt{12}$?"),
    # not evaluated
    (r"\frac{\sqrt3}{2}", r"\sin(\frac{\pi}{3})", r"Evaluate $\sin(\pi/3)$."),
    (r"\frac{\pi}{4}", r"\arctan(1)", ""),
    (r"6\sqrt2", r"2\cdot3\sqrt2", ""),
    (r"1024\sqrt2", r"2^{10}\sqrt2", ""),
    (r"6\pi", r"3!\pi", ""),
    # not written as asked for
    ("0.75", "3/4", "Write 3/4 as a decimal."),
    ("3/4", "0.75", "Write 0.75 as a fraction."),
    ("0.75", r"75\%", "Convert 75% to a decimal."),
    (r"4.5\times10^3", "4500", "Write 4500 in scientific notation."),
    (r"2\frac12", "5/2", "Write 5/2 as a mixed number."),
    # not a number, or not the same one
    *(("5", other, "") for other in ("5i", "5e", "5^1", "5/1", "10/2", "V", "five", "5?", "5-ish", "<5", "5+", "5:00")),
    *(("(1,2)", other, "") for other in ("(1,2,3)", "(1, 2.0000001)", "[1,2)")),
    (r"(2,\infty)", "(2,10^{99})", ""),
]
RIGHT = [
    ("(x+1)^2", "(1+x)^2", SQUARE),
    ("(x+1)^2", "(x+1)(x+1)", SQUARE),
    ("(x-1)(x+1)", "-(1-x)(x+1)", "Factor x^2-1 completely."),
    ("x^2+2x+1", "1+2x+x^2", "Expand $(x+1)^2$."),
    (r"2\sqrt{3}", r"2\sqrt3", ROOT),
    (r"2\sqrt{3}", r"\sqrt{3}\cdot2", ROOT),
    (r"2\sqrt{3}", r"\sqrt{12}", ""),
    (r"\frac{3x}{4}", r"\frac34x", r"Simplify $\frac{6x}{8}$."),
    (r"\frac{3x}{4}", "0.75x", r"Simplify $\frac{6x}{8}$."),
    (r"\frac{1}{x^2}", "x^{-2}", "Simplify x/x^3."),
    (r"\frac{\pi}{4}+\frac{\ln2}{2}", r"\frac{\pi+2\ln 2}{4}", "Evaluate the integral."),
    ("3/4", r"\frac34", "Simplify 6/8."),
    ("3/4", "6/8", ""),
    ("3/4", "0.75", "What is the probability?"),
    ("25", r"25\%", "What percentage of them are blue?"),
    ("25%", "25", "What percent of them are blue?"),
    ("20", r"20\%", "What is the percentage increase?"),
    ("0.25", "25%", ""),
    ("5", "5 zorbs", "How many zorbs are there?"),
    ("5", "5 boxes", "How many boxes does he need?"),
    ("5", "5 pairs of shoes", "How many pairs of shoes has she?"),
    ("5", "5 hours", "How many hours does it take?"),
    ("5", "5 dollars", "It costs $3. How much are two?"),
    ("60", "60 mph", "How many miles per hour is that?"),
    ("60", "60 miles per hour", "What is its speed?"),
    ("5", "5 more apples", "How many more apples does he need?"),
    ("5", "5 hours", "It lasts from 8 am to 1 pm. How long is that?"),
    ("60", "60 degrees", "What is the angle?"),
    ("12", "12 square units", "What is the area?"),
    ("5", "5 years old", "How old is he?"),
    ("5", "5 cookies left", ""),
    ("5", "5 cups of flour", ""),
    ("5", "5 mL", ""),
    ("$5", "$5 every day", "How much does she earn every day?"),
    ("5", r"\$5 \text{ per day}", "How much does she earn a day?"),
    ("60", "60 km/h", "What is its speed?"),
    ("60", "60 kilometers per hour", "How fast is it in km/h?"),
    ("60", "60 feet", "It fell at 30 feet per second for 2 seconds. How far did it fall?"),
    ("50", "50 m^2", "A yard is 10 m by 5 m. What is its area?"),
    ("12", "12 dozen eggs", "How many dozen eggs did she buy?"),
    ("7", "7 times", "How many times did it ring?"),
    *(("1/2", other, "") for other in ("\u00bd", r"\left(\frac12\right)", "(1)/(2)", "(1/2)")),
    *(("-1/2", other, "") for other in (r"\frac{1}{-2}", "(-1)/2", r"\left(-\frac{1}{2}\right)", "-\u00bd")),
    ("5/2", "2\u00bd", ""),
    *((r"\{1,2\}", other, "") for other in ("1 and 2", r"1 \text{ or } 2", "2, and 1")),
    ("4x", "x * 4", "What is $(x+1)^2-(x-1)^2$?"),
    (r"2x(3x-1)", "6x^2-2x", "Find the derivative of $2x^3-x^2$."),
    ("5", r"5\text{ cm}^2", ""),
    ("2^{100}", "1267650600228229401496703205376", ""),
    ("2^{100}", "4^{50}", ""),
    ("100!", "100 * 99!", ""),
    (r"\frac{1}{2^{400}}", "4^{-200}", ""),
    (r"\frac{\sqrt3}{2}", r"\sqrt{\frac34}", ""),
    (r"\tan x", r"\frac{\sin x}{\cos x}", ""),
    (r"\ln 8", r"3\ln2", ""),
    (r"\frac{1}{2}\ln 2", r"\ln\sqrt{2}", ""),
    ("e^2", r"\exp(2)", ""),
    ("x^{100}", "x^{50}x^{50}", ""),
    (r"2^{2000}\sqrt{3}", r"\sqrt{3} * 4^{1000}", ""),
]
AROUND = [
    *(r"$-\boxed{5}$", r"= -\boxed{5}", r"2\boxed{5}", r"\frac{\boxed{5}}{2}", r"\frac{1}{\boxed{5}}", r"\boxed{5}^2"),
    *(r"\boxed{5}/2", r"\boxed{5}00", r"\boxed{5} million", r"$\boxed{5}$ million", r"\boxed{5}\%", r"$\boxed{5}$%"),
    *(r"\boxed{5} percent", r"\boxed{5}\times 10^3", r"$\boxed{5}!$", r"\sqrt{\boxed{5}}", r"\boxed{5}\text{ million}"),
    *(r"\boxed{5} twelfths", r"\boxed{5}.5", r"\boxed{5} + 1", r"x \neq \boxed{5}", r"3 - \boxed{5}", r"\pm\boxed{5}"),
    *("The answer is 5\nmillion", "#### 5\nmillion", "\\boxed{5}\nthousand", "#### 5%", "The answer is 5 percent."),
    *(
        r"\boxed{5}\,\%",
        r"\boxed{5}~\%",
        r"\boxed{5}\,000",
        r"\boxed{5}{,}000",
        r"\boxed{5}~million",
        "\\boxed{5}\n\nmillion",
    ),
    *(
        r"\boxed{5}\;\mathrm{thousand}",
        r"\boxed{5}\ \text{ million}",
        r"$\boxed{5}\cdot10^3$",
        r"$\boxed{5}$ $\times 10^3$",
    ),
    *(
        r"-(\boxed{5})",
        r"$-$ $\boxed{5}$",
        r"\text{-}\boxed{5}",
        r"-**\boxed{5}**",
        r"2 x \boxed{5}",
        r"(\boxed{5}, 6)",
    ),
    *(
        r"\boxed{5}\cdots",
        r"\boxed{5}.\overline{3}",
        r"\boxed{5}\cup 6",
        r"\boxed{5}:6",
        r"\boxed{5} (mod 7)",
        r"\boxed{5} x 10^3",
    ),
    *(r"\boxed{5},000", r"x\boxed{5}", r"x > \boxed{5}", r"\boxed{5} \cdot 3", r"\boxed{5} halves", r"not \boxed{5}"),
]
BESIDE = [
    *(
        r"\boxed{5}",
        r"$\boxed{5}$",
        r"$$\boxed{5}$$",
        r"\[\boxed{5}\]",
        r"\(\boxed{5}\).",
        r"x = \boxed{5}.",
        r"**\boxed{5}**",
    ),
    *(
        r"- \boxed{5}",
        r"Answer - $\boxed{5}$",
        r"\boxed{5} apples were left",
        r"$\boxed{5}$ apples",
        r"\boxed{5} - done",
    ),
    *(
        r"\implies \boxed{5}",
        r"\text{so }\boxed{5}",
        r"(\boxed{5})",
        r"is \boxed{5}!",
        r"=>\boxed{5}",
        r"&= \boxed{5} \\",
    ),
    *(r"Then, \boxed{5} and the rest", r"2 + 3 = \boxed{5}", r"\boxed{5} (see above)", r"<answer>\boxed{5}</answer>"),
    *(
        r"\boxed{5}\text{ apples}",
        r"\boxed{5} \implies x < 6",
        r"$\boxed{5}$ \textbf{Done}",
        r"\boxed{5}\;\blacksquare",
        r"\boxed{5}\,.",
        r"> \boxed{5}",
        r"1. \boxed{5}",
        "\\begin{align}\nx&=\\boxed{5}\n\\end{align}",
    ),
]


@pytest.mark.parametrize("words", [*WORDS.split(), *PHRASES])
def test_a_number_with_words_that_are_not_known_is_another_answer(judge, words):
    assert box(judge, "5", f"5 {words}") == 0.0
    assert (
        box(judge, "5", rf"5\text{{ {words}}}", "They doubled it twice. How many apples are in the dozen boxes?") == 0.0
    )


@pytest.mark.parametrize(("gold", "answer", "prompt"), WRONG)
def test_another_value_or_form_scores_nothing(judge, gold, answer, prompt):
    score = judge.score({"answer": gold}, prompt, f"so it is \\boxed{{{answer}}}")
    assert score.value == 0.0 and is_firm(score), score.reason


@pytest.mark.parametrize(("gold", "answer", "prompt"), RIGHT)
def test_the_same_value_in_an_allowed_form_scores(judge, gold, answer, prompt):
    assert box(judge, gold, answer, prompt) == 1.0


@pytest.mark.parametrize("text", AROUND)
def test_what_touches_a_box_belongs_to_the_answer(judge, text):
    assert judge.score({"answer": "5"}, "", text).value == 0.0


@pytest.mark.parametrize("text", BESIDE)
def test_sentences_around_a_box_do_not_belong_to_the_answer(judge, text):
    assert judge.score({"answer": "5"}, "", text).value == 1.0


def test_a_percent_sign_after_a_box_counts(judge):
    assert judge.score({"answer": "50%"}, "", r"\boxed{50}\%").value == 1.0
    assert judge.score({"answer": "60^\\circ"}, "", r"$\boxed{60}^\circ$").value == 1.0


def test_an_answer_cannot_be_right_at_chosen_points_only(judge):
    """The points of an earlier version were the same for all answers, so an answer could vanish exactly there."""
    digests = [hashlib.sha256(f"x {number}".encode()).digest() for number in range(6)]
    points = [Fraction(int.from_bytes(digest[:4], "big") | 1, 1 << 30) for digest in digests]
    signs = ["+" if number % 3 == 2 else "-" for number in range(6)]
    factors = "".join(
        f"(x{sign}{point.numerator / point.denominator:.30f})" for sign, point in zip(signs, points, strict=True)
    )
    assert box(judge, "x+1", f"x+1+{factors}") == 0.0


@pytest.mark.parametrize(
    ("left", "right"), [("1+x", "x+1"), ("a/b", r"\frac{a}{b}"), ("-(b-a)", "a-b"), ("x * y", "y * x")]
)
def test_order_and_spelling_do_not_matter_for_a_form(left, right):
    assert find_canon(parse_answer(left)) == find_canon(parse_answer(right))


@pytest.mark.parametrize(
    ("left", "right"), [("2x", "x+x"), ("x^2", "x * x"), ("6/8", "3/4"), ("2(x+1)", "2x+2"), ("x^1", "x")]
)
def test_nothing_is_computed_for_a_form(left, right):
    assert find_canon(parse_answer(left)) != find_canon(parse_answer(right))


@pytest.mark.parametrize(
    ("prompt", "asks"),
    [
        ("What percent of them?", True),
        ("Find the percentage of boys.", True),
        ("Write it as a percent.", True),
        ("By what percentage did it rise?", True),
        ("what % is that", True),
        ("What is 20 percent of 50?", False),
        ("It rose by 5%. How much is it?", False),
        ("If 20% leave, how many stay?", False),
        ("", False),
    ],
)
def test_a_question_asks_for_a_percentage_only_where_it_says_so(prompt, asks):
    assert read_question(prompt).asks_percent is asks


def test_exact_values_have_no_tolerance():
    def equal(left, right):
        trees = parse_answer(left), parse_answer(right)
        return compare_trees(*trees, sorted(list_symbols(trees[1])))

    assert equal("8^{1/3}", "2") and equal(r"\sqrt{\frac{4}{9}}", r"\frac{2}{3}")
    assert not equal("10^{1000}+1", "10^{1000}") and not equal("10^{-1000}", "0")
    assert equal(r"\sqrt{2}\sqrt{2}", "2") and not equal(r"\sqrt{2}\sqrt{2}", "2+10^{-300}")
