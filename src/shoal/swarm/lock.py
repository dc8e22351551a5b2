"""One writer per ledger, enforced by the operating system or the database server.

Invariant: the lock goes with the process. kill -9 frees it; no file of a dead writer has to be removed by hand.
"""

import fcntl
import os
import time
from collections.abc import Callable

from sqlalchemy import Connection, text

from shoal.errors import ConfigError
from shoal.swarm.db import is_sqlite, show_url

_POLL_S = 0.05
_ADVISORY_KEY = 0x73686F616C6C6467
"""Changing breaks: a writer of the older version beside one of the newer is no longer refused."""


class WriterLock:
    """The right to write to the ledger behind a connection, which stays open as long as the lock is held."""

    def __init__(self, connection: Connection, wait_s: float) -> None:
        """Wait up to `wait_s` for it: a PostgreSQL server takes a moment to see that the last writer was killed."""
        self._descriptor: int | None = None
        name = show_url(connection.engine)
        if is_sqlite(connection):
            self._descriptor = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            taken = _retry(lambda: _lock_file(self._descriptor), wait_s)
        else:
            taken = _retry(lambda: _lock_server(connection), wait_s)
        if not taken:
            self.release()
            raise ConfigError(
                f"{name}: another process is writing to this ledger; a ledger has one writer, stop it first"
            )

    def release(self) -> None:
        """Let another writer start. On PostgreSQL the lock goes when the connection is closed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _retry(attempt: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _lock_file(descriptor: int | None) -> bool:
    assert descriptor is not None, "an open file"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_server(connection: Connection) -> bool:
    with connection.begin():
        return bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ADVISORY_KEY}).scalar())
