"""Families of reasoning-gym, by name: its generators, and its scorer if it only compares texts.

- A task is a function of name, options, seed and the package's version, which the stamp names and a recipe carries.
- Only families with the package's default scorer are allowed: it compares an answer with the right one, with partial
  credit if the right answer is part of it. Others read answers with parsers that can run code or never end, and answers
  are untrusted.
- The answer is the content of the last <answer>...</answer>, or else all of the completion after `</think>`.
- Options are numbers up to `MAX_OPTION`, and no task is longer than `MAX_TEXT_CHARS`.
- Options are tried in a child process before they are used: recipes are untrusted, and generators take sizes and search
  until something fits, so some options make one task take gigabytes, or never end. The trial makes `NUM_TASKS` tasks
  within limits of CPU time, memory and length. So later tasks are likely to stay within them, but not guaranteed:
  options that are expensive for one seed in a thousand pass, and cost the workers of that run time.

    python -m shoal.tasks.families.reasoning_gym     the trial: {"dataset", "options"} from standard input; a message
                                                     to standard output if it fails
"""

import importlib
import importlib.metadata
import json
import random
import resource
import string
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from shoal.config.run import Option
from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS, Task, build_task, quote_text
from shoal.util.extras import import_extra

NUM_TASKS = 8
CPU_S = 10
"""CPU time for all of them, including the imports"""
WALL_S = 60.0
MEMORY_BYTES = 2 << 30
_MAX_SENTENCE = 200


@cache
def try_options(dataset: str, options: tuple[tuple[str, Option], ...]) -> None:
    """ConfigError for options with which tasks cannot be made, or not within the limits."""
    command = [sys.executable, "-m", "shoal.tasks.families.reasoning_gym"]
    job = json.dumps({"dataset": dataset, "options": dict(options)})
    reason = ""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, input=job, capture_output=True, text=True, errors="replace", timeout=WALL_S, check=False
        )
        if done.returncode == 0:
            return
        reason = done.stdout.strip()[:_MAX_SENTENCE] if done.returncode == 1 else ""
    limits = f"{NUM_TASKS} tasks took more than {CPU_S} s of CPU time or {MEMORY_BYTES >> 30} GiB"
    raise ConfigError(reason or f"tasks.options: gym_{dataset} cannot make tasks with these options ({limits})")


def main() -> int:
    """Make the tasks; returns 0 on success, 1 with a message if the options are invalid."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    job = json.loads(sys.stdin.read())
    try:
        family = GymFamily(job["dataset"], job["options"])
        for seed in range(NUM_TASKS):
            family.make_task(random.Random(seed))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


VERSION = 1
MAX_OPTION = 10_000
"""largest number among the options: sizes of what is generated"""
MAX_TEXT_CHARS = 1 << 16
"""longest question, and longest answer"""
_SEED_BITS = 32
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class GymFamily:
    """One family of reasoning-gym."""

    alphabet = string.printable

    def __init__(self, dataset: str, options: Mapping[str, Option]) -> None:
        self.dataset, self.options = dataset, dict(options)
        self.name = f"gym_{dataset}"

    def make_task(self, rng: random.Random) -> Task:
        try:
            made = _import_gym().create_dataset(self.dataset, seed=rng.getrandbits(_SEED_BITS), size=1, **self.options)
            entry = dict(made[0])
        except MemoryError:
            raise ConfigError(f"tasks.options: {self.name} ran out of memory with these options") from None
        except _FAILURES as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise ConfigError(f"tasks.options: {self.name} cannot make tasks with these options ({reason})") from None
        question, answer = str(entry["question"]), str(entry["answer"])
        if max(len(question), len(answer)) > MAX_TEXT_CHARS:
            raise ConfigError(
                f"tasks.options: {self.name} makes tasks of more than {MAX_TEXT_CHARS} characters with these options"
            )
        return build_task(self.name, question, {"answer": answer, "dataset": self.dataset})

    def demonstrate(self, task: Task) -> str:
        return str(task.info["answer"])

    def score(self, task: Task, completion: str) -> Score:
        return score_gym(self.dataset, str(task.info["answer"]), completion)

    def stamp_verifiers(self) -> dict[str, str]:
        """The version of generator and scorer, for the recipe."""
        return {"gym": stamp_gym()}


def open_gym(dataset: str, options: Mapping[str, Option]) -> GymFamily:
    """A family by its name in reasoning-gym; ConfigError if it is unknown or not safe."""
    find_scorer(dataset)
    for key, value in options.items():
        if isinstance(value, str) or not abs(value) <= MAX_OPTION:
            raise ConfigError(f"tasks.options.{key} = {value!r}: allowed are numbers up to {MAX_OPTION}")
    if options:
        try_options(dataset, tuple(sorted(options.items())))
    return GymFamily(dataset, options)


@cache
def find_scorer(dataset: str) -> Any:
    """The scorer of a family that is allowed."""
    known = _import_gym().factory.DATASETS
    scorer = importlib.import_module("reasoning_gym.dataset").ProceduralDataset.score_answer
    names = sorted(name for name, (kind, _) in known.items() if kind.score_answer is scorer)
    if dataset not in names:
        raise ConfigError(f"gym_{dataset[:60]}: no such family of reasoning-gym; allowed are {', '.join(names)}")
    return scorer


def score_gym(dataset: str, right: str, completion: str) -> Score:
    """The package's score for the answer of a completion; 0 if the scorer fails."""
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
    """Our version and the package's version."""
    return f"gym/{VERSION} reasoning-gym/{importlib.metadata.version('reasoning-gym')}"


def _import_gym() -> Any:
    return import_extra("reasoning_gym", "tasks.name", "gym")


if __name__ == "__main__":
    sys.exit(main())
