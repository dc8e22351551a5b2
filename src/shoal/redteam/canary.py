"""The operator's canaries, in a folder that only the operator can read.

    <folder>/run                     the run they are for
    <folder>/sealing/<nonce>/<name>  created, not yet known to be in the ledger; the nonce is that of the command
    <folder>/sealed/<name>           ready to be planted
    <folder>/planted/<name>          working: the folder of its node, with its owner's key
        bad.json                     leases whose work is bad, recorded before submission
        receipts/                    the coordinator's receipts, which name submission and lease
    <folder>/revealed/<name>         done; keys and receipts are kept as evidence

A canary's name is the beginning of its seal. Only this folder records which seal belongs to which owner.

Invariants:
- each move is one rename: a canary is in exactly one place, even after a kill;
- an owner is sealed before it is planted, and planted once;
- if the process dies while sealing, the next command seals the same canaries under the same nonce.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.protocol.beacon import make_seal
from shoal.train.rundir import lock_dir
from shoal.util.files import atomic_dir, sync_path, write_atomic

SEALING, SEALED, PLANTED, REVEALED = "sealing", "sealed", "planted", "revealed"
_NAME_CHARS = 12
_WEIGHTS = "weights"


class CanarySet:
    """The canaries of one run. Blocking I/O."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        try:
            for name in ("", SEALING, SEALED, PLANTED, REVEALED):
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be used for canaries ({error.strerror})") from None
        known_run = folder / "run"
        if not known_run.exists():
            write_atomic(known_run, run.encode())
        if (known := known_run.read_text()) != run:
            raise ConfigError(f"{folder}: contains canaries of run {known}; choose another folder for run {run}")

    def begin_sealing(self, count: int) -> Path:
        """A folder of canaries to seal, named after the nonce of the command: unfinished ones if any, else new ones."""
        if begun := self.list_canaries(SEALING):
            return begun[0]
        sealing = self._folder / SEALING / os.urandom(16).hex()
        with atomic_dir(sealing) as temporary:
            for _ in range(count):
                owner = Key.generate()
                path = temporary / make_seal(owner, self._run)[:_NAME_CHARS]
                path.mkdir(mode=0o700)
                owner.save(path / "owner.key")
        return sealing

    def list_seals(self, sealing: Path) -> tuple[str, ...]:
        """The seals of a folder from `begin_sealing`."""
        return tuple(make_seal(load_owner(path), self._run) for path in sorted(sealing.iterdir()))

    def end_sealing(self, sealing: Path) -> None:
        """The canaries are in the ledger and can be planted."""
        for path in sorted(sealing.iterdir()):
            path.rename(self._folder / SEALED / path.name)
        sync_path(self._folder / SEALED)
        sealing.rmdir()

    def list_canaries(self, place: str) -> list[Path]:
        """The canaries in one state."""
        return sorted(path for path in (self._folder / place).iterdir() if not path.name.startswith("."))

    def has_idle(self) -> bool:
        """Whether a planted canary is used by no process."""
        found = self._find_idle()
        if found is not None:
            os.close(found[1])
        return found is not None

    @contextmanager
    def hold_planted(self) -> Iterator[Path]:
        """A planted canary that is not done, else a sealed one; locked for this process."""
        path, lock = self._find_idle() or self._plant()
        try:
            yield path
        finally:
            os.close(lock)

    def end_planted(self, path: Path) -> None:
        """The canary was revealed."""
        shutil.rmtree(path / _WEIGHTS, ignore_errors=True)
        path.rename(self._folder / REVEALED / path.name)

    def _find_idle(self) -> tuple[Path, int] | None:
        for path in self.list_canaries(PLANTED):
            try:
                return path, lock_dir(path)
            except ConfigError:
                continue  # used by another process
        return None

    def _plant(self) -> tuple[Path, int]:
        sealed = self.list_canaries(SEALED)
        if not sealed:
            raise ConfigError(
                f"{self._folder}: no sealed canary left; create some with `shoal canary seal`, well before planting: "
                "a node that joins right after a seal is easy to suspect"
            )
        path = random.SystemRandom().choice(sealed)
        lock = lock_dir(path)
        return path.rename(self._folder / PLANTED / path.name), lock


def load_owner(path: Path) -> Key:
    """The owner's key of a canary."""
    return Key.load(path / "owner.key")


class CanaryWork:
    """The bad work of the canary in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path, self._receipts = folder / "bad.json", folder / "receipts"

    def add(self, lease: str) -> None:
        """Record a lease whose work is bad."""
        write_atomic(self._path, json.dumps(sorted({*self.list_leases(), lease})).encode())

    def list_leases(self) -> frozenset[str]:
        """All of these leases; ConfigError if the file is corrupt."""
        if not self._path.exists():
            return frozenset()
        try:
            names = json.loads(self._path.read_bytes())
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self._path}: corrupt file; the canary's bad submissions are unknown")
        return frozenset(names)

    def list_submissions(self) -> list[str]:
        """The submissions for these leases, oldest first."""
        leases = self.list_leases()
        paths = self._receipts.glob("s*.json") if leases else ()
        bodies = [json.loads(path.read_bytes())["body"] for path in paths]
        names = [str(body["submission"]) for body in bodies if body["lease"] in leases]
        return sorted(names, key=lambda name: int(name[1:]))
