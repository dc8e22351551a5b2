"""A reducer's state on disk: an occasional snapshot of the whole state, and every outcome since.

    snapshot.bin                      the outer state, some rounds old
    outcomes/<number>-<f>-<r>-<base>  outcome of round r of fragment f, in the order in which rounds closed
    states/<hash>.bin                 states for peers to download; made on request, and never read at a start

Invariants:
- an outcome is on disk (temporary name, fsync, rename) before any peer sees it; state = snapshot + outcomes, so kill -9
  at any moment loses no round that was answered;
- an outcome is deleted only when a snapshot includes it and `keep` later rounds of its fragment exist;
- file names consist only of our own numbers and hashes.

All methods block; one thread at a time.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.diloco.http.messages import CHUNK_BYTES, MessageError, join_outcome, split_outcome
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.reduce import StateMismatchError, apply_outcome
from shoal.diloco.round import RoundKey, RoundOutcome
from shoal.diloco.state import OuterState, StateError, decode_state, encode_state
from shoal.errors import ConfigError
from shoal.util.files import sweep_leftovers, write_atomic

KEEP_STATES = 3
_OUTCOME = re.compile(r"([0-9]{10})-([0-9]+)-([0-9]+)-([0-9a-f]{64})")


class SnapshotStore:
    """The files of one reducer."""

    def __init__(self, folder: Path, plan: DilocoPlan, reducer: str, *, keep: int, snapshot_every: int) -> None:
        self._plan, self._reducer = plan, reducer
        self._keep, self._every = keep, snapshot_every
        self._snapshot = folder / "snapshot.bin"
        self._outcomes, self._states = folder / "outcomes", folder / "states"
        for path in (folder, self._outcomes, self._states):
            path.mkdir(parents=True, exist_ok=True)
            sweep_leftovers(path)
        self._number = max((number for number, _, _, _ in self._list_files()), default=-1) + 1
        self._snapped = -1
        """number of the last outcome in the snapshot, as far as this process knows"""

    def load(self) -> OuterState | None:
        """The state when the last round was answered; None in a new folder."""
        if not self._snapshot.exists():
            return None
        try:
            state = decode_state(self._snapshot.read_bytes(), self._plan.sizes)
        except StateError as error:
            raise ConfigError(f"{self._snapshot}: not an outer state of this plan ({error})") from None
        for number, fragment, round_number, path in self._list_files():
            if state.fragments[fragment].round > round_number:
                self._snapped = number
                continue
            try:
                state = apply_outcome(self._plan, state, self._read_outcome(path))
            except (MessageError, StateMismatchError) as error:
                raise ConfigError(f"{path}: outcome does not follow from the state ({error})") from None
        return state

    def begin(self, state: OuterState) -> None:
        """Start from a state; earlier files are deleted."""
        for _, _, _, path in list(self._list_files()):
            path.unlink()
        self.snap(state)

    def add_outcome(self, outcome: RoundOutcome, data: bytes) -> None:
        """Store the encoded outcome of a round."""
        key = outcome.key
        write_atomic(self._outcomes / f"{self._number:010d}-{key.fragment}-{key.round}-{key.base}", data)
        self._number += 1

    def is_snap_due(self) -> bool:
        """Whether enough rounds have passed since the last snapshot."""
        return self._number - 1 - self._snapped >= self._every

    def snap(self, state: OuterState) -> None:
        """Write the whole state, and delete the outcomes that are no longer needed."""
        write_atomic(self._snapshot, encode_state(state))
        self._snapped = self._number - 1
        for number, fragment, round_number, path in list(self._list_files()):
            if number <= self._snapped and round_number < state.fragments[fragment].round - self._keep:
                path.unlink()

    def read_outcome(self, key: RoundKey, index: int) -> bytes | None:
        """A chunk of the encoded outcome of a round; None if it is not kept."""
        for _, fragment, round_number, path in self._list_files():
            if (fragment, round_number) == (key.fragment, key.round) and path.name.endswith(key.base):
                return _read_chunk(path, index)
        return None

    def list_outcomes(self) -> Iterator[RoundOutcome]:
        """All stored outcomes, in order."""
        for _, _, _, path in list(self._list_files()):
            yield self._read_outcome(path)

    def export(self, state: OuterState) -> tuple[int, str]:
        """Prepare a state for download; returns its size in bytes and SHA-256."""
        path = self._states / f"{state.hash}.bin"
        if not path.exists():
            write_atomic(path, encode_state(state), sync=False)
            old = sorted(self._states.glob("*.bin"), key=lambda found: found.stat().st_mtime)
            for spare in old[:-KEEP_STATES]:
                spare.unlink()
        with path.open("rb") as file:
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()

    def read_state(self, digest: str, index: int) -> bytes | None:
        """A chunk of a prepared state; None if it was deleted. `digest` is 64 hex characters."""
        return _read_chunk(self._states / f"{digest}.bin", index)

    def _read_outcome(self, path: Path) -> RoundOutcome:
        data = path.read_bytes()
        head, start = split_outcome(data, self._reducer, self._plan)
        return join_outcome(head, data[start:])

    def _list_files(self) -> Iterator[tuple[int, int, int, Path]]:
        """Number, fragment, round and path of every outcome, in order."""
        for path in sorted(self._outcomes.iterdir()):
            if (match := _OUTCOME.fullmatch(path.name)) is not None:
                yield int(match[1]), int(match[2]), int(match[3]), path


def _read_chunk(path: Path, index: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(index * CHUNK_BYTES)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:
        return None
