"""Task families by name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.config.run import Option
from shoal.errors import ConfigError
from shoal.tasks.base import Family, Task
from shoal.tasks.families.arithmetic import Arithmetic
from shoal.tasks.families.countdown import Countdown
from shoal.tasks.families.digit_sum import DigitSum
from shoal.tasks.families.expression_chain import ExpressionChain
from shoal.tasks.families.sort import Reverse, Sort
from shoal.tasks.options import OptionCard, apply_options, list_options
from shoal.tasks.split import train_task

GYM = "gym_"
_CLASSES = (Arithmetic, Countdown, DigitSum, ExpressionChain, Reverse, Sort)
_FAMILIES: dict[str, type[Family]] = {family.name: family for family in _CLASSES}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCard:
    """A family as shown on the command line, with an example at its default options."""

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
        from shoal.tasks.families.reasoning_gym import open_gym  # imported lazily: needs an optional package

        return open_gym(name.removeprefix(GYM), options)
    return apply_options(_find_family(name), options)


def describe_family(name: str) -> FamilyCard:
    """The description of a family."""
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
