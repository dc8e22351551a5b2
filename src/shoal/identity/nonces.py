"""Replay protection: every nonce is accepted once per node and kept for longer than its request could be accepted.

Invariants:
- a nonce is kept until `keep_s` after its signing time. A request is accepted up to `window_s` before and after that
  time, so 2 x `window_s` would suffice; the rest tolerates a server clock that is set back;
- requests signed before the newest forgotten nonce are refused, whatever the clock shows (`floor`). If a clock ran far
  ahead and was then corrected, every request is refused until the clock passes that time again, or the file is deleted;
- only valid signatures reach this store, so forged ids cost it nothing; `max_entries` bounds memory and disk, and
  when it is full new requests are refused rather than old nonces forgotten;
- a nonce is in the file before its request is answered, so kill -9 loses none. Only a power failure loses those of the
  last moments, because writes are not synced.

Nonces are grouped in slots by time, so forgetting means dropping a slot: at once in memory, and in the file by `tidy`,
which may run in another thread.
"""

import hashlib
import sqlite3
import threading
from pathlib import Path

from shoal.errors import ConfigError, DiskError, UnavailableError
from shoal.net.api_error import ApiError

SLOT_S = 30
MARK_BYTES = 16
_ROWS_PER_DELETE = 500
"""rows removed from the file per transaction, between which others may write"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nonce (slot INTEGER NOT NULL, mark BLOB NOT NULL, PRIMARY KEY (slot, mark)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS floor (id INTEGER PRIMARY KEY CHECK (id = 1), slot INTEGER NOT NULL);
"""


class NonceStore:
    """The nonces of the last minutes, in memory and in a file that one process has open."""

    def __init__(self, path: Path, *, window_s: int = 60, keep_s: int = 300, max_entries: int = 1_000_000) -> None:
        if keep_s <= 2 * window_s:
            raise ConfigError(f"nonces kept for {keep_s} s: must be more than twice the clock window of {window_s} s")
        self._window_s = window_s
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._path = path
        self._slots: dict[int, set[bytes]] = {}
        self._floor = 0
        """first slot that accepts nonces"""
        self._swept = 0
        """slot of the last cleanup"""
        self._num_entries = 0
        self._lock = threading.Lock()
        self._database = self._open_file()

    def __len__(self) -> int:
        return self._num_entries

    def add_nonce(self, node: str, nonce: str, created_s: int, now_ms: int) -> None:
        """Record the nonce of a request with a valid signature; raises for one that was seen before."""
        slot = created_s // SLOT_S
        mark = hashlib.blake2b(bytes.fromhex(node + nonce), digest_size=MARK_BYTES).digest()
        with self._lock:
            self._sweep_slots(now_ms // 1000)
            if slot < self._floor:
                raise ApiError(
                    503, "clock_set_back", "the server's clock was set back; try again when it has caught up"
                )
            marks = self._slots.get(slot)
            if marks is not None and mark in marks:
                raise ApiError(401, "replay", "this nonce was used before; sign again with a new nonce")
            self._make_room(now_ms // 1000)
            self._write_mark(slot, mark)
            self._slots.setdefault(slot, set()).add(mark)
            self._num_entries += 1

    def tidy(self) -> None:
        """Remove forgotten nonces from the file, a few at a time."""
        try:
            while self._remove_some():
                pass
        except sqlite3.Error as error:
            raise DiskError(f"{self._path}: nonces cannot be written ({error})") from error

    def close(self) -> None:
        """Close the file, which releases its lock."""
        with self._lock:
            self._database.close()

    def _sweep_slots(self, now_s: int) -> None:
        """Forget old nonces, once per slot."""
        if now_s // SLOT_S != self._swept:
            self._swept = now_s // SLOT_S
            self._forget_slots(now_s - self._keep_s)

    def _forget_slots(self, before_s: int) -> None:
        """Drop the slots that ended before a time, wherever they are: a clock set back leaves slots in the future."""
        for slot in [slot for slot in self._slots if (slot + 1) * SLOT_S <= before_s]:
            self._num_entries -= len(self._slots.pop(slot))
            self._floor = max(self._floor, slot + 1)

    def _make_room(self, now_s: int) -> None:
        if self._num_entries >= self._max_entries:
            self._forget_slots(now_s - self._window_s)
        if self._num_entries >= self._max_entries:
            raise ApiError(503, "busy", "too many requests in the last minutes; try again soon", retry_after_s=SLOT_S)

    def _open_file(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA locking_mode = EXCLUSIVE")  # two stores on one file would miss each other's nonces
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
            for (floor,) in database.execute("SELECT slot FROM floor"):
                self._floor = floor
            for slot, mark in database.execute(
                "SELECT slot, mark FROM nonce WHERE slot >= ? ORDER BY slot", (self._floor,)
            ):
                self._slots.setdefault(slot, set()).add(mark)
                self._num_entries += 1
        except sqlite3.OperationalError as error:
            raise UnavailableError(
                f"{self._path}: cannot be opened, or another process has it open ({error})"
            ) from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self._path}: not a nonce file ({error}); choose another path") from None
        return database

    def _write_mark(self, slot: int, mark: bytes) -> None:
        try:
            self._database.execute("INSERT OR IGNORE INTO nonce VALUES (?, ?)", (slot, mark))
        except sqlite3.Error as error:  # an unrecorded nonce could be replayed
            raise ApiError(503, "disk", f"the server cannot record requests now ({error}); try again soon") from error

    def _remove_some(self) -> bool:
        """Remove a few rows of forgotten slots; returns whether there may be more."""
        with self._lock, self._database:  # commits, or rolls back on an exception
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT OR REPLACE INTO floor VALUES (1, ?)", (self._floor,))
            removed = self._database.execute(
                "DELETE FROM nonce WHERE (slot, mark) IN (SELECT slot, mark FROM nonce WHERE slot < ? LIMIT ?)",
                (self._floor, _ROWS_PER_DELETE),
            )
            return removed.rowcount == _ROWS_PER_DELETE
