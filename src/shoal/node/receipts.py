"""Documents that the coordinator signed for a node, kept on disk: leases, receipts and verdict records.

A document is kept before the node acts on it, under the id of its subject. With it the node can prove what it was told
and what it submitted, whatever the coordinator claims later. At most `MAX_KEPT` of each kind are kept; the oldest are
removed.
"""

import re
from collections import deque
from pathlib import Path
from typing import TypeVar

from shoal.identity.documents import DocumentError, Tag, open_document
from shoal.protocol.messages import Lease, Receipt, VerdictRecord
from shoal.util.files import sweep_leftovers, write_atomic

MAX_KEPT = 10_000
_NAME = re.compile(r"[a-z0-9-]{1,64}")
_FOLDERS: dict[type, tuple[str, Tag]] = {
    Lease: ("grants", Tag.LEASE),
    Receipt: ("receipts", Tag.RECEIPT),
    VerdictRecord: ("verdicts", Tag.VERDICT),
}

Kept = TypeVar("Kept", Lease, Receipt, VerdictRecord)


class InvalidDocumentError(Exception):
    """A document that the coordinator did not sign, or that differs from the answer it came with."""


class SignedDocumentStore:
    """The signed documents of one node, in a folder."""

    def __init__(self, folder: Path, run: str, coordinator: str) -> None:
        self._folder, self._run, self._coordinator = folder, run, coordinator
        self._kept: dict[str, deque[Path]] = {}
        for name, _ in _FOLDERS.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
            sweep_leftovers(folder / name)
            paths = sorted((folder / name).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            self._kept[name] = deque(paths)

    def keep(self, name: str, message: Kept, document: str) -> None:
        """Keep a document if the coordinator signed it and it matches the message."""
        folder, tag = _FOLDERS[type(message)]
        assert _NAME.fullmatch(name), "a name is a server id that was validated before"
        try:
            body = open_document(self._coordinator, tag, document.encode())
        except DocumentError as error:
            raise InvalidDocumentError(f"invalid signature on the coordinator's {tag.value}: {error}") from None
        if body != message.model_dump(mode="json") or message.run != self._run:
            raise InvalidDocumentError(f"the coordinator's {tag.value} differs from its answer")
        path = self._folder / folder / f"{name}.json"
        is_new = not path.exists()
        write_atomic(path, document.encode())
        if is_new:
            self._kept[folder].append(path)
            self._drop_oldest(self._kept[folder])

    def _drop_oldest(self, paths: "deque[Path]") -> None:
        while len(paths) > MAX_KEPT:
            paths.popleft().unlink(missing_ok=True)
