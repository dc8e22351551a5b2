"""The tasks that a run's settings name: a family or a task set, with target lengths if configured."""

import logging
from collections.abc import Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from shoal.config.run import Option, RunConfig, Settings, TasksConfig
from shoal.errors import ConfigError
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task, list_tasks
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import SetError, TaskSet
from shoal.tasks.split import describe_heldout, heldout_tasks, train_task

logger = logging.getLogger(__name__)

SFT_SEED = "warmup"
"""Name of the seeds of SFT. Changing breaks: the bits of every fine-tuned v0."""
Run = TypeVar("Run", bound=RunConfig)
Part = TypeVar("Part", bound=Settings)


def open_tasks(config: RunConfig, options: Mapping[str, Option] | None = None) -> Family:
    """The tasks of a run; `options` override those of its family, for SFT."""
    return aim_family(open_family(config.tasks, options), config.length)


def draw_tasks(family: Family, config: RunConfig) -> list[Task]:
    """The held-out tasks of a run's evaluations."""
    return heldout_tasks(family, config.eval.tasks, derive_seed("eval", config.seed))


def draw_demonstrated(family: Family, config: RunConfig) -> list[Task]:
    """The held-out tasks of a run's SFT."""
    return heldout_tasks(family, config.sft.heldout, derive_seed(SFT_SEED, config.seed))


def check_tasks(config: Run) -> Run:
    """The settings with tasks for training, SFT and evaluation; ConfigError if they are not available."""
    family = open_tasks(config)
    train_task(family, seed=0)
    config = fit_evaluation(family, config)
    if config.sft.options:
        family = open_tasks(config, config.sft.options)
    if not config.sft.steps:
        return config
    for task in list_tasks(family) or ():
        family.demonstrate(task)
    fitted = _fit_count("sft.heldout", config.sft, family, draw_demonstrated(family, config))
    return config.model_copy(update={"sft": fitted})


def fit_evaluation(family: Family, config: Run) -> Run:
    """The settings with as many evaluated tasks as there are, if there are fewer than the default."""
    return config.model_copy(update={"eval": _fit_count("eval.tasks", config.eval, family, draw_tasks(family, config))})


def _fit_count(key: str, settings: Part, family: Family, found: list[Task]) -> Part:
    """Settings that want no more held-out tasks than were found; ConfigError if the user wants more."""
    name = key.rpartition(".")[2]
    wanted, count = getattr(settings, name), len(found)
    if count == wanted:
        return settings
    there = describe_heldout(family, count)
    if not found or name in settings.model_fields_set:
        more = "widen tasks.options" if list_tasks(family) is None else "add tasks"
        cure = f"set {key}={count} or {more}" if found else more
        raise ConfigError(f"{key}: is {wanted}, but {there}; {cure}")
    logger.warning(f"{key}: {there}, so {count} are used instead of {wanted}")
    return settings.model_copy(update={name: count})


def pin_tasks(config: RunConfig) -> RunConfig:
    """The same settings with task set and user code pinned by hash, so that a run resumes with the same tasks."""
    tasks, pinned = config.tasks, {}
    if tasks.set:
        places = [str(Path(place).resolve()) if Path(place).exists() else place for place in tasks.set]
        pinned = {"set": places, "hash": read_set(tasks).hash}
    if code := tasks.reward or tasks.environment:
        from shoal.tasks.adapters import hash_source

        pinned["code_hash"] = hash_source("tasks.reward" if tasks.reward else "tasks.environment", code)
        if tasks.code_hash not in ("", pinned["code_hash"]):
            raise ConfigError(f"tasks.code_hash: the source file of {code} has the hash {pinned['code_hash']}")
    return config.model_copy(update={"tasks": tasks.model_copy(update=pinned)})


def open_family(config: TasksConfig, options: Mapping[str, Option] | None = None) -> Family:
    """The tasks without target lengths."""
    if options and (config.set or config.environment):
        raise ConfigError("sft.options applies to task families only; tasks here is a task set")
    if config.environment:
        from shoal.tasks.adapters import load_environment

        return load_environment(config.environment)
    if not config.set:
        return load_family(config.name, {**config.options, **(options or {})})
    family = SetFamily(read_set(config), config.filter, config.weights, config.stages)
    if config.reward:
        from shoal.tasks.adapters import RewardFamily

        return RewardFamily(family, config.reward)
    family.check_tasks()
    return family


def read_set(config: TasksConfig) -> TaskSet:
    """The task set in the settings, if it has the hash given there."""
    tasks = _open_known(tuple(config.set), tuple(_stamp_place(place) for place in config.set))
    if config.hash and tasks.hash != config.hash:
        raise SetError(f"tasks.hash: the tasks of {tasks.name} have the hash {tasks.hash}")
    return tasks


@lru_cache(maxsize=2)
def _open_known(places: tuple[str, ...], _stamps: tuple[Hashable, ...]) -> TaskSet:
    """The set of the places; cached while its files are unchanged, because a start opens it several times."""
    return open_set(places)


def _stamp_place(place: str) -> Hashable:
    """A value that changes when the files of a place do."""
    for text in (place, place.partition(":")[2]):
        path = Path(text).expanduser()
        if text and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return None


def check_swarm(config: RunConfig) -> None:
    """Reject what a swarm cannot have: user code, which other nodes do not run, and a choice of tasks."""
    for key, value in (("reward", config.tasks.reward), ("environment", config.tasks.environment)):
        if value:
            raise ConfigError(f"tasks.{key}: user code scores only in `shoal train`; a swarm needs verifiers by name")
    if config.batch.curriculum:
        raise ConfigError(
            "batch.curriculum: a swarm's tasks follow from its beacons; use it only with `shoal train`. For a "
            "curriculum by step use tasks.schedule"
        )
