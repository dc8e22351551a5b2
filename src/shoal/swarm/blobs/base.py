"""What a store of blobs does, whatever it is made of.

Invariants:
- a blob is named by the SHA-256 of its bytes, in hex. The name is one that the coordinator took from a signed manifest,
  and no other text ever reaches a store: `check_name` refuses it;
- a blob is there whole or not at all, and what `put` has answered survives kill -9 and power loss;
- `put` reads all that it is sent and compares it, also where the blob is there already: who hands in a blob has it;
- there is no list of blobs.
"""

import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

CHUNK_BYTES = 1 << 18
"""pieces in which blobs are read and written"""
_NAME = re.compile(r"[0-9a-f]{64}")


class BlobError(Exception):
    """What a store did not take or has not got; the text is for the sender."""


class WrongBlobError(BlobError):
    """The bytes are not the ones that were announced: the sender's mistake."""


class FullError(BlobError):
    """There is no room now; the same upload may succeed later."""


class MissingBlobError(BlobError):
    """There is no such blob."""


class BlobReader(Protocol):
    """A blob while it is read."""

    @property
    def size(self) -> int:
        """Bytes of the whole blob."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __aenter__(self) -> "BlobReader": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BlobStore(Protocol):
    """Blobs by name."""

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Take a blob of announced size; after `WrongBlobError`, `FullError` or an error of `chunks` none is left."""
        ...

    async def has(self, name: str) -> bool:
        """Whether the blob is there."""
        ...

    async def open(self, name: str) -> BlobReader:
        """A blob to read, to be used as a context; `MissingBlobError` if there is none."""
        ...

    async def remove(self, name: str) -> None:
        """Forget a blob, if it is there; who reads it now reads on."""
        ...

    async def close(self) -> None:
        """Let another process have the store."""
        ...


def check_name(name: str) -> str:
    """The name, if it is one of a blob. A path made of anything else is a bug of ours, or an attack."""
    if _NAME.fullmatch(name) is None:
        raise MissingBlobError("no name of a blob, which is 64 of the characters 0-9 and a-f")
    return name
