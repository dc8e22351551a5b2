"""What an owner allows a node: a delegation signed with the owner's key, and its revocation.

The owner's key stays offline; a worker holds a node key and the owner's delegation to it. A stolen node key can be used
for what the delegation allows, until it ends or the owner revokes it.

Invariants:
- a delegation names one node and one run, and ends; the owner is the signer, never a field;
- a document has one encoding, and is named by its hash, not its signature;
- a revocation is final: it ends every delegation of that owner to that node, earlier and later ones. To work again, the
  machine needs a new node key.
"""

import hashlib
from dataclasses import asdict, dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.identity.documents import DocumentError, Tag, open_claimed, sign_document
from shoal.identity.keys import Key, check_public
from shoal.util.units import check_run

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
    """What is delegated: the node may act for `run` from `not_before_ms` until `not_after_ms` (exclusive)."""

    node: str
    run: str
    not_before_ms: int
    not_after_ms: int
    scopes: frozenset[Scope]
    max_leases: int
    """most leases held at once"""

    def __post_init__(self) -> None:
        check_public(self.node)
        check_run(self.run)
        if not 0 <= self.not_before_ms < self.not_after_ms <= _MAX_TIME_MS:
            raise ValueError("a delegation must begin before it ends")
        if self.not_after_ms - self.not_before_ms > MAX_LIFETIME_MS:
            raise ValueError(f"a delegation may last at most {MAX_LIFETIME_MS // 86_400_000} days")
        if not self.scopes:
            raise ValueError(f"a delegation must allow at least one of {', '.join(Scope)}")
        if not 0 <= self.max_leases <= MAX_LEASES:
            raise ValueError(f"a delegation must allow 0 to {MAX_LEASES} leases at once")


class _GrantBody(BaseModel):
    """The signed form of a grant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    node: str
    run: str
    not_before_ms: int
    not_after_ms: int
    scopes: list[str]
    max_leases: int


@dataclass(frozen=True, slots=True)
class Delegation:
    """A grant that an owner signed."""

    owner: str
    grant: Grant
    digest: str
    """hash of the document"""


@dataclass(frozen=True, slots=True)
class Revocation:
    """An owner's statement that a node no longer acts for it."""

    owner: str
    node: str
    run: str


def sign_delegation(owner: Key, grant: Grant) -> bytes:
    """Sign a delegation with the owner's key."""
    scopes = sorted(scope.value for scope in grant.scopes)
    return sign_document(owner, Tag.DELEGATION, asdict(grant) | {"scopes": scopes})


def open_delegation(data: bytes) -> Delegation:
    """A delegation with a valid signature; `DocumentError` otherwise. Its term is checked by `authenticator`."""
    owner, body = open_claimed(Tag.DELEGATION, data, max_bytes=MAX_DOCUMENT_BYTES)
    try:
        terms = _GrantBody.model_validate(body)
    except ValidationError:
        raise DocumentError("not a delegation") from None
    if terms.scopes != sorted(set(terms.scopes)):
        raise DocumentError("scopes must be sorted and unique")  # otherwise one delegation would have several hashes
    try:
        grant = Grant(**terms.model_dump(exclude={"scopes"}), scopes=frozenset(map(Scope, terms.scopes)))
    except ValueError as error:
        raise DocumentError(str(error)) from None
    return Delegation(owner, grant, hashlib.sha256(data).hexdigest())


def sign_revocation(owner: Key, node: str, run: str) -> bytes:
    """Sign the revocation of everything delegated to a node."""
    return sign_document(owner, Tag.REVOCATION, {"node": check_public(node), "run": check_run(run)})


def open_revocation(data: bytes) -> Revocation:
    """A revocation with a valid signature; `DocumentError` for anything else."""
    owner, body = open_claimed(Tag.REVOCATION, data, max_bytes=MAX_DOCUMENT_BYTES)
    match body:
        case {"node": str(node), "run": str(run)} if len(body) == 2:
            try:
                return Revocation(owner, check_public(node), check_run(run))
            except ValueError as error:
                raise DocumentError(str(error)) from None
    raise DocumentError("not a revocation")
