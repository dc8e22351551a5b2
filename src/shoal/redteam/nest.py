"""The operator's canaries, in a folder that nobody else may read.

    <folder>/run                     the run that they are for
    <folder>/sealing/<nonce>/<name>  made, and not yet known to be in the ledger; the nonce is the command's
    <folder>/sealed/<name>           in stock
    <folder>/planted/<name>          at work: the folder of its node, with its owner's key
    <folder>/revealed/<name>         done; keys and receipts stay, as evidence

A canary's name is the beginning of its seal. Who knows which seal is which owner is this folder alone.

Invariants:
- each move is one rename: a canary is in one place, also after a kill;
- an owner is sealed before it is planted, and planted once;
- what was about to be sealed when the process died is sealed by the next command, under the same nonce.
"""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import atomic_dir, sync_dir, write_atomic
from shoal.keys import Key
from shoal.rundir import lock_dir
from shoal.swarm.seals import make_seal

SEALING, SEALED, PLANTED, REVEALED = "sealing", "sealed", "planted", "revealed"
_NAME_CHARS = 12
_WEIGHTS = "weights"


class Nest:
    """The canaries of one run. Blocking."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        try:
            for name in ("", SEALING, SEALED, PLANTED, REVEALED):
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be used for canaries ({error.strerror})") from None
        pinned = folder / "run"
        if not pinned.exists():
            write_atomic(pinned, run.encode())
        if (known := pinned.read_text()) != run:
            raise ConfigError(f"{folder}: has the canaries of run {known}; choose another folder for run {run}")

    def begin_sealing(self, count: int) -> Path:
        """A folder of canaries to seal, named by the nonce of the command: new ones, or those that were begun."""
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
        """The seals of a folder of `begin_sealing`."""
        return tuple(make_seal(load_owner(path), self._run) for path in sorted(sealing.iterdir()))

    def end_sealing(self, sealing: Path) -> None:
        """They are in the ledger, and so in stock."""
        for path in sorted(sealing.iterdir()):
            path.rename(self._folder / SEALED / path.name)
        sync_dir(self._folder / SEALED)
        sealing.rmdir()

    def list_canaries(self, place: str) -> list[Path]:
        """Those in one place."""
        return sorted(path for path in (self._folder / place).iterdir() if not path.name.startswith("."))

    def has_idle(self) -> bool:
        """Whether one is planted and no process works with it."""
        found = self._find_idle()
        if found is not None:
            os.close(found[1])
        return found is not None

    @contextmanager
    def hold_planted(self) -> Iterator[Path]:
        """One that was planted and is not done, else one out of stock; for this process alone."""
        path, lock = self._find_idle() or self._plant()
        try:
            yield path
        finally:
            os.close(lock)

    def end_planted(self, path: Path) -> None:
        """It was revealed."""
        shutil.rmtree(path / _WEIGHTS, ignore_errors=True)
        path.rename(self._folder / REVEALED / path.name)

    def _find_idle(self) -> tuple[Path, int] | None:
        for path in self.list_canaries(PLANTED):
            try:
                return path, lock_dir(path)
            except ConfigError:
                continue  # another process has it
        return None

    def _plant(self) -> tuple[Path, int]:
        stock = self.list_canaries(SEALED)
        if not stock:
            raise ConfigError(
                f"{self._folder}: no sealed canary is left; make some with `shoal canary seal`, well before they are "
                "planted: a node that joins right after a seal is easy to suspect"
            )
        path = random.SystemRandom().choice(stock)
        lock = lock_dir(path)
        return path.rename(self._folder / PLANTED / path.name), lock


def load_owner(path: Path) -> Key:
    """The owner's key of a canary."""
    return Key.load(path / "owner.key")
