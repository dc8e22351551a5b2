"""The verifier interface, and how two machines agree on a score.

    info, prompt, completion -> Score      a worker scores, a validator scores again, both compare exactly

Invariants:

- pure: a score depends only on the three arguments, the verifier's options and its version. Third-party code that it
  uses is named in `stamp`, which belongs in the run descriptor together with `version`;
- deterministic: a score is 0 or 1, or one division of whole numbers (see tasks/base.py);
- bounded: sizes and steps are counted and rejected beyond a limit, at the same point on every machine;
- untrusted text never raises: `score` returns 0 with a reason. `check_info` raises `ConfigError` for a task that cannot
  be solved, when the tasks are loaded.

Limits. Work that cannot be counted (code that a model wrote) is limited by CPU time, and machines differ in speed:

    work <= limit / MARGIN           firm: every machine that is at most MARGIN times slower gives the same score
    limit / MARGIN < work <= limit   the score stands, and its reason begins with `NEAR_LIMIT`
    work > limit                     0, and its reason begins with `GAVE_UP`
    no sandbox, process or memory    0, and its reason begins with `FAULT`, which is a `GAVE_UP` as well

Equal scores agree, limits or not: code that never ends is 0 for both. If they differ and the validator's score is not
firm, nothing is known: `compare_claim` returns UNSURE, which is inconclusive, unpaid and tried again elsewhere, never
penalised. A worker that claims 1 for what no validator can finish is not paid for it either. A fault says nothing about
the completion: it agrees with no claim, and must not be claimed; a worker returns such a lease.

Conditions. A program's result may depend on what no sandbox can make equal on two machines, such as the addresses of
objects. Before a claim is found to differ, the completion is scored again under other conditions; if one score is
another, nothing is known either.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS, guard_score

JSON = Any
"""null, booleans, numbers, strings, lists, and objects with string keys"""
Info = Mapping[str, JSON]
"""what a verifier knows about a task"""

MARGIN = 4
"""how much slower a machine may be and still be bound by another's score. Changing breaks: verdicts at the limits."""
GAVE_UP = "gave up: "
FAULT = f"{GAVE_UP}a fault of this machine: "
NEAR_LIMIT = "near a limit: "
NO_VERIFIER = "reward"
"""task type of rows without one, which only the user's own reward function scores"""
_PLACES = {
    "family": "family:FamilyVerifier",
    "gym": "family:GymVerifier",
    "math": "math.verifier:MathVerifier",
    "code": "code.verifier:CodeVerifier",
    "text_exact": "text.match:ExactVerifier",
    "text_fuzzy": "text.match:FuzzyVerifier",
    "text_rules": "text.rules:RulesVerifier",
    "json_schema": "text.schema:SchemaVerifier",
}
"""Verifiers by task type, each imported on first use. A type is part of the wire format: task sets contain it, and a
run descriptor contains `stamp` next to it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One completion of one task, to be scored."""

    info: Info
    prompt: str
    completion: str


class Verifier:
    """The rule of one task type; the methods here are for verifiers that need no processes."""

    name: str
    """the task type"""
    version: int
    """raised whenever a score could change; in the run descriptor"""
    expensive = False
    """whether scoring all submitted work again would cost too much"""

    @property
    def stamp(self) -> str:
        """Name, version, and the versions of everything else that scores depend on."""
        return f"{self.name}/{self.version}"

    def check_info(self, info: Info) -> None:
        """ConfigError if no completion could be scored with it."""
        raise NotImplementedError

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        raise NotImplementedError

    def score_many(self, attempts: Sequence[Attempt]) -> list[Score]:
        """The scores in the same order; expensive verifiers process several concurrently, at most their pool's size."""
        return [score_safely(self, attempt.info, attempt.prompt, attempt.completion) for attempt in attempts]

    def score_again(self, attempt: Attempt, first: Score) -> Iterator[Score]:
        """More scores of an attempt, under conditions that may differ between machines and that should not matter; none
        for a verifier that depends on no such condition. `first` is the score that `score_many` gave."""
        return iter(())

    def close(self) -> None:
        """End its processes; most verifiers have none. It may be used again."""


class Agreement(StrEnum):
    """How a claimed reward relates to the one found."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNSURE = "unsure"


def compare_claim(claimed: float, found: Score, score_again: Callable[[], Iterable[Score]] = tuple) -> Agreement:
    """Whether a claim may be used against its worker (see "Limits" above). `score_again` gives more scores under other
    conditions (`Verifier.score_again`), and is asked only if the claim differs from a firm score."""
    if claimed == found.value and not is_fault(found):
        return Agreement.AGREES
    is_certain = is_firm(found) and all(other.value == found.value and is_firm(other) for other in score_again())
    return Agreement.DIFFERS if is_certain else Agreement.UNSURE


def is_firm(score: Score) -> bool:
    """Whether every machine within the margin gives the same score."""
    return not score.reason.startswith((GAVE_UP, NEAR_LIMIT))


def is_fault(score: Score) -> bool:
    """Whether the score is about the machine that scored, not about the completion."""
    return score.reason.startswith(FAULT)


def give_up(reason: str) -> Score:
    """The score of an attempt that hit a limit."""
    return Score(0.0, GAVE_UP + reason)


def own_fault(reason: str) -> Score:
    """The score of an attempt that this machine could not score."""
    return Score(0.0, FAULT + reason)


def mark_near(score: Score) -> Score:
    """The same score, marked as using more than the firm share of a limit."""
    return Score(score.value, NEAR_LIMIT + score.reason) if is_firm(score) else score


def score_safely(verifier: Verifier, info: Info, prompt: str, completion: str) -> Score:
    """The verifier's score for any completion: from 0 to 1, and 0 for one that is too long to read."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return Score(0.0, "too long")
    return guard_score(lambda: verifier.score(info, prompt, completion))


def list_verifiers() -> tuple[str, ...]:
    """The names of all task types, sorted."""
    return tuple(sorted(_PLACES))


def open_verifier(task_type: str, **options: Any) -> Verifier:
    """The verifier of a task type; ConfigError if it is unknown, or if this machine cannot run it safely."""
    if task_type == NO_VERIFIER:
        raise ConfigError(
            "column task_type is missing; it names the verifier that scores completions, one of "
            f"{', '.join(list_verifiers())}; to score them with your own function, set tasks.reward"
        )
    if task_type not in _PLACES:
        raise ConfigError(f"task type {task_type!r}: no such verifier; allowed are {', '.join(list_verifiers())}")
    module, _, name = _PLACES[task_type].partition(":")
    verifier: Verifier = getattr(import_module(f"shoal.tasks.verify.{module}"), name)(**options)
    return verifier
