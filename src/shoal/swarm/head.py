"""Signed heads: what the coordinator says its ledger is, and what a node keeps to hold it to that.

    {"format":1,"last_hash":"<64 hex>","root":"<64 hex>","run":"...","size":n,"time_ms":t}

These bytes are what is signed, under the tag of heads. A ledger has one head of a size at most, and of two heads the
larger is never the earlier one.

- `check_extension` compares two heads: of one size they are equal, and a larger one comes with a proof of consistency.
- `HeadKeeper` is a node's memory: the newest head it was shown, on disk. A head that does not extend it is a fork: both
  signed heads are written down as evidence.

Two heads of one size that differ, or a smaller one of a later time, convict by themselves: whoever has the
coordinator's public key can check them, and the keeper takes nothing more, after a restart neither. A proof that fails
convicts nobody, for proofs are not signed and whoever is on the way can alter one: the node stops, and after a restart
the same head is to be proven first.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.canonical import MAX_INTEGER, CanonicalError, decode_canonical, encode_canonical
from shoal.files import write_atomic
from shoal.keys import Key
from shoal.swarm.merkle import MAX_PROOF_HASHES, verify_consistency
from shoal.swarm.tags import Tag, sign_bytes, verify_bytes

FORMAT = 1
"""Changing breaks: every node that holds a head."""
MAX_HEAD_BYTES = 1024

_MAX_EVIDENCE_BYTES = 4 * MAX_HEAD_BYTES + 80 * MAX_PROOF_HASHES
_HEX = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


class HeadError(ValueError):
    """Bytes that are no head of this run signed by its coordinator."""


class ForkError(Exception):
    """The coordinator showed a head that does not extend the one held; the evidence is with it and on disk."""

    def __init__(self, fork: "Fork") -> None:
        super().__init__(fork.explain())
        self.fork = fork


class Relation(Enum):
    """What a head is to the one that is held."""

    SAME = "same"
    NEWER = "newer"
    OLDER = "older"
    UNPROVEN = "unproven"
    """larger, and nothing was sent to show that it extends the held one"""
    BROKEN = "broken"
    """larger, and what was sent to show that it extends the held one does not show it"""
    FORK = "fork"
    """the two cannot be of one ledger, whatever is sent with them"""


@dataclass(frozen=True, slots=True)
class Head:
    """The ledger of a run as it was at one size."""

    run: str
    size: int
    root: str
    """Merkle root over the hashes of all events, hex"""
    last_hash: str
    """hash of the last event, hex"""
    time_ms: int

    def to_bytes(self) -> bytes:
        return encode_canonical({"format": FORMAT, **asdict(self)})


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A head and the coordinator's signature of it."""

    head: Head
    signature: bytes

    def to_bytes(self) -> bytes:
        return encode_canonical(self.to_value())

    def to_value(self) -> dict[str, Any]:
        """For messages and files that hold a head among other things."""
        return {"head": {"format": FORMAT, **asdict(self.head)}, "signature": self.signature.hex()}

    @classmethod
    def from_bytes(cls, data: bytes) -> "SignedHead":
        """The head that these bytes spell; its signature is not looked at."""
        try:
            return cls.from_value(decode_canonical(data, max_bytes=MAX_HEAD_BYTES))
        except CanonicalError as error:
            raise HeadError(f"not a signed head: {error}") from None

    @classmethod
    def from_value(cls, value: Any) -> "SignedHead":
        match value:
            case {"head": dict(fields), "signature": str(signature)} if len(value) == 2:
                if _SIGNATURE.fullmatch(signature) is not None:
                    return cls(_parse_head(fields), bytes.fromhex(signature))
        raise HeadError("not the form of a signed head")

    def check_signed(self, run: str, coordinator: str) -> None:
        """Refuse a head of another run, or one that the coordinator did not sign."""
        if self.head.run != run:
            raise HeadError(f"a head of run {self.head.run}, not of {run}")
        if not verify_bytes(coordinator, Tag.HEAD, self.head.to_bytes(), self.signature):
            raise HeadError("a head that this run's coordinator did not sign")


@dataclass(frozen=True, slots=True)
class Fork:
    """Two heads of one coordinator of which neither history holds the other."""

    held: SignedHead
    shown: SignedHead
    proof: tuple[bytes, ...] | None
    """what was sent as proof that the one shown extends the one held"""

    @property
    def convicts(self) -> bool:
        """Whether the two heads are enough for everybody, or a proof failed, which only who received it knows."""
        return check_extension(self.held.head, self.shown.head, None) is Relation.FORK

    def explain(self) -> str:
        """The accusation in one sentence."""
        old, new = self.held.head, self.shown.head
        if not self.convicts:
            lack = f"no proof that it begins with the {old.size} shown before"
            return f"the coordinator of run {old.run} showed a ledger of {new.size} events, and {lack}"
        if old.size == new.size:
            reason = f"two ledgers of {old.size} events with different hashes"
        elif old.size > new.size:
            reason = f"a ledger of {old.size} events, and later one of {new.size}"
        else:
            reason = f"a ledger of {old.size} events, and one of {new.size} for an earlier time"
        return f"the coordinator of run {old.run} signed {reason}"

    def to_bytes(self) -> bytes:
        proof = None if self.proof is None else [item.hex() for item in self.proof]
        return encode_canonical({"held": self.held.to_value(), "proof": proof, "shown": self.shown.to_value()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Fork":
        try:
            value = decode_canonical(data, max_bytes=_MAX_EVIDENCE_BYTES)
        except CanonicalError as error:
            raise HeadError(f"not fork evidence: {error}") from None
        match value:
            case {"held": held, "proof": proof, "shown": shown} if len(value) == 3:
                hashes = None if proof is None else decode_proof(proof)
                return cls(SignedHead.from_value(held), SignedHead.from_value(shown), hashes)
        raise HeadError("not the form of fork evidence")


class HeadKeeper:
    """The newest head that a node was shown, kept in a file. One keeper per file."""

    def __init__(self, path: Path, run: str, coordinator: str) -> None:
        self._path, self._run, self._coordinator = path, run, coordinator
        self.evidence_path = path.with_name(f"{path.name}.fork")
        noted = Fork.from_bytes(self.evidence_path.read_bytes()) if self.evidence_path.exists() else None
        self.fork = noted if noted is not None and noted.convicts else None
        self.doubted = noted.shown if noted is not None and not noted.convicts else None
        """a head for which no proof held when this node last ran; to be proven before any other"""
        self.held = SignedHead.from_bytes(path.read_bytes()) if path.exists() else None
        if self.held is not None:
            self.held.check_signed(run, coordinator)

    def offer_head(self, shown: SignedHead, proof: Sequence[bytes] | None = None) -> Relation:
        """Take a head if it extends the one held, with the proof of consistency between their two sizes.

        Without a proof a larger head is UNPROVEN and not taken: ask for the proof and offer both. With one that fails
        it is BROKEN: ask again, and then `note_fork`. HeadError for a head that is not the coordinator's, ForkError
        for one that is and cannot extend.
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
        """Write down a head that does not extend the one held; from now on this keeper takes nothing."""
        assert self.held is not None, "there is a head that it does not extend"
        self.fork = Fork(self.held, shown, None if proof is None else tuple(proof))
        write_atomic(self.evidence_path, self.fork.to_bytes())
        return ForkError(self.fork)

    def end_doubt(self) -> None:
        """The head that was doubted is proven now."""
        self.doubted = None
        self.evidence_path.unlink(missing_ok=True)

    def _keep_head(self, head: SignedHead) -> None:
        write_atomic(self._path, head.to_bytes())
        self.held = head


def sign_head(key: Key, head: Head) -> SignedHead:
    """Sign a head, as the coordinator."""
    return SignedHead(head, sign_bytes(key, Tag.HEAD, head.to_bytes()))


def check_extension(old: Head, new: Head, proof: Sequence[bytes] | None) -> Relation:
    """What `new` is to `old`, both of one run and with signatures that hold."""
    assert old.run == new.run, "heads of one run"
    if old.size == new.size:
        return Relation.SAME if old == new else Relation.FORK
    if new.size < old.size:
        # A ledger only grows. An old head that comes late has an old time; a new one of a shorter ledger was cut.
        return Relation.FORK if new.time_ms > old.time_ms else Relation.OLDER
    if new.time_ms < old.time_ms:
        return Relation.FORK
    if proof is None:
        return Relation.UNPROVEN
    roots = bytes.fromhex(old.root), bytes.fromhex(new.root)
    holds = verify_consistency(old.size, roots[0], new.size, roots[1], proof)
    return Relation.NEWER if holds else Relation.BROKEN


def decode_proof(value: Any) -> tuple[bytes, ...]:
    """A proof as it stands in messages and files: a list of hashes in hex."""
    if not isinstance(value, list) or len(value) > MAX_PROOF_HASHES:
        raise HeadError("not the form of a proof")
    if not all(isinstance(item, str) and _HEX.fullmatch(item) for item in value):
        raise HeadError("a proof with something else than hashes")
    return tuple(bytes.fromhex(item) for item in value)


def _parse_head(fields: dict[str, Any]) -> Head:
    if set(fields) != {"format", "last_hash", "root", "run", "size", "time_ms"} or fields["format"] != FORMAT:
        raise HeadError("not the fields of a head of this format")
    run, size, root = fields["run"], fields["size"], fields["root"]
    last_hash, time_ms = fields["last_hash"], fields["time_ms"]
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in (root, last_hash)):
        raise HeadError("a head with something else than hashes")
    if not isinstance(run, str) or not _is_count(size) or size == 0 or not _is_count(time_ms):
        raise HeadError("a head without run, size and time")
    return Head(run, size, root, last_hash, time_ms)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER
