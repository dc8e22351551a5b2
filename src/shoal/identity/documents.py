"""Purpose tags: the purpose of a signature is part of what is signed.

Invariants:
- the signed bytes are `shoal-document-1` NUL tag NUL canonical JSON, and a tag has no NUL: no two pairs of tag and body
  give the same bytes, so a signature made under one tag is invalid under every other;
- everything else that is signed begins differently: a request with a quotation mark (RFC 9421), a line of a manifest
  and a statement of the ledger with prefixes of their own. None of them can be taken for a document;
- bytes chosen by a peer are never signed: a body is always built and encoded here.

A document is canonical JSON of {body, signature, signer, tag}. It has one encoding, so its hash can serve as its name;
the signature alone cannot.
"""

from collections.abc import Mapping
from enum import StrEnum

from shoal.identity.keys import SIGNATURE_BYTES, Key, verify_signature
from shoal.util.canonical import CanonicalError, decode_canonical, encode_canonical

MAX_DOCUMENT_BYTES = 64 * 1024
_FRAME = b"shoal-document-1\x00%b\x00%b"


class Tag(StrEnum):
    """Everything that is signed besides requests. Changing breaks: every signature made under the old name."""

    DESCRIPTOR = "shoal-descriptor-1"
    DELEGATION = "shoal-delegation-1"
    REVOCATION = "shoal-revocation-1"
    LEASE = "shoal-lease-1"
    SUBMISSION = "shoal-submission-1"
    RECEIPT = "shoal-receipt-1"
    VERDICT = "shoal-verdict-1"
    BATCH = "shoal-batch-1"
    HEAD = "shoal-head-1"
    COMMAND = "shoal-command-1"
    CANARY = "shoal-canary-1"
    EVIDENCE = "shoal-evidence-1"
    PLAN = "shoal-diloco-plan-1"
    UPDATE = "shoal-diloco-update-1"
    OUTCOME = "shoal-diloco-outcome-1"
    STATE = "shoal-diloco-state-1"


class DocumentError(ValueError):
    """Bytes that are not a document of this kind, signed by this key."""


def sign_bytes(key: Key, tag: Tag, data: bytes) -> bytes:
    """The signature alone, over canonical data; for data and signature that are stored separately."""
    return key.sign(_frame_data(tag, data))


def verify_bytes(public: str, tag: Tag, data: bytes, signature: bytes) -> bool:
    """Whether this key made the signature with `sign_bytes` and this tag."""
    return verify_signature(public, _frame_data(tag, data), signature)


def sign_document(key: Key, tag: Tag, body: Mapping[str, object]) -> bytes:
    """Sign a body for a purpose; returns the document."""
    signature = sign_bytes(key, tag, encode_canonical(dict(body)))
    document = {"body": dict(body), "signature": signature.hex(), "signer": key.public, "tag": tag.value}
    return encode_canonical(document)


def open_document(public: str, tag: Tag, data: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, object]:
    """The body of a document that this key signed for this purpose; `DocumentError` for anything else."""
    signer, body = open_claimed(tag, data, max_bytes=max_bytes)
    if signer != public:
        raise DocumentError("signed by another key")
    return body


def open_claimed(tag: Tag, data: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> tuple[str, dict[str, object]]:
    """Signer and body of a document with a valid signature; the caller checks whether that signer is authorized."""
    signer, body, signature = _split_document(tag, data, max_bytes)
    if not verify_bytes(signer, tag, encode_canonical(body), signature):
        raise DocumentError("invalid signature")
    return signer, body


def read_signer(tag: Tag, data: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The signer that a document names; the signature is not checked."""
    return _split_document(tag, data, max_bytes)[0]


def _split_document(tag: Tag, data: bytes, max_bytes: int) -> tuple[str, dict[str, object], bytes]:
    """Signer, body and signature of a document."""
    try:
        document = decode_canonical(data, max_bytes=max_bytes)
    except CanonicalError as error:
        raise DocumentError(f"not canonical JSON: {error}") from None
    if not isinstance(document, dict) or document.keys() != {"body", "signature", "signer", "tag"}:
        raise DocumentError("not a signed document")
    body, signer = document["body"], document["signer"]
    if document["tag"] != tag.value:
        raise DocumentError(f"not a document of the kind {tag.value}")
    if not isinstance(body, dict) or not isinstance(signer, str):
        raise DocumentError("not a signed document")
    return signer, body, _read_signature(document["signature"])


def _frame_data(tag: Tag, data: bytes) -> bytes:
    return _FRAME % (tag.value.encode("ascii"), data)


def _read_signature(value: object) -> bytes:
    """Accept only lower-case hex: the document's hash must not depend on the spelling."""
    if isinstance(value, str) and len(value) == 2 * SIGNATURE_BYTES and not value.strip("0123456789abcdef"):
        return bytes.fromhex(value)
    raise DocumentError("not a signed document")
