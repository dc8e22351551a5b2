"""The tasks that a run's settings name: a family or a task set, with target lengths if configured."""

from collections.abc import Hashable, Mapping
from functools import lru_cache
from pathlib import Path

from shoal.config.run import Option, RunConfig, TasksConfig
from shoal.errors import ConfigError
from shoal.tasks.base import Family
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import SetError, TaskSet


def open_tasks(config: RunConfig, options: Mapping[str, Option] | None = None) -> Family:
    """The tasks of a run; `options` override those of its family, for SFT."""
    return aim_family(open_family(config.tasks, options), config.length)


def check_tasks(config: RunConfig) -> Family:
    """The tasks of a run; ConfigError if those of its training or its SFT are not available."""
    if config.sft.options:
        open_tasks(config, config.sft.options)
    return open_tasks(config)


def pin_tasks(config: RunConfig) -> RunConfig:
    """The same settings with task set and user code pinned by hash, so that a run resumes with the same tasks."""
    tasks, pinned = config.tasks, {}
    if tasks.set:
        places = [str(Path(place).resolve()) if Path(place).exists() else place for place in tasks.set]
        pinned = {"set": places, "hash": read_set(tasks).hash}
    if code := tasks.reward or tasks.environment:
        from shoal.tasks.adapters import hash_source

        pinned["code_hash"] = hash_source(code)
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
