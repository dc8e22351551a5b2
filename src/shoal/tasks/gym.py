"""Families of reasoning-gym, by name: its generators, and its scorer where that only compares texts.

- A task is a function of name, options, seed and the package's version, which the stamp names and a recipe carries.
- Only families that keep the package's own scorer are open: it compares an answer with the right one, and gives the
  share of it that is right where the right one is part of it. Others read answers with parsers that can run code or
  take for ever, and answers are strangers'.
- Options are numbers up to `MAX_OPTION`, and tried in a process of its own before they are used here (tasks/trial.py):
  recipes are strangers', and generators take sizes. No task is longer than `MAX_TEXT_CHARS`.
- The answer is what stands in the last <answer>...</answer>, or else all of the completion after `</think>`.
"""

import importlib
import importlib.metadata
import random
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from shoal.config import Option
from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS, Task, build_task, quote_text
from shoal.tasks.trial import try_options

VERSION = 1
MAX_OPTION = 10_000
"""of numbers among the options: sizes of what is generated"""
MAX_TEXT_CHARS = 1 << 16
"""of a question, and of its answer"""
_SEED_BITS = 32
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class GymFamily:
    """One family of reasoning-gym."""

    alphabet = string.printable

    def __init__(self, dataset: str, options: Mapping[str, Option]) -> None:
        self.dataset, self.options = dataset, dict(options)
        self.name = f"gym_{dataset}"

    def make_task(self, rng: random.Random) -> Task:
        entry = self._generate(rng.getrandbits(_SEED_BITS))
        info = {"answer": str(entry["answer"]), "dataset": self.dataset}
        return build_task(self.name, str(entry["question"]), info)

    def demonstrate(self, task: Task) -> str:
        return str(task.info["answer"])

    def score(self, task: Task, completion: str) -> Score:
        return score_gym(self.dataset, str(task.info["answer"]), completion)

    def stamp_verifiers(self) -> dict[str, str]:
        """The version of generator and scorer, for the recipe."""
        return {"gym": stamp_gym()}

    def _generate(self, seed: int) -> dict[str, Any]:
        try:
            made = _import_gym().create_dataset(self.dataset, seed=seed, size=1, **self.options)
            entry = dict(made[0])
        except MemoryError:
            raise ConfigError(f"tasks.options: {self.name} cannot be made with them (out of memory)") from None
        except _FAILURES as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise ConfigError(f"tasks.options: {self.name} cannot be made with them ({reason})") from None
        if max(len(str(entry["question"])), len(str(entry["answer"]))) > MAX_TEXT_CHARS:
            raise ConfigError(
                f"tasks.options: {self.name} makes tasks of more than {MAX_TEXT_CHARS} characters with them"
            )
        return entry


def open_gym(dataset: str, options: Mapping[str, Option]) -> GymFamily:
    """A family by its name in reasoning-gym; ConfigError where it is not known or not safe."""
    find_scorer(dataset)
    for key, value in options.items():
        if isinstance(value, str) or not abs(value) <= MAX_OPTION:
            raise ConfigError(f"tasks.options.{key} = {value!r}: allowed are numbers up to {MAX_OPTION}")
    if options:
        _try_once(dataset, tuple(sorted(options.items())))
    return GymFamily(dataset, options)


@cache
def _try_once(dataset: str, options: tuple[tuple[str, Option], ...]) -> None:
    try_options(dataset, dict(options))


def list_gym() -> tuple[str, ...]:
    """The names of the families that are open."""
    base = importlib.import_module("reasoning_gym.dataset").ProceduralDataset
    known = _import_gym().factory.DATASETS
    return tuple(sorted(name for name, (kind, _) in known.items() if kind.score_answer is base.score_answer))


@cache
def find_scorer(dataset: str) -> Any:
    """The scorer of a family that is open."""
    _import_gym()
    names = list_gym()
    if dataset not in names:
        raise ConfigError(f"gym_{dataset[:60]}: no such family of reasoning-gym; allowed are {', '.join(names)}")
    return importlib.import_module("reasoning_gym.dataset").ProceduralDataset.score_answer


def score_gym(dataset: str, right: str, completion: str) -> Score:
    """What the package's scorer gives for the answer of a completion; 0 where it fails."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return Score(0.0, "too long")
    answer = read_answer(completion)
    try:
        value = float(find_scorer(dataset)(None, answer, {"answer": right}))
    except _FAILURES as error:
        return Score(0.0, f"the scorer failed: {type(error).__name__}")
    if value == 1.0:
        return Score(1.0, "correct")
    return Score(value, f"wrong answer: {quote_text(answer)}, expected {quote_text(right)}")


def read_answer(completion: str) -> str:
    """The answer of a completion."""
    text = completion.rpartition("</think>")[2]
    _, opened, rest = text.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else text).strip()


def stamp_gym() -> str:
    """Our version and the package's."""
    return f"gym/{VERSION} reasoning-gym/{importlib.metadata.version('reasoning-gym')}"


def _import_gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ConfigError('tasks.name: reasoning-gym is not installed; pip install "shoal[gym]"') from None
