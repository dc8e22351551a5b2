"""Task families by name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.config import Option
from shoal.errors import ConfigError
from shoal.tasks.arithmetic import Arithmetic
from shoal.tasks.base import Family, Task
from shoal.tasks.chain import Chain
from shoal.tasks.countdown import Countdown
from shoal.tasks.options import OptionCard, apply_options, list_options
from shoal.tasks.reverse import Reverse
from shoal.tasks.sort import Sort
from shoal.tasks.split import train_task
from shoal.tasks.total import Total

GYM = "gym_"
_FAMILIES: dict[str, type[Family]] = {
    "arithmetic": Arithmetic,
    "chain": Chain,
    "countdown": Countdown,
    "reverse": Reverse,
    "sort": Sort,
    "total": Total,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCard:
    """A family as the command line shows it, with an example at its default options."""

    name: str
    summary: str
    options: tuple[OptionCard, ...]
    task: Task
    demonstration: str


def list_families() -> tuple[str, ...]:
    """The names of all families, sorted."""
    return tuple(sorted(_FAMILIES))


def load_family(name: str, options: Mapping[str, Option]) -> Family:
    """The family of that name with these options over its defaults; `gym_NAME` is one of reasoning-gym's."""
    if name.startswith(GYM):
        from shoal.tasks.gym import open_gym  # here, for it needs a package of its own

        return open_gym(name.removeprefix(GYM), options)
    return apply_options(_find_family(name), options)


def describe_family(name: str) -> FamilyCard:
    """What there is to know about a family."""
    build = _find_family(name)
    family = build()
    task = train_task(family, seed=0)
    return FamilyCard(
        name=name,
        summary=inspect.cleandoc(build.__doc__ or ""),
        options=list_options(build),
        task=task,
        demonstration=family.demonstrate(task),
    )


def _find_family(name: str) -> type[Family]:
    if name not in _FAMILIES:
        allowed = f"{', '.join(list_families())}, and {GYM}NAME for those of reasoning-gym"
        raise ConfigError(f"tasks.name = {name!r}: no such family; allowed are {allowed}")
    return _FAMILIES[name]
