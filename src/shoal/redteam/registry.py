"""Attacks by name."""

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.worker.author import Author

_ATTACKS = {"int8": ("shoal.redteam.int8", "Int8Author"), "stale": ("shoal.redteam.stale", "StaleAuthor")}


def list_attacks() -> tuple[str, ...]:
    """The names of all attacks, sorted."""
    return tuple(sorted(_ATTACKS))


def load_attack(name: str) -> "type[Author]":
    """The author that cheats in this way."""
    if name not in _ATTACKS:
        raise ConfigError(f"--attack {name}: no such attack; there are {', '.join(list_attacks())}")
    module, author = _ATTACKS[name]
    found: type[Author] = getattr(import_module(module), author)
    return found
