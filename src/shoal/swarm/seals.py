"""Seals of canaries: an owner that only the operator knows, noted in the ledger before it joins.

    seal = SHA-256("shoal-canary-1\\n" | owner | the owner's signature of the run's name, tag CANARY)

Invariants:
- a seal says nothing: nobody else can make the signature, so nobody can try whether an owner fits a seal;
- it is opened with one owner alone, and by nobody who has not that owner's key: what a stranger joined with can be
  neither called a canary nor be treated as one;
- a seal is good for one run.

Changing breaks: seals that are not opened yet.
"""

from hashlib import sha256

from shoal.canonical import encode_canonical
from shoal.keys import Key
from shoal.swarm.tags import Tag, sign_bytes, verify_bytes

_SEAL_TAG = b"shoal-canary-1\n"


def sign_seal(owner: Key, run: str) -> str:
    """What opens the seal of an owner, in hex; a secret until then."""
    return sign_bytes(owner, Tag.CANARY, _frame_run(run)).hex()


def make_seal(owner: Key, run: str) -> str:
    """The seal of an owner, in hex."""
    return _hash_seal(owner.public, sign_seal(owner, run))


def find_seal(run: str, owner: str, signature: str) -> str | None:
    """The seal that a signature opens; None if it is not the owner's."""
    is_signed = verify_bytes(owner, Tag.CANARY, _frame_run(run), bytes.fromhex(signature))
    return _hash_seal(owner, signature) if is_signed else None


def _frame_run(run: str) -> bytes:
    return encode_canonical({"run": run})


def _hash_seal(owner: str, signature: str) -> str:
    return sha256(_SEAL_TAG + bytes.fromhex(owner) + bytes.fromhex(signature)).hexdigest()
