"""The run's recipe as a role gets it: from the coordinator or the own folder, and only with the descriptor's hash."""

import hashlib
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.node.session import ASK_S, Session
from shoal.recipe import Recipe, RecipeError, load_recipe

_NAME = "recipe.json"


async def fetch_recipe(session: Session, folder: Path) -> Recipe:
    """The recipe that the descriptor names; ConfigError if there is none, or one that this program does not know."""
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


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
