"""The interface of a blob store.

Invariants:
- a blob is named by the SHA-256 of its bytes, in hex. The coordinator takes the name from a signed manifest, and no
  other text ever reaches a store: `check_name` rejects it;
- a blob is stored completely or not at all, and once `put` returns it survives kill -9 and power loss;
- `put` reads and checks all bytes even if the blob already exists: a sender must really have the blob;
- blobs cannot be listed.

Optionally a store lets nodes write and read directly, by URLs that expire.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

CHUNK_BYTES = 1 << 18
"""size of the pieces in which blobs are read and written"""
_NAME = re.compile(r"[0-9a-f]{64}")


class BlobError(Exception):
    """The store refused a blob or does not have it; the text is for the sender."""


class WrongBlobError(BlobError):
    """The bytes are not the announced ones: the sender's mistake."""


class FullError(BlobError):
    """No space is left now; the same upload may succeed later."""


class MissingBlobError(BlobError):
    """No such blob."""


class BlobReader(AbstractAsyncContextManager["BlobReader"]):
    """A blob that is open for reading."""

    name: str
    size: int
    """size of the whole blob in bytes"""

    async def check_bytes(self) -> None:
        """Raise `MissingBlobError` for a blob that the store damaged.

        A node that gets other bytes than it asked for cannot know who changed them, so it asks again; only the
        coordinator can say that the file is lost.
        """
        found = hashlib.sha256()
        async for piece in self:
            found.update(piece)
        if found.hexdigest() != self.name:
            raise MissingBlobError("the blob is damaged: its bytes do not have the hash that names it")

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[bytes]: ...


class BlobStore(Protocol):
    """Blobs by name."""

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Store a blob of this size; nothing is left after `WrongBlobError`, `FullError` or an error of `chunks`."""
        ...

    async def has(self, name: str) -> bool:
        """Whether the blob exists."""
        ...

    async def open(self, name: str) -> BlobReader:
        """Open a blob for reading, as a context manager; `MissingBlobError` if it does not exist."""
        ...

    async def remove(self, name: str) -> None:
        """Delete a blob if it exists; current readers can finish."""
        ...

    async def close(self) -> None:
        """Release the store for other processes."""
        ...


def check_name(name: str) -> str:
    """Return the name if it is valid. A path made of anything else is our bug or an attack."""
    if _NAME.fullmatch(name) is None:
        raise MissingBlobError("invalid blob name: must be 64 lowercase hex digits")
    return name


async def gather_pieces(chunks: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Regroup the bytes into pieces large enough for a thread; raise at the first byte beyond the announced size."""
    pieces: list[bytes] = []
    waiting = total = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > size:
            raise WrongBlobError(f"more bytes than the announced {size}")
        pieces.append(chunk)
        waiting += len(chunk)
        if waiting >= CHUNK_BYTES:
            yield b"".join(pieces)
            pieces, waiting = [], 0
    yield b"".join(pieces)


MAX_URL_S = 6 * 3600
"""maximum lifetime of a URL"""


@runtime_checkable
class DirectStore(Protocol):
    """A store to which nodes may upload directly."""

    @property
    def address(self) -> str:
        """The prefix of this store's URLs, up to and including the slash before a blob's path."""
        ...

    async def sign_upload(self, name: str, size: int, expires_s: int) -> str:
        """A temporary URL for uploading a blob; the blob exists once `has` has verified the upload."""
        ...


@runtime_checkable
class DirectReader(Protocol):
    """A blob that nodes may download directly."""

    async def sign_download(self, expires_s: int) -> str:
        """A temporary URL for downloading the blob."""
        ...
