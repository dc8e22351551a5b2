"""Answers that only the API gives, beside those of `messages`. Nodes read them too, so no server is imported here."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.merkle import MAX_PROOF_HASHES
from shoal.swarm.messages import Digest, LeaderLine, Message, Number, SubmissionState


class Done(Message):
    """It was done."""

    ok: Literal[True] = True


class Health(Message):
    """The server answers."""

    ok: Literal[True] = True
    role: Literal["coordinator"] = "coordinator"
    run: str
    coordinator: Digest
    server_time_ms: Number


class ChallengeAnswer(Message):
    """The work to do before joining."""

    challenge: str


class HeadAnswer(Message):
    """The newest signed head (`SignedHead.to_bytes` as text), if there is one yet."""

    head: str | None


class ProofAnswer(Message):
    """That the ledger of `new` events begins with that of `old`."""

    old: Number
    new: Number
    proof: Annotated[tuple[Digest, ...], Field(max_length=MAX_PROOF_HASHES)]


class BundleAnswer(Message):
    """An event with the proof that it is in the ledger (`Bundle.to_bytes` as text)."""

    bundle: str


class Leaders(Message):
    """Owners by accepted tokens."""

    leaders: tuple[LeaderLine, ...]


class BlobLink(Message):
    """Where a file may be fetched instead of here; empty if it is to be had here alone."""

    url: str
    expires_s: Number


class Explanation(Message):
    """All that is known of a submission, in words."""

    text: str
    state: SubmissionState
