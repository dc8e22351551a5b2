"""Load the run's recipe and task set, from the coordinator or the node's folder, identified by hash."""

import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from shoal.errors import ConfigError
from shoal.node.session import ASK_S, Session
from shoal.protocol.params import MAX_TASKS_BYTES
from shoal.recipe import Recipe, RecipeError, load_recipe
from shoal.tasks.sets.sources import open_set
from shoal.util.files import write_atomic

_NAME, _TASKS_NAME = "recipe.json", "tasks.jsonl"
TASKS_S = 600.0
"""timeout for a task set, which may have some megabytes"""


async def fetch_recipe(session: Session, folder: Path, *, tasks: Path | None = None) -> Recipe:
    """The recipe that the descriptor names, with its task set; ConfigError if there is none, or one that this program
    does not support. `tasks` is a file with the task set, for users that have it already."""
    recipe = await read_recipe(session, folder)
    return await bring_tasks(session, recipe, folder, tasks=tasks) if recipe.set.hash else recipe


async def read_recipe(session: Session, folder: Path) -> Recipe:
    """The recipe without its task set, for roles that score nothing."""
    wanted = session.descriptor.tasks
    if not wanted:
        raise ConfigError(f"run {session.descriptor.run}: the descriptor names no recipe")
    read, otherwise = session.client.read_recipe, "a different recipe than the run's descriptor"
    data = await fetch_by_hash(session, folder / _NAME, wanted, "recipe", read, otherwise=otherwise)
    try:
        return load_recipe(data)
    except RecipeError as error:
        raise ConfigError(f"run {session.descriptor.run}: {error}; try another version of shoal") from None


async def bring_tasks(session: Session, recipe: Recipe, folder: Path, *, tasks: Path | None = None) -> Recipe:
    """The recipe with its task set, from a file, the node's folder or the coordinator."""
    path, terms = folder / _TASKS_NAME, recipe.set
    if tasks is not None:
        write_atomic(path, read_tasks(tasks, recipe))
    elif terms.size > MAX_TASKS_BYTES and not _has_file(path, terms.hash):
        raise ConfigError(f"the run's task set has {terms.size} bytes, too many to download; pass it with --tasks")
    read, otherwise = partial(session.client.read_tasks, terms.size), "a different task set than the run's recipe"
    data = await fetch_by_hash(session, path, terms.hash, "tasks", read, otherwise=otherwise, timeout_s=TASKS_S)
    return recipe.bring_set(data)


async def fetch_by_hash(
    session: Session,
    path: Path,
    digest: str,
    name: str,
    read: Callable[[], Awaitable[bytes]],
    *,
    otherwise: str,
    timeout_s: float = ASK_S,
) -> bytes:
    """A file of the run that its descriptor or recipe names by hash, from the node's folder or the coordinator.

    `otherwise` describes a file of the coordinator that has another hash, for the error.
    """
    if not _has_file(path, digest):
        data = await session.ask_coordinator(name, read, timeout_s=timeout_s)
        if _hash(data) != digest:
            raise ConfigError(f"the coordinator has {otherwise}")
        write_atomic(path, data)
    return path.read_bytes()


def read_tasks(path: Path, recipe: Recipe) -> bytes:
    """The canonical bytes of a recipe's task set, from a file in any supported format with the same tasks."""
    data = open_set([str(path)]).data
    if _hash(data) != recipe.set.hash:
        raise ConfigError(f"{path}: has different tasks than the run's recipe")
    return data


def _has_file(path: Path, digest: str) -> bool:
    return path.exists() and _hash(path.read_bytes()) == digest


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
