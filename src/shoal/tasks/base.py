"""Tasks, families of tasks, and how an answer is read from a completion.

- A task is a pure function of its family's options and a random source; equal prompts have equal ids.
- The prompt holds everything the answer is judged by, so a score never depends on a family's options.
- The answer of a completion is the text after its last `;`, or all of it if there is none: work may precede it.
- `score` is pure and deterministic, raises for no string and reads at most `MAX_COMPLETION_CHARS`. Its time is bounded
  by what it reads, not by a clock, which would stop a worker and a validator at different points.
- A score has the same bits on every machine: it is a whole number, or one division of two (IEEE 754 rounds a quotient
  in only one way; logarithms and sums of floats differ between libraries). Workers and validators compare scores
  exactly.
- Everyone gets scores from `score_text`: a verifier that fails on a text gives 0, on both sides.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.rollout import Score

MAX_COMPLETION_CHARS = 65_536
"""Longer completions score 0 unread, which bounds the time of every verifier. Changing breaks: recorded rewards."""

_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that parsing code may raise on unexpected text."""
_ID_HEX = 16
_QUOTE_CHARS = 24
_BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a prompt in chat form."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem."""

    id: str
    """family name and content hash of the prompt"""
    prompt: str
    verifier: str
    """name of the family that scores it"""
    info: Mapping[str, Any] = field(hash=False)
    """what the verifier needs to know, JSON values only"""
    kin: str
    """tasks of equal kin are on the same side of the split: the id, or what variants of one problem share"""
    messages: "tuple[ChatMessage, ...]" = ()
    """the prompt in chat form, for tokenizers with a chat template; empty if it is a text"""
    plain: "Task | None" = None
    """the task without its target length, if it has one (tasks/length.py)"""

    @property
    def problem(self) -> str:
        """The id without a target length."""
        return self.id if self.plain is None else self.plain.id


class Family(Protocol):
    """Problems of one kind, their demonstrations and their verifier."""

    @property
    def name(self) -> str: ...
    @property
    def alphabet(self) -> str:
        """Every character of prompts and demonstrations, whatever the options: one tokenizer fits all."""

    def make_task(self, rng: random.Random) -> Task: ...
    def demonstrate(self, task: Task) -> str:
        """A correct completion, without the end token."""

    def score(self, task: Task, completion: str) -> Score: ...


def score_text(family: Family, task: Task, completion: str) -> Score:
    """The score of a completion by the family's verifier: from 0 to 1, whatever happens."""
    return guard_score(lambda: family.score(task, completion))


def guard_score(verify: Callable[[], Score]) -> Score:
    """The result of a verifier, or 0 if it fails."""
    try:
        score = verify()
    except _FAILURES as error:
        return Score(0.0, f"the verifier failed: {type(error).__name__}")
    return score if 0.0 <= score.value <= 1.0 else Score(0.0, "the verifier gave no score")


def score_texts(family: Family, task: Task, completions: Sequence[str]) -> list[Score]:
    """`score_text` of several completions of one task; families with `score_many` process them concurrently."""
    score_many = getattr(family, "score_many", None)
    if score_many is None:
        return [score_text(family, task, completion) for completion in completions]
    scores: list[Score] = score_many(task, completions)
    assert len(scores) == len(completions), "one score for each completion"
    return scores


def score_again(family: Family, task: Task, completion: str, first: Score) -> Iterator[Score]:
    """More scores of a completion, under conditions that differ between machines (`Verifier.score_again`)."""
    again = getattr(family, "score_again", None)
    scores: Iterator[Score] = iter(()) if again is None else again(task, completion, first)
    return scores


def at_step(family: Family, step: int) -> Family:
    """The tasks of a step: those that a schedule selects, or all without one."""
    choose = getattr(family, "at_step", None)
    chosen: Family = family if choose is None else choose(step)
    return chosen


def list_tasks(family: Family) -> list[Task] | None:
    """All tasks of a family that has a list of them; None if it generates tasks."""
    list_all = getattr(family, "list_tasks", None)
    tasks: list[Task] | None = None if list_all is None else list_all()
    return tasks


def stamp_family(family: Family) -> dict[str, str]:
    """The verifiers of a family by name, with their versions; empty if only shoal's own code scores."""
    stamps: dict[str, str] = getattr(family, "stamp_verifiers", dict)()
    return stamps


def is_expensive(family: Family, task: Task) -> bool:
    """Whether scoring all submitted completions of a task again would cost too much.

    A property of the task: one task with an expensive verifier does not leave the others unchecked. A family that has
    such tasks names them by a method `is_expensive`.
    """
    declare = getattr(family, "is_expensive", None)
    return declare is not None and bool(declare(task))


def build_task(verifier: str, prompt: str, info: Mapping[str, Any], *, kin: str | None = None) -> Task:
    """A task with the id that follows from its prompt. Changing breaks: ids, and with them the splits."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    name = f"{verifier}-{digest[:_ID_HEX]}"
    return Task(id=name, prompt=prompt, verifier=verifier, info=info, kin=name if kin is None else f"{verifier}-{kin}")


def grade_answer(completion: str, judge: Callable[[str], Score]) -> Score:
    """Score the answer of a completion with `judge`, if there is one."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return Score(0.0, "too long")
    answer = completion.rpartition(";")[2].strip(_BLANKS)
    return judge(answer) if answer else Score(0.0, "no answer")


def match_answer(completion: str, expected: str) -> Score:
    """1 if the answer is `expected`, character by character; `07`, `+7` and digits of other scripts are not `7`."""

    def judge(answer: str) -> Score:
        if answer == expected:
            return Score(1.0, "correct")
        return Score(0.0, f"wrong answer: {quote_text(answer)}, expected {quote_text(expected)}")

    return grade_answer(completion, judge)


def quote_text(text: str) -> str:
    """The start of an untrusted text in printable ASCII, for use in a reason."""
    # ascii() writes up to ten characters for one, so the text is cut before (time) and after (length).
    shown = ascii(text[: _QUOTE_CHARS + 1])[1:-1]
    return shown if len(shown) <= _QUOTE_CHARS else shown[:_QUOTE_CHARS] + "..."
