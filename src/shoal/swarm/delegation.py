"""What an owner allows a node: a delegation signed by the owner's key, and its revocation.

The owner's key stays offline; a worker holds a node key and the owner's delegation to it. Whoever steals the node key
can do what the delegation says, until it ends or the owner revokes it.

Invariants:
- a delegation names one node and one run, and ends; the owner is whoever signed it, never a field;
- a document has one spelling, and its name is its hash, not its signature;
- a revocation is for good: it ends every delegation of that owner to that node, earlier and later ones. A node that
  shall work again gets a new key.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from shoal.keys import Key, check_public
from shoal.runname import check_run
from shoal.swarm.refusal import AuthError
from shoal.swarm.tags import DocumentError, Tag, open_claimed, sign_document

MAX_DOCUMENT_BYTES = 2048
MAX_LEASES = 4096
MAX_LIFETIME_MS = 366 * 86_400_000
_MAX_TIME_MS = 2**53


class Scope(StrEnum):
    """What a node may be allowed to do."""

    WORK = "work"
    VALIDATE = "validate"
    TRAIN = "train"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class Grant:
    """What is delegated: may act for `run` from `not_before_ms` up to, not including, `not_after_ms`."""

    node: str
    run: str
    not_before_ms: int
    not_after_ms: int
    scopes: frozenset[Scope]
    max_leases: int
    """held at once"""

    def __post_init__(self) -> None:
        check_public(self.node)
        check_run(self.run)
        if not 0 <= self.not_before_ms < self.not_after_ms <= _MAX_TIME_MS:
            raise ValueError("a delegation must begin before it ends")
        if self.not_after_ms - self.not_before_ms > MAX_LIFETIME_MS:
            raise ValueError(f"a delegation may last {MAX_LIFETIME_MS // 86_400_000} days at most")
        if not self.scopes:
            raise ValueError(f"a delegation allows at least one of {', '.join(Scope)}")
        if not 0 <= self.max_leases <= MAX_LEASES:
            raise ValueError(f"a delegation allows 0 to {MAX_LEASES} leases at once")


@dataclass(frozen=True, slots=True)
class Delegation:
    """A grant that an owner signed."""

    owner: str
    grant: Grant
    digest: str
    """name of the document"""


@dataclass(frozen=True, slots=True)
class Revocation:
    """An owner's word that a node no longer acts for it."""

    owner: str
    node: str
    run: str


def sign_delegation(owner: Key, grant: Grant) -> bytes:
    """The owner delegates."""
    body = {
        "max_leases": grant.max_leases,
        "node": grant.node,
        "not_after_ms": grant.not_after_ms,
        "not_before_ms": grant.not_before_ms,
        "run": grant.run,
        "scopes": sorted(scope.value for scope in grant.scopes),
    }
    return sign_document(owner, Tag.DELEGATION, body)


def open_delegation(data: bytes) -> Delegation:
    """A delegation whose signature holds; `DocumentError` otherwise. Whether it is good now: `check_delegation`."""
    owner, body = open_claimed(Tag.DELEGATION, data, max_bytes=MAX_DOCUMENT_BYTES)
    if body.keys() != {"max_leases", "node", "not_after_ms", "not_before_ms", "run", "scopes"}:
        raise DocumentError("not a delegation")
    try:
        grant = Grant(
            node=_take_text(body, "node"),
            run=_take_text(body, "run"),
            not_before_ms=_take_count(body, "not_before_ms"),
            not_after_ms=_take_count(body, "not_after_ms"),
            scopes=_take_scopes(body),
            max_leases=_take_count(body, "max_leases"),
        )
    except ValueError as error:
        raise DocumentError(str(error)) from None
    return Delegation(owner, grant, hashlib.sha256(data).hexdigest())


def check_delegation(delegation: Delegation, *, node: str, run: str, now_ms: int) -> None:
    """Refuse a delegation that does not allow this node to act for this run now."""
    grant = delegation.grant
    if grant.node != node:
        raise AuthError(403, "delegation", "the delegation is for another node key")
    if grant.run != run:
        raise AuthError(403, "delegation", f"the delegation is for another run; here is run {run}")
    check_term(grant.not_before_ms, grant.not_after_ms, now_ms)


def check_term(not_before_ms: int, not_after_ms: int, now_ms: int) -> None:
    """Refuse what is not delegated yet, or no longer."""
    if now_ms < not_before_ms:
        wait_s = -((now_ms - not_before_ms) // 1000)
        raise AuthError(403, "delegation", f"the owner's delegation to this node begins in {wait_s} s")
    if now_ms >= not_after_ms:
        ago_s = (now_ms - not_after_ms) // 1000
        raise AuthError(403, "delegation", f"the owner's delegation to this node ended {ago_s} s ago; make a new one")


def refuse_revoked() -> AuthError:
    """What a revoked node hears."""
    return AuthError(403, "revoked", "the owner revoked this node; make a new node key and delegate to it")


def refuse_left() -> AuthError:
    """What a node hears that left."""
    return AuthError(403, "left", "this node left the run; join again")


def sign_revocation(owner: Key, node: str, run: str) -> bytes:
    """The owner takes back all it delegated to a node."""
    return sign_document(owner, Tag.REVOCATION, {"node": check_public(node), "run": check_run(run)})


def open_revocation(data: bytes) -> Revocation:
    """A revocation whose signature holds; `DocumentError` for anything else."""
    owner, body = open_claimed(Tag.REVOCATION, data, max_bytes=MAX_DOCUMENT_BYTES)
    if body.keys() != {"node", "run"}:
        raise DocumentError("not a revocation")
    try:
        return Revocation(owner, check_public(_take_text(body, "node")), check_run(_take_text(body, "run")))
    except ValueError as error:
        raise DocumentError(str(error)) from None


def _take_text(body: dict[str, object], name: str) -> str:
    value = body[name]
    if not isinstance(value, str):
        raise DocumentError(f"{name} must be a string")
    return value


def _take_count(body: dict[str, object], name: str) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise DocumentError(f"{name} must be an integer")
    return value


def _take_scopes(body: dict[str, object]) -> frozenset[Scope]:
    """Sorted and without repeats, or one delegation would have several names."""
    values = body["scopes"]
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise DocumentError("scopes must be a list of strings")
    if values != sorted(set(values)):
        raise DocumentError("scopes must be sorted, each once")
    return frozenset(map(Scope, values))
