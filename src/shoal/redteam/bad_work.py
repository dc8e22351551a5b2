"""What a canary handed in that is known to be bad: which leases, and under which names the coordinator has them.

<folder>/bad.json       leases, noted before their work is handed in
<folder>/receipts/      the coordinator's receipts, which name submission and lease
"""

import json
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic


class BadWork:
    """The bad work of the canary in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path, self._receipts = folder / "bad.json", folder / "receipts"

    def add(self, lease: str) -> None:
        """Note a lease whose work is bad."""
        write_atomic(self._path, json.dumps(sorted({*self.list_leases(), lease})).encode())

    def list_leases(self) -> frozenset[str]:
        """All of them; ConfigError if the file is damaged."""
        if not self._path.exists():
            return frozenset()
        try:
            names = json.loads(self._path.read_bytes())
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self._path}: is damaged; without it nobody knows what the canary handed in")
        return frozenset(names)

    def list_submissions(self) -> list[str]:
        """What was handed in for them, the oldest first."""
        leases = self.list_leases()
        paths = self._receipts.glob("s*.json") if leases else ()
        bodies = [json.loads(path.read_bytes())["body"] for path in paths]
        names = [str(body["submission"]) for body in bodies if body["lease"] in leases]
        return sorted(names, key=lambda name: int(name[1:]))
