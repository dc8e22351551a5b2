"""The weights of a run, as a role gets them: through the relays of the descriptor, signed by its publisher."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.node.session import Session
from shoal.recipe import Recipe
from shoal.shardcast.client import Client

if TYPE_CHECKING:
    from shoal.policy.model import Policy

LOOK_S = 3600.0
"""No new version for so long is worth a word; then the look begins anew."""


@asynccontextmanager
async def open_weights(session: Session, folder: Path, *, keep: int) -> AsyncIterator[Client]:
    """A client that pulls the run's versions below `folder`."""
    found = session.descriptor
    if not found.publisher or not found.relays:
        raise ConfigError(f"run {found.run}: its descriptor names no publisher or no relays of weights")
    client = await Client.open(
        folder, found.relays, run=found.run, publisher=found.publisher, keep=keep, note=session.note
    )
    async with client:
        yield client


def number_version(folder: Path) -> int:
    """The version that a folder of a client holds."""
    return int(folder.name.removeprefix("v"))


def open_version(version: int, folder: Path, recipe: Recipe) -> "Policy":
    """The policy of a version that was pulled into a folder; ConfigError if it is not one of this run."""
    import torch  # here, for a look at this module needs none of it

    from shoal.policy.model import open_policy
    from shoal.toploc.calibration import hash_model

    policy = open_policy(folder, dtype=getattr(torch, recipe.dtype))
    if hash_model(policy.model) != recipe.model:
        raise ConfigError(f"{folder}: version {version} has another architecture than the recipe says")
    policy.model.eval()
    return policy
