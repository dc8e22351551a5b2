"""A file as it comes from the other side: counted, hashed, and there under its name only if it is the one asked for.

Invariants:
- no more bytes are kept than were allowed, whatever the other side announces or sends;
- the name shows the whole file with the right hash, or nothing; what was begun is gone when the block ends.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType

from shoal.shardcast.http import HttpError


class Intake:
    """One file on its way in, used as a context."""

    def __init__(self, path: Path, blob: str, size: int) -> None:
        """`size` is how many bytes there may be at most."""
        self.blob, self.size = blob, size
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        self._file = self._temporary.open("wb")
        self._found = hashlib.sha256()
        self.received = 0

    def restart(self) -> None:
        """Forget what came so far."""
        self._file.seek(0)
        self._file.truncate()
        self._found = hashlib.sha256()
        self.received = 0

    def take(self, piece: bytes) -> None:
        """The next bytes; `HttpError` for more than were allowed."""
        if self.received + len(piece) > self.size:
            raise HttpError(f"an answer of more than {self.size} bytes")
        self._found.update(piece)
        self._file.write(piece)
        self.received += len(piece)

    @property
    def is_whole(self) -> bool:
        """Whether what came is the file."""
        return self._found.hexdigest() == self.blob

    def keep(self) -> None:
        """Give the file its name."""
        assert self.is_whole, "only what was found right is kept"
        self._file.close()
        self._temporary.replace(self._path)

    def __enter__(self) -> "Intake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
