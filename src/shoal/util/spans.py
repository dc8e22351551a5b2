"""Where a role's time went: one JSON line per span, from which the overlap of all roles is drawn.

    {"role": "trainer", "name": "train", "kind": "busy", "start_ms": ..., "end_ms": ..., "step": 3}

Invariants:
- times are wall-clock milliseconds that never go backwards within a process: the wall clock is read once, and the
  monotonic clock is added to it;
- a span is written when it ends, in one append. Spans in progress when the process dies are lost;
- spans may be opened in any thread;
- a full disk loses spans, and affects nothing else.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shoal.util.disk import spare_words
from shoal.util.files import repair_jsonl

Kind = Literal["busy", "wait"]
Field = int | float | str


class SpanLog:
    """The spans of one role; without a path they are not stored."""

    def __init__(
        self,
        path: Path | None,
        role: str,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role, self._monotonic = role, monotonic
        self._offset_s = wall() - monotonic()
        self._descriptor = -1
        self._lock = threading.Lock()
        if path is not None:
            repair_jsonl(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @contextmanager
    def span(self, name: str, *, kind: Kind = "busy", **fields: Field) -> Iterator[None]:
        """Record how long the block took, however it ended."""
        start_ms = self._read_ms()
        try:
            yield
        finally:
            self._write(name, kind, start_ms, fields)

    def close(self) -> None:
        """Stop recording. Closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_ms(self) -> int:
        return round(1000 * (self._offset_s + self._monotonic()))

    def _write(self, name: str, kind: Kind, start_ms: int, fields: dict[str, Field]) -> None:
        if self._descriptor < 0:
            return
        line = {"role": self._role, "name": name, "kind": kind, "start_ms": start_ms, "end_ms": self._read_ms()}
        data, written = f"{json.dumps(line | fields)}\n".encode(), 0
        with self._lock:
            size = os.fstat(self._descriptor).st_size
            with spare_words():
                written = os.write(self._descriptor, data)
            if written < len(data):
                os.ftruncate(self._descriptor, size)  # a partial line would corrupt the next one
