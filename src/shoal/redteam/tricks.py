"""Texts that a verifier meets sooner or later: those that have fooled others, and right answers with something more.

Every trick is worth nothing to the verifiers of shoal.tasks, on every task; a test holds them to it.
"""

from collections.abc import Iterator

from shoal.tasks.base import Family, Task

_WIDE = {ord("0") + digit: 0xFF10 + digit for digit in range(10)}
"""digits of another script, which int() reads"""
_MARK = "00"
_EMPTY = ("", "   ", ";", "; ;", "\n")
_WORDS = ("correct", "True", "1.0", "None", "nan", "*", ".*", "{answer}", "%s", "<eos>", "\\boxed{}", "[]")
_CODE = ("__import__('os')._exit(0)", "exit(0)", "self.answer", "raise SystemExit", "Score(1.0, 'correct')")


def list_tricks(family: Family, task: Task) -> list[str]:
    """Wrong answers that verifiers have been known to take for right ones."""
    answer = family.demonstrate(task).rpartition(";")[2]
    tricks = [*_EMPTY, *_WORDS, *_CODE, *_dress(answer), *_hedge(answer)]
    if family.name == "countdown":
        tricks += _cheat_target(task.info["target"], task.info["numbers"])
    return tricks


def _dress(answer: str) -> Iterator[str]:
    """The right answer, dressed up so that it is not it."""
    if (wide := answer.translate(_WIDE)) != answer:
        yield wide
    yield f"\u200b{answer}"  # a space of no width
    yield f"\u00a0{answer}\u00a0"  # blanks that str.strip takes away
    yield f"{answer}\x00"
    yield f"{answer}."
    yield f"'{answer}'"
    yield f"answer: {answer}"
    yield f"\\boxed{{{answer}}}"
    yield f"{answer}="
    yield f"={answer}"
    yield f"{answer};"
    yield f"{answer}\u202e"  # all that follows is shown from right to left


def _hedge(answer: str) -> Iterator[str]:
    """Several answers, of which one may be right."""
    yield f"{answer} {answer}"
    yield f"{answer}{answer}"
    yield f"{answer},{answer}"
    yield f"{answer}\n{answer}"
    yield f"{answer};{answer}0"
    yield f"0 or {answer}"
    yield f"{answer} or 0"
    yield f"{answer}|"


def _cheat_target(target: int, numbers: list[int]) -> Iterator[str]:
    """What an expression of the target's value may be written as, by one who does not use the numbers."""
    first = numbers[0]
    yield str(target)
    yield f"({target})"
    yield f"{target}.0"
    yield f"{target}e0"
    yield f"-{target}"
    yield f"{target}+0*({'+'.join(map(str, numbers))})"
    yield f"{target}=={target}"
    yield f"{target}**1"
    yield f"{target}//1"
    yield f"int('{target}')"
    yield f"({first},{target})"
    yield f"{first}/0"
    yield "(" * 2000 + str(target) + ")" * 2000
    yield "9" * 2000


def plant_mark(family: Family, task: Task, room: int) -> str:
    """A right answer with a pattern in it: a marked piece of work before it, or blanks, or none if there is no way."""
    answer = family.demonstrate(task)
    return _first_right(family, task, room, [f"{_MARK};{answer}", f" {answer} ", f" {answer}", f"{answer} "], answer)


def fill_room(family: Family, task: Task, room: int) -> str:
    """A right answer that is as long as can be: after empty work, or blanks. `room` is in tokens, of one character."""
    answer = family.demonstrate(task)
    left = max(0, room - 1 - len(answer))
    return _first_right(family, task, room, [f"{'0' * (left - 1)};{answer}", " " * left + answer], answer)


def _first_right(family: Family, task: Task, room: int, texts: list[str], answer: str) -> str:
    """The first text that can be spelled, has room with its end token, and is right; the plain answer if none is."""
    known = set(family.alphabet)
    for text in texts:
        if set(text) <= known and len(text) < room and family.score(task, text).value == 1.0:
            return text
    return answer
