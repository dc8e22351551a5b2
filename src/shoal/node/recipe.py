"""The run's recipe and its task set as a role gets them: from the coordinator or the own folder, and by hash alone."""

import hashlib
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.node.session import ASK_S, Session
from shoal.recipe import Recipe, RecipeError, load_recipe
from shoal.swarm.papers import MAX_TASKS_BYTES
from shoal.tasks.sets import open_set

_NAME, _TASKS_NAME = "recipe.json", "tasks.jsonl"
TASKS_S = 600.0
"""for a task set, which may be some megabytes"""


async def fetch_recipe(session: Session, folder: Path, *, tasks: Path | None = None) -> Recipe:
    """The recipe that the descriptor names, its task set at hand; ConfigError if there is none, or one that this
    program does not know. `tasks` is a file with the task set, for who has it already."""
    recipe = await read_recipe(session, folder)
    return await bring_tasks(session, recipe, folder, tasks=tasks) if recipe.set.hash else recipe


async def read_recipe(session: Session, folder: Path) -> Recipe:
    """The same without its task set, for who scores nothing."""
    wanted = session.descriptor.tasks
    if not wanted:
        raise ConfigError(f"run {session.descriptor.run}: its descriptor names no recipe")
    path = folder / _NAME
    if not path.exists() or _hash(path.read_bytes()) != wanted:
        data = await session.waits.insist(
            "recipe", session.client.read_recipe, for_whom="the coordinator", timeout_s=ASK_S
        )
        if _hash(data) != wanted:
            raise ConfigError("the coordinator has another recipe than the run's descriptor says")
        write_atomic(path, data)
    try:
        return load_recipe(path.read_bytes())
    except RecipeError as error:
        raise ConfigError(f"run {session.descriptor.run}: {error}; another version of shoal may know it") from None


async def bring_tasks(session: Session, recipe: Recipe, folder: Path, *, tasks: Path | None = None) -> Recipe:
    """A recipe with its task set, from a file, from the node's folder or from the coordinator."""
    path, terms = folder / _TASKS_NAME, recipe.set
    if tasks is not None:
        write_atomic(path, read_tasks(tasks, recipe))
    elif not path.exists() or path.stat().st_size != terms.size or _hash(path.read_bytes()) != terms.hash:
        if terms.size > MAX_TASKS_BYTES:
            raise ConfigError(f"the run's task set has {terms.size} bytes, which no coordinator hands out; use --tasks")
        client = session.client
        data = await session.waits.insist(
            "tasks", lambda: client.read_tasks(terms.size), for_whom="the coordinator", timeout_s=TASKS_S
        )
        if _hash(data) != terms.hash:
            raise ConfigError("the coordinator has another task set than the run's recipe says")
        write_atomic(path, data)
    return recipe.bring_set(path.read_bytes())


def read_tasks(path: Path, recipe: Recipe) -> bytes:
    """The canonical bytes of a recipe's task set from a file in any format that says the same."""
    data = open_set([str(path)]).data
    if _hash(data) != recipe.set.hash:
        raise ConfigError(f"{path}: holds other tasks than the run's recipe says")
    return data


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
