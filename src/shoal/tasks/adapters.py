"""User code as tasks and rewards: a plain reward function, or an environment in the style of verifiers.

    f(prompts, completions, **columns) -> list[float]       columns: verification info and metadata, a list each;
                                                            called by keyword, with the arguments that it declares;
                                                            of a task in chat form both are lists of messages
    an object with `dataset` (or `get_dataset()`) and a `rubric` with reward functions and weights

The code is imported by name and runs with all the rights of this process. So it is for `shoal train` and `shoal eval`
on the user's own machine: the settings of a swarm reject it, and a recipe cannot contain it.

Rewards must be numbers from 0 to 1; anything else ends the run with one line, because scoring it 0 would train the
opposite of what was meant. So does a negative weight of a rubric. An exception of a reward function ends the run with
its traceback and what was scored.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import ChatMessage, Task, build_task
from shoal.tasks.sets.family import SetFamily
from shoal.util.units import count_things

RewardFunction = Callable[..., Sequence[float]]
_SHOWN_COMPLETIONS, _SHOWN_CHARS = 3, 40
"""of a call that failed"""


def load_object(key: str, place: str) -> Any:
    """Import `package.module:name`; modules in the current folder are found as well."""
    module, colon, name = place.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{key}: must be package.module:name, got {place!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if module.endswith(".py"):
        right = ".".join(Path(module).with_suffix("").parts).strip("./")
        raise ConfigError(f"{key}: {place!r} names a file; write {right}:{name}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{key}: {place!r} cannot be imported ({error})") from None


def hash_source(key: str, place: str) -> str:
    """Hash of the files in which `package.module:name` is written; empty if it has none.

    These are its module and the modules that it uses, directly or not, from the same folder.
    """
    load_object(key, place)
    name = place.partition(":")[0]
    source = getattr(sys.modules[name], "__file__", None)
    if not source:
        return ""
    own = Path(source).resolve()
    files = [own, *sorted(_find_sources(name, own.parents[name.count(".")]) - {own})]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes[1:] else hashes[0]


def _find_sources(start: str, folder: Path) -> set[Path]:
    """The files below a folder of a module and of those that it uses."""
    found: dict[str, Path] = {}
    names = [start]
    while names:
        module = sys.modules.get(name := names.pop())
        source = getattr(module, "__file__", None)
        if source is None or name in found or name.partition(".")[0] == "shoal":
            continue
        path = Path(source).resolve()
        if path.is_relative_to(folder) and "site-packages" not in path.parts:
            found[name] = path
            for value in list(vars(module).values()):
                names.append(str(value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)))
    return set(found.values())


_ENVIRONMENT_COLUMNS = ("prompt", "completion", "answer", "info", "state", "task")


class RewardFamily:
    """The tasks of a set, scored by a user function."""

    name = "reward"

    def __init__(self, inner: SetFamily, place: str) -> None:
        self._inner, self._place = inner, place
        self._function: RewardFunction = load_object("tasks.reward", place)
        if not callable(self._function):
            raise ConfigError(f"tasks.reward: {place!r} is not a function")
        self._columns = {record.id: {**record.metadata, **record.info} for record in inner.tasks.records}
        self._names = {name for columns in self._columns.values() for name in columns}
        _check_arguments(f"tasks.reward: {place}", self._function, self._names | {"prompts", "completions"})

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

    def list_tasks(self) -> list[Task]:
        """All tasks that can be drawn."""
        return self._inner.list_tasks()

    def demonstrate(self, task: Task) -> str:
        return self._inner.demonstrate(task)

    def score(self, task: Task, completion: str) -> Score:
        return self.score_many(task, [completion])[0]

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """One call for all completions of a task, as such functions expect it."""
        own = self._columns[task.id]
        columns = {name: [own.get(name)] * len(completions) for name in self._names}
        what = f"tasks.reward: {self._place}"
        with _note_scored(what, task, completions):
            rewards = _call_function(self._function, {**columns, **_show_texts(task, completions)})
        is_other = isinstance(rewards, (str, bytes, Mapping, Set)) or getattr(rewards, "ndim", 1) == 0
        is_list = isinstance(rewards, Collection) and not is_other
        if not is_list or len(rewards) != len(completions):
            found = count_things(len(rewards), "reward") if is_list else repr(rewards)[:40]
            text = f"{what} returned {found} for {count_things(len(completions), 'completion')}"
            raise ConfigError(f"{text}; return a list with one number per completion")
        return [_grade_reward(what, reward, text) for reward, text in zip(rewards, completions, strict=True)]


class EnvironmentFamily:
    """Tasks and rubric of an environment: reward functions with weights, each called with the arguments it declares."""

    def __init__(self, environment: Any, place: str) -> None:
        self.name = "environment"
        self._what = f"tasks.environment: {place}"
        self._rows = [_read_row(index, row) for index, row in enumerate(_find_rows(environment, place))]
        if not self._rows:
            raise ConfigError(f"tasks.environment: {place!r} has no tasks")
        self._terms = _find_terms(environment, place)
        for function, _ in self._terms:
            _check_arguments(self._what, function, _ENVIRONMENT_COLUMNS)
        self._total = sum(weight for _, weight in self._terms)

    @property
    def alphabet(self) -> str:
        return "".join(sorted({char for task in self._rows for char in task.prompt + str(task.info.get("answer"))}))

    def list_tasks(self) -> list[Task]:
        """All tasks that can be drawn."""
        return self._rows

    def make_task(self, rng: random.Random) -> Task:
        return self._rows[rng.randrange(len(self._rows))]

    def demonstrate(self, task: Task) -> str:
        return str(task.info.get("answer", ""))

    def score(self, task: Task, completion: str) -> Score:
        return self.score_many(task, [completion])[0]

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """As for a reward function: `score_text` would turn its exceptions into rewards of 0."""
        with _note_scored(self._what, task, completions):
            return [self._score_one(task, completion) for completion in completions]

    def _score_one(self, task: Task, completion: str) -> Score:
        given: tuple[Any, ...] = (
            task.prompt,
            completion,
            task.info.get("answer", ""),
            task.info.get("info", {}),
            {},
            task.id,
        )
        known = dict(zip(_ENVIRONMENT_COLUMNS, given, strict=True))
        rewards = [
            (weight, _grade_reward(self._what, _call_function(function, known), completion))
            for function, weight in self._terms
        ]
        return Score(sum(weight * reward.value for weight, reward in rewards) / self._total, "own reward")


def load_environment(place: str) -> EnvironmentFamily:
    """The environment `package.module:name`, or the result of a function of that name."""
    found = load_object("tasks.environment", place)
    if inspect.isfunction(found) or inspect.isclass(found):
        found = found()
    return EnvironmentFamily(found, place)


@contextmanager
def _note_scored(what: str, task: Task, completions: Sequence[str]) -> Iterator[None]:
    """Note at an exception of user code what was scored."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        shown = ", ".join(repr(text[:_SHOWN_CHARS]) for text in dict.fromkeys(completions[:_SHOWN_COMPLETIONS]))
        raised = f"{what} raised {type(error).__name__} for task {task.id}"
        error.add_note(f"{raised}, {count_things(len(completions), 'completion')} such as {shown}")
        raise


def _show_texts(task: Task, completions: Sequence[str]) -> dict[str, Any]:
    """Prompts and completions as TRL passes them: texts, or lists of messages if the prompt is in chat form."""
    if not task.messages:
        return {"prompts": [task.prompt] * len(completions), "completions": list(completions)}
    prompt = [asdict(message) for message in task.messages]
    answers = [[asdict(ChatMessage("assistant", text))] for text in completions]
    return {"prompts": [prompt] * len(completions), "completions": answers}


def _grade_reward(what: str, reward: Any, completion: str) -> Score:
    """Convert a reward from user code to a score; ConfigError for one that is not a number from 0 to 1."""
    try:
        value = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        value = math.nan
    shown = f"for the completion {completion[:_SHOWN_CHARS]!r}"
    if math.isnan(value):
        raise ConfigError(f"{what} returned {str(reward)[:40]!r} {shown}; a reward is a number from 0 to 1") from None
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{what} returned {value:g} {shown}; rewards must be between 0 and 1, so rescale them")
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
    if any(not 0.0 <= weight < math.inf for weight in weights):
        raise ConfigError(
            f"tasks.environment: {place!r} has the weights {weights!s:.80}; they must be numbers from 0, so turn a "
            "penalty into a reward for its absence"
        )
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


def _check_arguments(what: str, function: Callable[..., Any], names: Iterable[str]) -> None:
    """ConfigError if a reward function needs other arguments than these."""
    known = dict.fromkeys(names)
    try:
        inspect.signature(function).bind(**_pick_arguments(function, known))
    except TypeError as error:
        raise ConfigError(f"{what}: {error} of the function; arguments are {', '.join(sorted(known))}") from None


def _call_function(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Call a reward function by keyword, with the arguments it declares; a coroutine is run to completion."""
    result = function(**_pick_arguments(function, known))
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _pick_arguments(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a function declares; all if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in known.items() if takes_all or name in parameters}
