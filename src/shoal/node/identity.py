"""The identity of a node: its key, and its owner's delegation. Both are created when a folder is first used.

    <folder>/node.key          the node's key
    <folder>/owner.key         the owner's key, created here unless one is given: for nodes operated by their owner
    <folder>/delegation.json   what the owner allows the node

A delegation that ends within `RENEW_MS`, or does not match, is replaced if the owner's key is available.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.identity.delegation import Delegation, Grant, Scope, open_delegation, sign_delegation
from shoal.identity.documents import DocumentError
from shoal.identity.keys import Key
from shoal.util.clock import read_clock
from shoal.util.files import write_atomic

DAY_MS = 86_400_000
LIFE_MS = 90 * DAY_MS
RENEW_MS = 30 * DAY_MS
MAX_LEASES = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key and its delegation, as the signed document."""

    key: Key
    delegation: bytes

    @property
    def owner(self) -> str:
        """The public key of the owner."""
        return open_delegation(self.delegation).owner

    @property
    def digest(self) -> str:
        """Hash of the delegation."""
        return open_delegation(self.delegation).digest


def load_identity(
    folder: Path, run: str, scope: Scope, *, owner: Path | None = None, clock: Callable[[], int] = read_clock
) -> Identity:
    """The identity in a folder; `owner` is the file of an owner's key to use instead of the folder's own."""
    key = Key.open(folder / "node.key")
    path = folder / "delegation.json"
    now_ms = clock()
    document = path.read_bytes().rstrip(b"\n") if path.exists() else None  # `shoal owner delegate` ends it as a line
    held = None if document is None else _open_delegation(path, document)
    if document is not None and owner is None and not (folder / "owner.key").exists():
        return Identity(key, document)  # signed elsewhere: we have no key to sign another
    owner_key = Key.open(folder / "owner.key") if owner is None else Key.load(owner)
    if held is None or not _is_good(held, owner_key.public, key.public, run, scope, now_ms):
        # Valid from a day ago: the coordinator's clock may be behind ours.
        grant = Grant(key.public, run, now_ms - DAY_MS, now_ms + LIFE_MS, frozenset({scope}), MAX_LEASES)
        document = sign_delegation(owner_key, grant)
        write_atomic(path, document)
    assert document is not None, "held or signed now"
    return Identity(key, document)


def _open_delegation(path: Path, document: bytes) -> Delegation:
    try:
        return open_delegation(document)
    except DocumentError as error:
        raise ConfigError(f"{path}: {error}; remove it, or put the owner's delegation there") from None


def _is_good(held: Delegation, owner: str, node: str, run: str, scope: Scope, now_ms: int) -> bool:
    grant = held.grant
    is_ours = (held.owner, grant.node, grant.run) == (owner, node, run) and scope in grant.scopes
    return is_ours and grant.not_after_ms - now_ms > RENEW_MS
