"""What a task is, what a family of tasks offers, and how an answer is read from a completion.

- A task is a pure function of its family's options and a random source; equal prompts have equal ids.
- The prompt holds everything the answer is judged by, so a score never depends on a family's options.
- The answer of a completion is what follows its last `;`, or all of it if there is none: work may be written before it.
- `score` is pure and deterministic, raises on no string and reads at most `MAX_COMPLETION_CHARS`. What it reads bounds
  its time, and no clock, which would stop a worker and a validator at different places.
- A score has the same bits on every machine: it is a whole number, or one division of two (IEEE 754 rounds a quotient
  in one way only; logarithms and sums of floats differ from library to library). Workers and validators compare scores
  exactly.
- All get their scores from `score_text`: a verifier that fails over a text gives 0, on either side.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.rollout import Score

MAX_COMPLETION_CHARS = 65_536
"""Longer completions score 0 unread, which bounds the time of every verifier. Changing breaks: recorded rewards."""

_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code that reads a text may raise over one that it was not made for."""
_ID_HEX = 16
_QUOTE_CHARS = 24
_BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Message:
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
    """tasks of equal kin are on the same side of the split: the id, or what is common to variants of one problem"""
    messages: "tuple[Message, ...]" = ()
    """the prompt in chat form, for tokenizers with a chat template; none: it is a text"""
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
        """Every character of prompts and demonstrations, whatever the options: one tokenizer serves them all."""

    def make_task(self, rng: random.Random) -> Task: ...
    def demonstrate(self, task: Task) -> str:
        """A correct completion, without the end token."""

    def score(self, task: Task, completion: str) -> Score: ...


def score_text(family: Family, task: Task, completion: str) -> Score:
    """What a family's verifier gives for a completion, whoever wrote it: a score from 0 to 1, whatever happens."""
    try:
        score = family.score(task, completion)
    except _FAILURES as error:
        return Score(0.0, f"the verifier failed: {type(error).__name__}")
    return score if 0.0 <= score.value <= 1.0 else Score(0.0, "the verifier gave no score")


def score_texts(family: Family, task: Task, completions: Sequence[str]) -> list[Score]:
    """`score_text` of several completions of one task; families with `score_many` work on them side by side."""
    score_many = getattr(family, "score_many", None)
    if score_many is None:
        return [score_text(family, task, completion) for completion in completions]
    scores: list[Score] = score_many(task, completions)
    assert len(scores) == len(completions), "one score for each completion"
    return scores


def at_step(family: Family, step: int) -> Family:
    """The tasks that are drawn for a step: those that a schedule names, or all where there is none."""
    choose = getattr(family, "at_step", None)
    chosen: Family = family if choose is None else choose(step)
    return chosen


def is_dear(family: Family) -> bool:
    """Whether to score again all that strangers hand in would cost too much: the family says so by `dear = True`."""
    return bool(getattr(family, "dear", False))


def build_task(verifier: str, prompt: str, info: Mapping[str, Any], *, kin: str | None = None) -> Task:
    """A task with the id that belongs to its prompt. Changing breaks: ids, and with them the splits."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    name = f"{verifier}-{digest[:_ID_HEX]}"
    return Task(id=name, prompt=prompt, verifier=verifier, info=info, kin=name if kin is None else f"{verifier}-{kin}")


def grade_answer(completion: str, judge: Callable[[str], Score]) -> Score:
    """Let `judge` score the answer of a completion, if there is one to judge."""
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
    """The start of an untrusted text in printable ASCII, fit for a reason."""
    # ascii() writes up to ten characters for one, so it is cut before (time) and after (length).
    shown = ascii(text[: _QUOTE_CHARS + 1])[1:-1]
    return shown if len(shown) <= _QUOTE_CHARS else shown[:_QUOTE_CHARS] + "..."
