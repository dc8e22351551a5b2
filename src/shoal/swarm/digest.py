"""The hash of a body in a header (RFC 9530 `Content-Digest`, sha-256 alone), and the check of a body against it.

A body is read after its head was found to be signed, piece by piece; nothing of it is kept here. It fails at the first
byte past the declared length, so whoever promises little cannot send much.
"""

import hashlib
import re
from base64 import b64encode
from binascii import a2b_base64

from shoal.swarm.refusal import AuthError

DIGEST_BYTES = 32
EMPTY_DIGEST = hashlib.sha256().digest()
_FIELD = re.compile(r"sha-256=:([A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=):")
"""32 bytes in base64: the last of 43 characters carries four bits"""


def format_digest(digest: bytes) -> str:
    """The value of `Content-Digest` for a SHA-256 hash."""
    return f"sha-256=:{b64encode(digest).decode()}:"


def parse_digest(field: str) -> bytes:
    """The SHA-256 hash in a `Content-Digest`; other hashes beside it are refused, for nobody would check them."""
    match = _FIELD.fullmatch(field)
    if match is None:
        raise AuthError(400, "malformed", "Content-Digest must be one sha-256, in the form of RFC 9530")
    return a2b_base64(match[1])


class BodyChecker:
    """Takes a body as it arrives and compares it with what its head promised."""

    def __init__(self, length: int, digest: bytes) -> None:
        self.length = length
        self.num_bytes = 0
        self._digest = digest
        self._hash = hashlib.sha256()

    def feed(self, chunk: bytes) -> None:
        """Take the next piece; it may be used only once `finish` has returned."""
        self.num_bytes += len(chunk)
        if self.num_bytes > self.length:
            raise AuthError(400, "body", f"the body goes on after the {self.length} bytes that were signed")
        self._hash.update(chunk)

    def finish(self) -> None:
        """The body has ended."""
        if self.num_bytes < self.length:
            raise AuthError(400, "body", f"the body ended after {self.num_bytes} of the {self.length} bytes signed")
        if self._hash.digest() != self._digest:
            raise AuthError(400, "body", "the body is not the one that was signed")
