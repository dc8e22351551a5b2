"""Written arithmetic, worked by hand and attacked."""

import pytest

from shoal.tasks.base import build_task
from shoal.tasks.families.arithmetic import write_steps
from shoal.tasks.registry import load_family

ADDITION = build_task("arithmetic", "57+68=", {"left": 57, "operator": "+", "right": 68, "answer": "125"})


@pytest.mark.parametrize(
    ("left", "operator", "right", "steps"),
    [
        (57, "+", 68, "7+8+0=15,5+6+1=12"),
        (999, "+", 111, "9+1+0=10,9+1+1=11,9+1+1=11"),
        (0, "+", 0, "0+0+0=0"),
        (52, "-", 38, "2-8-0=4-10,5-3-1=1"),
        (100, "-", 100, "0-0-0=0,0-0-0=0,1-1-0=0"),
        (200, "-", 199, "0-9-0=1-10,0-9-1=0-10,2-1-1=0"),
        (57, "*", 8, "7*8+0=56,5*8+5=45"),
    ],
)
def test_columns_are_written_from_the_right(left: int, operator: str, right: int, steps: str) -> None:
    assert write_steps(left, operator, right) == steps


def test_demonstrations_end_in_the_answer() -> None:
    assert load_family("arithmetic", {}).demonstrate(ADDITION) == "7+8+0=15,5+6+1=12;125"
    assert load_family("arithmetic", {"steps": False}).demonstrate(ADDITION) == "125"


@pytest.mark.parametrize("completion", ["125", "7+8+0=99;125", "12;13;125", " 125 ", "x;\n125\n"])
def test_only_what_follows_the_last_semicolon_counts(completion: str) -> None:
    assert load_family("arithmetic", {}).score(ADDITION, completion).value == 1.0


@pytest.mark.parametrize(
    "attack",
    [
        "0125",  # leading zero: the answer is the plain decimal number
        "+125",
        "-125",
        "125.0",
        "1.25e2",
        "1_25",
        "1 25",
        "125 126",
        "125,126",
        "125;126",
        "125;",
        "0x7d",
        "57+68",
        "\u0661\u0662\u0665",  # Arabic-Indic digits
        "\uff11\uff12\uff15",  # full-width digits
        "\u00b9\u00b2\u2075",  # superscripts
        "125\u200b",  # zero-width space
        "125\0",
        "\u00a0125",  # no-break space is not a blank
        "7+8+0=15,5+6+1=12",
        "125" * 10_000,
    ],
)
def test_an_answer_that_is_not_the_plain_number_scores_zero(attack: str) -> None:
    assert load_family("arithmetic", {}).score(ADDITION, attack).value == 0.0


def test_reasons_name_the_answer_and_are_short() -> None:
    family = load_family("arithmetic", {})
    assert family.score(ADDITION, "7;126").reason == "wrong answer: 126, expected 125"
    assert family.score(ADDITION, "125;").reason == "no answer"
    assert family.score(ADDITION, "9" * 1000).reason == f"wrong answer: {'9' * 24}..., expected 125"
    assert family.score(ADDITION, "\u0661\n").reason == "wrong answer: \\u0661, expected 125"
