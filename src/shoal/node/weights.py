"""The weights of a run, as a role gets them: through the relays of the descriptor, signed by its publisher."""

import hashlib
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


def describe_relays(client: Client) -> str:
    """Of each relay what last went wrong; empty if nothing did."""
    shares = client.progress.sources
    return ", ".join(f"{share.url}: {share.reason}" for share in shares if share.reason)


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


class Opener:
    """Opens the versions of a run. Those that differ from the one before in nothing but weights are opened faster."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._last: tuple[str, Policy] | None = None

    def open(self, version: int, folder: Path) -> "Policy":
        """The policy of a version that was pulled into a folder; ConfigError if it is not one of this run."""
        from shoal.policy.model import WEIGHTS, copy_policy

        papers = _hash_papers(folder, WEIGHTS)
        policy = None
        if self._last is not None and self._last[0] == papers:
            policy = copy_policy(self._last[1], folder / WEIGHTS)
        if policy is None:
            policy = open_version(version, folder, self._recipe)
        self._last = papers, policy
        return policy


def _hash_papers(folder: Path, weights: str) -> str:
    """A hash of all files but the weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != weights:
            digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
