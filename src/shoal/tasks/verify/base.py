"""What a verifier is, and how two machines agree on what it says.

    info, prompt, completion -> Score      a worker scores, a validator scores again, both compare exactly

Invariants:
- pure: a score depends on the three arguments, the verifier's options and its version, and on nothing else. What it
  uses of other people's code is named in `stamp`, which belongs in the run descriptor together with `version`;
- deterministic: a score is 0 or 1, or one division of whole numbers (tasks/base.py says why);
- bounded: sizes and steps are counted and refused beyond a limit, at the same place on every machine;
- what strangers wrote never raises: `score` answers 0 with a reason. `check_info` raises `ConfigError` for a task that
  nobody could solve, when the tasks are loaded.

The edge. Work that cannot be counted (code that a model wrote) is limited by CPU time, and machines differ in speed:

    work <= limit / MARGIN           firm: every machine that is at most MARGIN times slower says the same
    limit / MARGIN < work <= limit   the score stands, and its reason begins with `NEAR_LIMIT`
    work > limit                     0, and its reason begins with `GAVE_UP`
    no box, no process, no memory    0, and its reason begins with `FAULT`, which is a `GAVE_UP` as well

Two who agree on the number agree, limits or not: code that never ends is 0 for both. Where they differ and what the
validator found is not firm, nothing is known: `compare_claim` says UNSURE, which is inconclusive, unpaid and tried
again elsewhere, never a punishment. Who claims 1 for what no validator can finish is not paid for it either. A fault
says nothing about the completion: it agrees with no claim, and nobody may claim it; a worker gives such a lease back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS

JSON = Any
"""null, booleans, numbers, strings, lists, and objects with string keys"""
Info = Mapping[str, JSON]
"""what a verifier knows about a task"""

MARGIN = 4
"""how much slower a machine may be and still be held to the score of another. Changing breaks: verdicts at the edge."""
GAVE_UP = "gave up: "
FAULT = f"{GAVE_UP}a fault of this machine: "
NEAR_LIMIT = "near a limit: "

_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One completion of one task, to be scored."""

    info: Info
    prompt: str
    completion: str


class Verifier(Protocol):
    """The rule of one task type."""

    @property
    def name(self) -> str:
        """The task type."""

    @property
    def version(self) -> int:
        """Raised whenever a score could change; in the run descriptor."""

    @property
    def stamp(self) -> str:
        """Name, version, and the versions of what scores depend on beside our own code."""

    @property
    def dear(self) -> bool:
        """Whether to score again all that strangers hand in would cost too much."""

    def check_info(self, info: Info) -> None:
        """ConfigError if no completion could be scored with it."""

    def score(self, info: Info, prompt: str, completion: str) -> Score: ...
    def score_many(self, attempts: Sequence[Attempt]) -> list[Score]:
        """The scores in the same order; the dear ones work on several at a time, and never on more than their pool."""

    def close(self) -> None:
        """End the processes that it holds; nothing for most. It may be used again."""


class Agreement(StrEnum):
    """What a claimed reward is to the one that was found."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNSURE = "unsure"


def compare_claim(claimed: float, found: Score) -> Agreement:
    """Whether a claim may be held against who made it (see "The edge")."""
    if claimed == found.value and not is_fault(found):
        return Agreement.AGREES
    return Agreement.DIFFERS if is_firm(found) else Agreement.UNSURE


def is_firm(score: Score) -> bool:
    """Whether every machine within the margin gives the same score."""
    return not score.reason.startswith((GAVE_UP, NEAR_LIMIT))


def is_fault(score: Score) -> bool:
    """Whether it is about the machine that scored, and not about the completion."""
    return score.reason.startswith(FAULT)


def give_up(reason: str) -> Score:
    """The score of what met a limit."""
    return Score(0.0, GAVE_UP + reason)


def own_fault(reason: str) -> Score:
    """The score of what this machine could not score."""
    return Score(0.0, FAULT + reason)


def mark_near(score: Score) -> Score:
    """The same score, reached with more than the firm share of a limit."""
    return Score(score.value, NEAR_LIMIT + score.reason) if is_firm(score) else score


def score_safely(verifier: Verifier, info: Info, prompt: str, completion: str) -> Score:
    """What a verifier gives, whatever the completion: a score from 0 to 1."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return Score(0.0, "too long")
    try:
        score = verifier.score(info, prompt, completion)
    except _FAILURES as error:
        return Score(0.0, f"the verifier failed: {type(error).__name__}")
    return score if 0.0 <= score.value <= 1.0 else Score(0.0, "the verifier gave no score")


class Cheap:
    """What verifiers have in common that need no processes."""

    name: str
    version: int
    dear = False

    @property
    def stamp(self) -> str:
        return f"{self.name}/{self.version}"

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        raise NotImplementedError

    def score_many(self, attempts: Sequence[Attempt]) -> list[Score]:
        return [self.score(attempt.info, attempt.prompt, attempt.completion) for attempt in attempts]

    def close(self) -> None:
        return None
