"""What a node keeps of a coordinator's word: leases, receipts and verdict records, each as it was signed.

A document is kept before the node acts upon it, under the name of what it is about. With it the node can prove what it
was told and what it handed in, whatever the coordinator says later. The oldest go when there are more than `MAX_KEPT`
of a kind.
"""

import re
from collections import deque
from pathlib import Path
from typing import TypeVar

from shoal.files import sweep_leftovers, write_atomic
from shoal.swarm.messages import Lease, Receipt, VerdictRecord
from shoal.swarm.tags import DocumentError, Tag, open_document

MAX_KEPT = 10_000
_NAME = re.compile(r"[a-z0-9-]{1,64}")
_FOLDERS: dict[type, tuple[str, Tag]] = {
    Lease: ("leases", Tag.LEASE),
    Receipt: ("receipts", Tag.RECEIPT),
    VerdictRecord: ("verdicts", Tag.VERDICT),
}

Kept = TypeVar("Kept", Lease, Receipt, VerdictRecord)


class KeepError(Exception):
    """A document that the coordinator did not sign, or that says something else than the answer it came with."""


class Keepsakes:
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
        """Keep a document, if it is the coordinator's and says what the message says."""
        folder, tag = _FOLDERS[type(message)]
        assert _NAME.fullmatch(name), "a name is an id of the server's that was checked before"
        try:
            body = open_document(self._coordinator, tag, document.encode())
        except DocumentError as error:
            raise KeepError(f"the coordinator's {tag.value} is worth nothing: {error}") from None
        if body != message.model_dump(mode="json") or message.run != self._run:
            raise KeepError(f"the coordinator's {tag.value} says something else than its answer")
        path = self._folder / folder / f"{name}.json"
        is_new = not path.exists()
        write_atomic(path, document.encode())
        if is_new:
            self._kept[folder].append(path)
            self._drop_oldest(self._kept[folder])

    def _drop_oldest(self, paths: "deque[Path]") -> None:
        while len(paths) > MAX_KEPT:
            paths.popleft().unlink(missing_ok=True)
