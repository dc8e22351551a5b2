"""The tasks that a run's settings name: a family or a task set, with target lengths if they ask for them."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shoal.config import FilterConfig, Option, RunConfig, Stage, TasksConfig
from shoal.errors import ConfigError
from shoal.tasks.base import Family
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets import SetError, SetFamily, SetFilter, TaskSet, open_set


def open_tasks(config: RunConfig, options: Mapping[str, Option] | None = None) -> Family:
    """The tasks of a run; `options` are laid over those of its family, for a warm-up."""
    return aim_family(open_family(config.tasks, options), config.length)


def check_tasks(config: RunConfig) -> Family:
    """The tasks of a run; ConfigError where those of its training or its warm-up cannot be had."""
    if config.warmup.options:
        open_tasks(config, config.warmup.options)
    return open_tasks(config)


def pin_tasks(config: RunConfig) -> RunConfig:
    """The same settings with their task set by hash and full path, so that a run goes on with the same tasks."""
    if not config.tasks.set:
        return config
    places = [str(Path(place).resolve()) if Path(place).exists() else place for place in config.tasks.set]
    tasks = config.tasks.model_copy(update={"set": places, "hash": read_set(config.tasks).hash})
    return config.model_copy(update={"tasks": tasks})


def open_family(config: TasksConfig, options: Mapping[str, Option] | None = None) -> Family:
    """The tasks without target lengths."""
    if options and (config.set or config.environment):
        raise ConfigError("warmup.options: are those of a family, and the tasks are none")
    if config.environment:
        from shoal.tasks.adapters import load_environment

        return load_environment(config.environment)
    if not config.set:
        return load_family(config.name, {**config.options, **(options or {})})
    family = build_set_family(read_set(config), config.filter, config.weights, config.stages)
    if config.reward:
        from shoal.tasks.adapters import RewardFamily

        return RewardFamily(family, config.reward)
    family.check_tasks()
    return family


def read_set(config: TasksConfig) -> TaskSet:
    """The task set that settings name, if it has the hash that they say."""
    tasks = _open_known(tuple(config.set), tuple(_stamp_place(place) for place in config.set))
    if config.hash and tasks.hash != config.hash:
        raise SetError(f"tasks.hash: the tasks of {tasks.name} have the hash {tasks.hash}")
    return tasks


@lru_cache(maxsize=2)
def _open_known(places: tuple[str, ...], _stamps: tuple[Hashable, ...]) -> TaskSet:
    """The set of places; not read again while its files stay as they are, for a start asks for it several times."""
    return open_set(places)


def _stamp_place(place: str) -> Hashable:
    """What changes when a place's files do."""
    for text in (place, place.partition(":")[2]):
        path = Path(text).expanduser()
        if text and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return None


def build_set_family(
    tasks: TaskSet, wanted: FilterConfig, weights: Mapping[str, int], stages: Sequence[Stage]
) -> SetFamily:
    """A set as settings or a recipe have it filtered, mixed and scheduled."""
    kept = SetFilter(model=wanted.model, low=wanted.min, high=wanted.max, max_chars=wanted.max_chars)
    narrowed = [
        (stage.step, replace(kept, low=max(kept.low, stage.min), high=min(kept.high, stage.max))) for stage in stages
    ]
    return SetFamily(tasks, kept, weights, narrowed)


def check_swarm(config: RunConfig) -> None:
    """Refuse what a swarm cannot have: code of the user's own, which no stranger runs, and a choice of tasks."""
    for key, value in (("reward", config.tasks.reward), ("environment", config.tasks.environment)):
        if value:
            raise ConfigError(f"tasks.{key}: own code scores in `shoal train` alone; a swarm has verifiers by name")
    if config.batch.curriculum:
        raise ConfigError(
            "batch.curriculum: a swarm's tasks follow from its beacons; it is for `shoal train` alone. A curriculum by "
            "step is tasks.schedule"
        )
