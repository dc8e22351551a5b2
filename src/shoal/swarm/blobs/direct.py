"""What a store of blobs may do besides: let others write and read past us, by URLs that end by time.

Both ends know the name under which a file is put and read, so a URL that names anything else is nobody's to use.
"""

from typing import Protocol, runtime_checkable

MAX_URL_S = 6 * 3600
"""how long a URL holds at most"""


def place_blob(name: str) -> str:
    """Where a blob lies in its store."""
    return f"{name[:2]}/{name}"


def place_incoming(name: str, size: int) -> str:
    """Where a blob is put by who hands it in past us."""
    return f"incoming/{name}.{size}"


@runtime_checkable
class DirectStore(Protocol):
    """A store that nodes may write to past us."""

    @property
    def address(self) -> str:
        """What the URLs of this store begin with, up to and with the slash before a blob's place."""
        ...

    async def sign_upload(self, name: str, size: int, expires_s: int) -> str:
        """A URL to which a blob may be put for a while; it is there once `has` found it right."""
        ...


@runtime_checkable
class DirectReader(Protocol):
    """A blob that may be read past us."""

    async def sign_download(self, expires_s: int) -> str:
        """A URL from which the blob may be read for a while."""
        ...
