"""One line that says how things stand: redrawn in place on a terminal, now and then as a plain line anywhere else."""

import asyncio
import errno
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TextIO

from shoal.console import clean_text, is_live

_REDRAW_S = 0.25
_PLAIN_S = 5.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LiveLine:
    """Notes and a status line on one stream, and results on another, which do not overwrite each other."""

    def __init__(self, stream: TextIO | None = None, results: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._results = results or sys.stdout
        self._live = is_live(self._stream)
        self._drawn = ""

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._write(f"{clean_text(text)}\n")

    def result(self, text: str) -> None:
        """Say what was asked for, where another program may read it: both streams are mostly the same terminal."""
        self._clear()
        print(text, file=self._results, flush=True)

    @asynccontextmanager
    async def show(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """While inside, the line is what `describe` returns. An error there ends the block, and is raised."""
        owner = asyncio.current_task()
        assert owner is not None, "in a task"
        task = asyncio.create_task(self._keep_drawing(describe))
        task.add_done_callback(lambda task: None if task.cancelled() else owner.cancel())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._clear()
            if not task.cancelled():
                owner.uncancel()
                task.result()

    async def _keep_drawing(self, describe: Callable[[], str]) -> None:
        last = ""
        while True:
            text = clean_text(describe())
            if self._live:
                self._draw(text)
            elif text != last:
                self._write(f"{text}\n")
                last = text
            await asyncio.sleep(_REDRAW_S if self._live else _PLAIN_S)

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write(text[:width])
        self._drawn = text[:width]

    def _clear(self) -> None:
        if self._drawn:
            self._write("")

    def _write(self, text: str) -> None:
        """Write over the line that is drawn. A full disk behind the stream costs the words, not who says them."""
        try:
            self._stream.write(f"\r\x1b[K{text}" if self._live else text)
            self._stream.flush()
        except OSError as error:
            if error.errno not in _FULL:
                raise
        self._drawn = ""
