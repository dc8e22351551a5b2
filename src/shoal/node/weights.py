"""The weights of a run: pulled through the relays in the descriptor, opened, and cached by version.

Weights are trusted because the run's publisher signed their manifest; the relays that deliver them are not trusted.
A version is a whole model or an adapter over v0; both are opened as a whole model.

Invariants:
- cached policies stay within `memory_bytes`, except that the version requested last is always kept, and that beside
  which it was requested. One that leaves is overwritten by the next, so that no other copy is made;
- unreachable relays are retried for as long as the caller has time. A version is reported as unavailable only if no
  relay has it any more.
"""

import asyncio
import hashlib
import logging
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.node.session import Session
from shoal.policy.adapter import Adapter, find_base, is_adapter, merge_adapter, read_adapter
from shoal.policy.model import Policy, copy_policy, load_over, open_policy
from shoal.policy.weights import is_weights
from shoal.recipe import Recipe
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.shardcast.format.layout import BASE_VERSION
from shoal.toploc.calibration import hash_model
from shoal.util.process import release_memory, tune_memory
from shoal.util.waits import WaitError

logger = logging.getLogger(__name__)

NEW_VERSION_S = 3600.0
"""after which a wait for a new version is overdue; it starts again"""


@asynccontextmanager
async def open_weights(
    session: Session, folder: Path, *, keep: int, only: int | None = None, with_base: bool = True
) -> AsyncIterator[ShardcastClient]:
    """A client that pulls the run's versions, or `only` one of them, into `folder`; adapters `with_base`."""
    found = session.descriptor
    if not found.publisher or not found.relays:
        raise ConfigError(f"run {found.run}: the descriptor names no publisher or no relays for weights")
    client = await ShardcastClient.open(
        folder,
        found.relays,
        run=found.run,
        publisher=found.publisher,
        keep=keep,
        only=only,
        with_base=with_base,
        authority=session.authority,
    )
    async with client:
        yield client


def describe_relays(client: ShardcastClient) -> str:
    """The last error of each relay that had one."""
    shares = client.progress.upstreams
    return ", ".join(f"{share.url}: {share.reason}" for share in shares if share.reason)


def number_version(folder: Path) -> int:
    """The version in a folder that a client wrote."""
    return int(folder.name.removeprefix("v"))


def open_version(version: int, folder: Path, recipe: Recipe, device: torch.device | str = "cpu") -> Policy:
    """The policy of a version that was pulled into a folder; ConfigError if it does not belong to this run."""
    policy = open_policy(folder, dtype=getattr(torch, recipe.dtype), device=device)
    if hash_model(policy.model) != recipe.model:
        raise ConfigError(f"{folder}: version {version} has a different architecture than the recipe")
    policy.model.eval()
    tune_memory(policy.num_bytes)
    return policy


class WeightsOpener:
    """Opens the versions of a run. A version that differs from the previous one only in weights opens faster.

    All weights are read from files, those of an adapter from v0's, so it does not matter which version was there
    before.
    """

    def __init__(self, recipe: Recipe, device: torch.device | str = "cpu") -> None:
        self._recipe, self._device = recipe, device
        self._last: tuple[str, Policy] | None = None
        """the previous policy, and a hash of its files other than weights; its weights may have been replaced"""

    def open(self, version: int, folder: Path, base: Path | None = None, *, over: Policy | None = None) -> Policy:
        """The policy of a version that was pulled into a folder; ConfigError if it does not belong to this run.

        `base` is the folder of v0 if it is not beside that of an adapter. `over` is a policy from here that nobody uses
        any more: its memory is used again, so that it becomes this version, if they differ only in weights.
        """
        adapter, whole = None, folder
        if is_adapter(folder):
            adapter, whole = read_adapter(folder), find_base(folder) if base is None else base
        other_files = _hash_other_files(whole)
        policy = self._load_again(other_files, whole, adapter, over)
        if policy is None:
            policy = open_version(version if adapter is None else BASE_VERSION, whole, self._recipe, self._device)
            if adapter is not None:
                merge_adapter(policy.model, adapter, whole)
            release_memory(policy.num_bytes)  # copies that opening makes
        self._last = other_files, policy
        return policy

    def _load_again(self, other_files: str, whole: Path, adapter: Adapter | None, over: Policy | None) -> Policy | None:
        """The version in the memory of `over`, or in a copy of the previous one; None if they differ in more."""
        if self._last is None or self._last[0] != other_files:
            return None
        last = self._last[1]
        # Policies that differ only in weights share their tokenizer.
        if over is not None and over.tokenizer is last.tokenizer:
            return over if load_over(over, whole, adapter) else None
        return copy_policy(last, whole, adapter)


def _hash_other_files(folder: Path) -> str:
    """A hash of all files except the weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not is_weights(path.name):
            digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


MEMORY_BYTES = 4 << 30
PULL_S = 120.0
"""after which a wait for weights is overdue and starts again"""


class PolicyCache:
    """The policies of a run, by version."""

    def __init__(
        self,
        session: Session,
        client: ShardcastClient,
        recipe: Recipe,
        folder: Path,
        *,
        memory_bytes: int = MEMORY_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        """`folder` is for versions that the client no longer follows."""
        self._session, self._client, self._folder, self._memory_bytes = session, client, folder, memory_bytes
        self._opener = WeightsOpener(recipe, device)
        self._policies: OrderedDict[int, Policy] = OrderedDict()

    async def find(self, version: int, *, beside: Collection[int] = ()) -> Policy | None:
        """The policy of a version, however long that takes; None if no relay has it any more.

        Policies that were found before are invalid then, except for those of the versions `beside` it.
        """
        if version not in self._policies:
            try:
                folder = await self._session.waits.retry_forever(
                    "weights",
                    lambda: self._client.pull(version),
                    waiting_for="the relays",
                    timeout_s=PULL_S,
                    reason=describe_relays(self._client),
                )
                self._policies[version] = await self._open(version, folder, None, beside)
            except GoneError:
                policy = await self._find_old(version, beside)
                if policy is None:
                    return None
                self._policies[version] = policy
        self._policies.move_to_end(version)
        return self._policies[version]

    async def _open(self, version: int, folder: Path, base: Path | None, beside: Collection[int]) -> Policy:
        """Open a version in the memory of the oldest that must leave for it."""
        over = None
        while (leaving := self._find_leaving(beside)) is not None:
            over = self._policies.pop(leaving)
        return await asyncio.to_thread(partial(self._opener.open, version, folder, base, over=over))

    def _find_leaving(self, beside: Collection[int]) -> int | None:
        """The version that must leave for one more of the same size; None if there is room, or if all are needed."""
        sizes = [policy.num_bytes for policy in self._policies.values()]
        if not sizes or sum(sizes) + sizes[-1] <= self._memory_bytes:
            return None
        return next((version for version in self._policies if version not in beside), None)

    async def _find_old(self, version: int, beside: Collection[int]) -> Policy | None:
        """A version that this node no longer follows, as an appeal needs it; None if no relay has it."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            async with open_weights(self._session, Path(folder), keep=1, only=version, with_base=False) as client:
                try:
                    found = await self._pull_old(client, version)
                    base = await self._pull_old(self._client, BASE_VERSION) if is_adapter(found) else None
                except (GoneError, WaitError) as error:
                    logger.warning(f"v{version} is unavailable: {error}")
                    return None
                return await self._open(version, found, base, beside)

    async def _pull_old(self, client: ShardcastClient, version: int) -> Path:
        return await self._session.waits.with_timeout(
            "old weights", client.pull(version), waiting_for="the relays", timeout_s=PULL_S
        )
