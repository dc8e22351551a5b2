"""User code as tasks and rewards: a plain reward function, or an environment in the style of verifiers.

    f(prompts, completions, **columns) -> list[float]       columns: verification info and metadata, a list each;
                                                            called by keyword, with the arguments that it declares
    an object with `dataset` (or `get_dataset()`) and a `rubric` with reward functions and weights

The code is imported by name and runs with all the rights of this process. So it is for `shoal train` and `shoal eval`
on the user's own machine: the settings of a swarm reject it, and a recipe cannot contain it.

Rewards must be numbers from 0 to 1; anything else ends the run with one line, because scoring it 0 would train the
opposite of what was meant. An exception of the user's code ends the run with its traceback.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import ChatMessage, Task, build_task
from shoal.tasks.sets.family import SetFamily

RewardFunction = Callable[..., Sequence[float]]


def load_object(key: str, place: str) -> Any:
    """Import `package.module:name`; modules in the current folder are found as well."""
    module, colon, name = place.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{key}: must be package.module:name, got {place!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{key}: {place!r} cannot be imported ({error})") from None


def hash_source(place: str) -> str:
    """Hash of the file in which the module of `package.module:name` is written; empty if it has no file."""
    load_object("tasks", place)
    source = getattr(sys.modules[place.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""


class RewardFamily:
    """The tasks of a set, scored by a user function."""

    name = "reward"

    def __init__(self, inner: SetFamily, place: str) -> None:
        self._inner = inner
        self._function: RewardFunction = load_object("tasks.reward", place)
        if not callable(self._function):
            raise ConfigError(f"tasks.reward: {place!r} is not a function")
        self._columns = {record.id: {**record.metadata, **record.info} for record in inner.tasks.records}

    @property
    def alphabet(self) -> str:
        return self._inner.alphabet

    def at_step(self, step: int) -> "RewardFamily":
        """The tasks of a step, scored by the same function."""
        stage = copy(self)
        stage._inner = self._inner.at_step(step)
        return stage

    def make_task(self, rng: random.Random) -> Task:
        return self._inner.make_task(rng)

    def demonstrate(self, task: Task) -> str:
        return self._inner.demonstrate(task)

    def score(self, task: Task, completion: str) -> Score:
        return self.score_many(task, [completion])[0]

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """One call for all completions of a task, as such functions expect it."""
        columns = {name: [value] * len(completions) for name, value in self._columns[task.id].items()}
        texts = {"prompts": [task.prompt] * len(completions), "completions": list(completions)}
        rewards = _call_function("tasks.reward", self._function, {**columns, **texts})
        if len(rewards) != len(completions):
            raise ConfigError(f"tasks.reward: returned {len(rewards)} rewards for {len(completions)} completions")
        return [grade_reward(reward) for reward in rewards]


class EnvironmentFamily:
    """Tasks and rubric of an environment: reward functions with weights, each called with the arguments it declares."""

    def __init__(self, environment: Any, place: str) -> None:
        self.name = "environment"
        self._rows = [_read_row(index, row) for index, row in enumerate(_find_rows(environment, place))]
        if not self._rows:
            raise ConfigError(f"tasks.environment: {place!r} has no tasks")
        self._terms = _find_terms(environment, place)
        self._total = sum(weight for _, weight in self._terms)

    @property
    def alphabet(self) -> str:
        return "".join(sorted({char for task in self._rows for char in task.prompt + str(task.info.get("answer"))}))

    def make_task(self, rng: random.Random) -> Task:
        return self._rows[rng.randrange(len(self._rows))]

    def demonstrate(self, task: Task) -> str:
        return str(task.info.get("answer", ""))

    def score(self, task: Task, completion: str) -> Score:
        known = {
            "prompt": task.prompt,
            "completion": completion,
            "answer": task.info.get("answer", ""),
            "info": task.info.get("info", {}),
            "state": {},
            "task": task.id,
        }
        values = [
            weight * float(_call_function("tasks.environment", function, known)) for function, weight in self._terms
        ]
        return grade_reward(sum(values) / self._total)


def load_environment(place: str) -> EnvironmentFamily:
    """The environment `package.module:name`, or the result of a function of that name."""
    found = load_object("tasks.environment", place)
    if inspect.isfunction(found) or inspect.isclass(found):
        found = found()
    return EnvironmentFamily(found, place)


def grade_reward(reward: Any) -> Score:
    """Convert a reward from user code to a score; ConfigError for one that is not a number from 0 to 1."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise ConfigError(f"tasks.reward: returned {str(reward)[:40]!r}; a reward is a number from 0 to 1") from None
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ConfigError(f"tasks.reward: returned {value:g}; rewards must be between 0 and 1, so rescale them")
    return Score(value, "own reward")


def _find_rows(environment: Any, place: str) -> Iterable[Mapping[str, Any]]:
    rows = environment.get_dataset() if hasattr(environment, "get_dataset") else getattr(environment, "dataset", None)
    if rows is None:
        raise ConfigError(f"tasks.environment: {place!r} has neither get_dataset nor dataset")
    found: Iterable[Mapping[str, Any]] = rows
    return found


def _find_terms(environment: Any, place: str) -> list[tuple[Callable[..., Any], float]]:
    rubric = getattr(environment, "rubric", None)
    functions = list(getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", None) or [])
    weights = list(getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None) or [])
    weights = weights or [1.0] * len(functions)
    terms = [(function, float(weight)) for function, weight in zip(functions, weights, strict=False) if weight > 0]
    if not terms or len(weights) != len(functions):
        raise ConfigError(f"tasks.environment: {place!r} has no rubric with reward functions and a weight for each")
    return terms


def _read_row(index: int, row: Mapping[str, Any]) -> Task:
    prompt = row.get("prompt", row.get("question"))
    messages: tuple[ChatMessage, ...] = ()
    if isinstance(prompt, list):
        messages = tuple(ChatMessage(str(item["role"]), str(item["content"])) for item in prompt)
        prompt = "\n\n".join(message.content for message in messages)
    if not isinstance(prompt, str):
        raise ConfigError(f"tasks.environment: row {index} has neither prompt nor question")
    info = {"answer": row.get("answer", ""), "info": row.get("info") or {}}
    if isinstance(info["info"], str):
        info["info"] = json.loads(info["info"])
    task = build_task("environment", prompt, info)
    return Task(id=task.id, prompt=prompt, verifier=task.verifier, info=info, kin=task.kin, messages=messages)


def _call_function(key: str, function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Call a reward function by keyword, with the arguments it declares; a coroutine is run to completion."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    given = {name: value for name, value in known.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"{key}: {error} of the function; arguments are {', '.join(sorted(known))}") from None
    result = function(**given)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
