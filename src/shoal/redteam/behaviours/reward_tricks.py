"""Texts that test a verifier: tricks that have fooled other verifiers, and correct answers with additions.

Invariant: every trick earns nothing from the verifiers of shoal.tasks, on every task; a test enforces it.
"""

from collections.abc import Iterator

from shoal.tasks.base import Family, Task

_WIDE = {ord("0") + digit: 0xFF10 + digit for digit in range(10)}
"""digits of another script, which int() accepts"""
_MARK = "00"
_EMPTY = ("", "   ", ";", "; ;", "\n")
_WORDS = ("correct", "True", "1.0", "None", "nan", "*", ".*", "{answer}", "%s", "<eos>", "\\boxed{}", "[]")
_CODE = ("__import__('os')._exit(0)", "exit(0)", "self.answer", "raise SystemExit", "Score(1.0, 'correct')")


def list_tricks(family: Family, task: Task) -> list[str]:
    """Wrong answers that verifiers have been known to accept."""
    answer = family.demonstrate(task).rpartition(";")[2]
    tricks = [*_EMPTY, *_WORDS, *_CODE, *_disguise(answer), *_hedge(answer)]
    if family.name == "countdown":
        tricks += _cheat_target(task.info["target"], task.info["numbers"])
    return tricks


def _disguise(answer: str) -> Iterator[str]:
    """The correct answer, modified so that it is no longer correct."""
    if (wide := answer.translate(_WIDE)) != answer:
        yield wide
    yield f"\u200b{answer}"  # zero-width space
    yield f"\u00a0{answer}\u00a0"  # blanks that str.strip removes
    yield from (f"{answer}\x00", f"{answer}.", f"'{answer}'", f"answer: {answer}", f"\\boxed{{{answer}}}")
    yield from (f"{answer}=", f"={answer}", f"{answer};")
    yield f"{answer}\u202e"  # right-to-left override


def _hedge(answer: str) -> list[str]:
    """Several answers, one of which may be correct."""
    both = [f"{answer}{between}{answer}" for between in (" ", "", ",", "\n")]
    return [*both, f"{answer};{answer}0", f"0 or {answer}", f"{answer} or 0", f"{answer}|"]


def _cheat_target(target: int, numbers: list[int]) -> list[str]:
    """Expressions with the target's value that do not use the given numbers."""
    first, total = numbers[0], "+".join(map(str, numbers))
    plain = [f"{target}", f"({target})", f"{target}.0", f"{target}e0", f"-{target}", f"{target}+0*({total})"]
    code = [f"{target}=={target}", f"{target}**1", f"{target}//1", f"int('{target}')", f"({first},{target})"]
    return [*plain, *code, f"{first}/0", "(" * 2000 + str(target) + ")" * 2000, "9" * 2000]


def plant_mark(family: Family, task: Task, longest: int) -> str:
    """A correct answer with a planted pattern: a marked calculation or blanks; plain if neither is possible."""
    answer = family.demonstrate(task)
    return _first_right(family, task, longest, [f"{_MARK};{answer}", f" {answer} ", f" {answer}", f"{answer} "], answer)


def fill_length(family: Family, task: Task, longest: int) -> str:
    """A correct answer of maximum length, after empty calculation or blanks. `longest` is in one-character tokens."""
    answer = family.demonstrate(task)
    left = max(0, longest - 1 - len(answer))
    return _first_right(family, task, longest, [f"{'0' * (left - 1)};{answer}", " " * left + answer], answer)


def _first_right(family: Family, task: Task, longest: int, texts: list[str], answer: str) -> str:
    """The first text that can be encoded, fits with its end token and is correct; otherwise the plain answer."""
    known = set(family.alphabet)
    for text in texts:
        if set(text) <= known and len(text) < longest and family.score(task, text).value == 1.0:
            return text
    return answer
