"""What a store of blobs may do besides: let others write and read past us, by URLs that end by time."""

from typing import Protocol, runtime_checkable

MAX_URL_S = 6 * 3600
"""how long a URL holds at most"""


@runtime_checkable
class DirectStore(Protocol):
    """A store that nodes may write to past us."""

    async def sign_upload(self, name: str, size: int, expires_s: int) -> str:
        """A URL to which a blob may be put for a while; it is there once `has` found it right."""
        ...


@runtime_checkable
class DirectReader(Protocol):
    """A blob that may be read past us."""

    async def sign_download(self, expires_s: int) -> str:
        """A URL from which the blob may be read for a while."""
        ...
