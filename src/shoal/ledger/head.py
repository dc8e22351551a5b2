"""Signed heads: the coordinator's statement of its ledger, and what a node keeps to detect a fork.

    {"format":1,"last_hash":"<64 hex>","root":"<64 hex>","run":"...","size":n,"time_ms":t}

These bytes are what is signed, with the tag for heads. A ledger has at most one head per size, and of two heads the
larger is never the earlier one.

- `check_extension` compares two heads: heads of the same size must be equal, and a larger one needs a consistency
  proof.
- `HeadKeeper` is a node's memory: the newest head it was shown, on disk. A head that does not extend it is a fork: both
  signed heads are saved as evidence.

Two different heads of the same size, or a smaller head with a later time, are proof by themselves: anyone with the
coordinator's public key can check them, and the keeper accepts nothing more, even after a restart. A failed consistency
proof convicts nobody, because proofs are not signed and any intermediary can alter one: the node stops, and after a
restart the same head must be proven first.

- `InclusionProof` is the proof that an event is in a ledger, as one file that can be checked without the ledger:

    {"event":{...},"format":1,"head":{"head":{...},"signature":"..."},"path":["<64 hex>",...]}

Together with the coordinator's public key it proves that the coordinator signed a ledger containing exactly this event.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from shoal.identity.documents import Tag, sign_bytes, verify_bytes
from shoal.identity.keys import SIGNATURE_BYTES, Key
from shoal.ledger.event import HASH_BYTES, MAX_BODY_BYTES, MAX_POSTINGS, STRICT, Event, EventError, HexBytes
from shoal.ledger.merkle import MAX_PROOF_HASHES, hash_leaf, verify_consistency, verify_inclusion
from shoal.util.canonical import MAX_INTEGER, CanonicalError, encode_canonical
from shoal.util.files import write_atomic

FORMAT: Literal[1] = 1
"""Changing breaks: every node that holds a head."""
MAX_HEAD_BYTES = 1024

_MAX_EVIDENCE_BYTES = 4 * MAX_HEAD_BYTES + 80 * MAX_PROOF_HASHES

T = TypeVar("T")
HashText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Proof = Annotated[
    tuple[Annotated[HexBytes, Field(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...],
    Field(max_length=MAX_PROOF_HASHES),
]
"""hashes of a Merkle tree"""


class HeadError(ValueError):
    """Bytes that are not a head of this run signed by its coordinator."""


class ForkError(Exception):
    """The coordinator showed a head that does not extend the held one; the evidence is attached and on disk."""

    def __init__(self, fork: "Fork") -> None:
        super().__init__(fork.explain())
        self.fork = fork


class Relation(Enum):
    """How a head relates to the held one."""

    SAME = "same"
    NEWER = "newer"
    OLDER = "older"
    UNPROVEN = "unproven"
    """larger, and no proof was sent that it extends the held one"""
    BROKEN = "broken"
    """larger, and the proof that it extends the held one is invalid"""
    FORK = "fork"
    """the two cannot belong to the same ledger, whatever proof comes with them"""


@dataclass(frozen=True, slots=True)
class Head:
    """The ledger of a run at one size."""

    run: str
    size: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    root: HashText
    """Merkle root over the hashes of all events, hex"""
    last_hash: HashText
    """hash of the last event, hex"""
    time_ms: Annotated[int, Field(ge=0, le=MAX_INTEGER)]

    format: Literal[1] = FORMAT
    __pydantic_config__ = STRICT

    def to_bytes(self) -> bytes:
        return encode_canonical(asdict(self))


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A head and the coordinator's signature."""

    head: Head
    signature: Annotated[HexBytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    __pydantic_config__ = STRICT

    def to_bytes(self) -> bytes:
        return _dump(_SIGNED_HEAD, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "SignedHead":
        """Parse a signed head; does not check the signature."""
        return _parse(_SIGNED_HEAD, data, MAX_HEAD_BYTES, HeadError("malformed signed head"))

    def check_signed(self, run: str, coordinator: str) -> None:
        """Reject a head of another run, or one that the coordinator did not sign."""
        if self.head.run != run:
            raise HeadError(f"head of a different run: {self.head.run}, expected {run}")
        if not verify_bytes(coordinator, Tag.HEAD, self.head.to_bytes(), self.signature):
            raise HeadError("head not signed by this run's coordinator")


@dataclass(frozen=True, slots=True)
class Fork:
    """Two heads of one coordinator where neither history contains the other."""

    held: SignedHead
    shown: SignedHead
    proof: Proof | None
    """what was sent as proof that the shown head extends the held one"""
    __pydantic_config__ = STRICT

    @property
    def convicts(self) -> bool:
        """Whether the two heads convict by themselves; a failed proof convinces only the node that received it."""
        return check_extension(self.held.head, self.shown.head, None) is Relation.FORK

    def explain(self) -> str:
        """Describe the fork on one line."""
        old, new = self.held.head, self.shown.head
        if not self.convicts:
            lack = f"no proof that it begins with the {old.size} shown before"
            return f"the coordinator of run {old.run} showed a ledger of {new.size} events, and {lack}"
        if old.size == new.size:
            reason = f"two ledgers of {old.size} events with different hashes"
        elif old.size > new.size:
            cause = "the ledger was replaced or restored from an old backup; this node refuses it permanently"
            reason = f"a ledger of {old.size} events, and later one of {new.size}; {cause}"
        else:
            reason = f"a ledger of {old.size} events, and one of {new.size} for an earlier time"
        return f"the coordinator of run {old.run} signed {reason}"

    def to_bytes(self) -> bytes:
        return _dump(_FORK, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Fork":
        return _parse(_FORK, data, _MAX_EVIDENCE_BYTES, HeadError("malformed fork evidence"))


class HeadKeeper:
    """The newest head that a node was shown, stored in a file. One keeper per file."""

    def __init__(self, path: Path, run: str, coordinator: str) -> None:
        self._path, self._run, self._coordinator = path, run, coordinator
        self.evidence_path = path.with_name(f"{path.name}.fork")
        noted = Fork.from_bytes(self.evidence_path.read_bytes()) if self.evidence_path.exists() else None
        self.fork = noted if noted is not None and noted.convicts else None
        self.doubted = noted.shown if noted is not None and not noted.convicts else None
        """a head without a valid proof from this node's last run; it must be proven before any other head"""
        self.held = SignedHead.from_bytes(path.read_bytes()) if path.exists() else None
        if self.held is not None:
            self.held.check_signed(run, coordinator)

    def offer_head(self, shown: SignedHead, proof: Sequence[bytes] | None = None) -> Relation:
        """Accept a head if it extends the held one, given the consistency proof between their sizes.

        Without a proof a larger head is UNPROVEN and not accepted: request the proof and offer both. With an invalid
        proof it is BROKEN: request it again, then call `note_fork`. Raises HeadError for a head that is not the
        coordinator's, and ForkError for one that is but cannot extend the held head.
        """
        if self.fork is not None:
            raise ForkError(self.fork)
        shown.check_signed(self._run, self._coordinator)
        if self.held is None:
            self._keep_head(shown)
            return Relation.NEWER
        relation = check_extension(self.held.head, shown.head, proof)
        if relation is Relation.FORK:
            raise self.note_fork(shown, proof)
        if relation is Relation.NEWER:
            self._keep_head(shown)
        return relation

    def note_fork(self, shown: SignedHead, proof: Sequence[bytes] | None) -> ForkError:
        """Save a head that does not extend the held one; from now on this keeper accepts nothing."""
        assert self.held is not None, "there is a head that it does not extend"
        self.fork = Fork(self.held, shown, None if proof is None else tuple(proof))
        write_atomic(self.evidence_path, self.fork.to_bytes())
        return ForkError(self.fork)

    def end_doubt(self) -> None:
        """Clear the doubted head once it is proven."""
        self.doubted = None
        self.evidence_path.unlink(missing_ok=True)

    def _keep_head(self, head: SignedHead) -> None:
        write_atomic(self._path, head.to_bytes())
        self.held = head


def sign_head(key: Key, head: Head) -> SignedHead:
    """Sign a head, as the coordinator."""
    return SignedHead(head, sign_bytes(key, Tag.HEAD, head.to_bytes()))


def check_extension(old: Head, new: Head, proof: Sequence[bytes] | None) -> Relation:
    """How `new` relates to `old`; both are of the same run, with valid signatures."""
    assert old.run == new.run, "heads of one run"
    if old.size == new.size:
        return Relation.SAME if old == new else Relation.FORK
    if new.size < old.size:
        # A ledger only grows. A late old head has an old time; a new head of a shorter ledger means it was truncated.
        return Relation.FORK if new.time_ms > old.time_ms else Relation.OLDER
    if new.time_ms < old.time_ms:
        return Relation.FORK
    if proof is None:
        return Relation.UNPROVEN
    roots = bytes.fromhex(old.root), bytes.fromhex(new.root)
    holds = verify_consistency(old.size, roots[0], new.size, roots[1], proof)
    return Relation.NEWER if holds else Relation.BROKEN


MAX_BUNDLE_BYTES = 4 * MAX_BODY_BYTES + 128 * MAX_POSTINGS


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """An event, a signed head, and the path from one to the other."""

    event: Event
    head: SignedHead
    path: Proof
    format: Literal[1] = FORMAT
    __pydantic_config__ = STRICT

    def to_bytes(self) -> bytes:
        return _dump(_INCLUSION_PROOF, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "InclusionProof":
        """Parse a proof; `check_proof` checks whether it is valid."""
        return _parse(_INCLUSION_PROOF, data, MAX_BUNDLE_BYTES, EventError("malformed proof"))

    def check_proof(self, run: str, coordinator: str) -> None:
        """Raise EventError unless this proves that its event is in the ledger that this coordinator signed."""
        self.event.check_form()
        if self.event.compute_hash() != self.event.hash:
            raise EventError("event hash does not match its content")
        try:
            self.head.check_signed(run, coordinator)
        except HeadError as error:
            raise EventError(str(error)) from None
        head, leaf = self.head.head, hash_leaf(self.event.hash)
        if not verify_inclusion(leaf, self.event.seq, head.size, self.path, bytes.fromhex(head.root)):
            raise EventError(f"invalid Merkle path from event {self.event.seq} to the signed head")
        self.event.check_signed(run, coordinator)


_SIGNED_HEAD, _FORK, _INCLUSION_PROOF = TypeAdapter(SignedHead), TypeAdapter(Fork), TypeAdapter(InclusionProof)


def _dump(form: TypeAdapter[T], value: T) -> bytes:
    return encode_canonical(form.dump_python(value, mode="json"))


def _parse(form: TypeAdapter[T], data: bytes, max_bytes: int, refusal: ValueError) -> T:
    """Parse canonical JSON of this form; raise the refusal for anything else."""
    if len(data) > max_bytes:
        raise refusal
    try:
        value = form.validate_json(data)
        if _dump(form, value) == data:
            return value
    except (CanonicalError, ValidationError):
        pass
    raise refusal
