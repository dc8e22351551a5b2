"""One line that says how things stand: redrawn in place on a terminal, now and then as a plain line anywhere else."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TextIO

from shoal.console import clean_text, is_live

_REDRAW_S = 0.25
_PLAIN_S = 5.0


class LiveLine:
    """Notes and a status line on one stream, which do not overwrite each other."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = is_live(self._stream)
        self._drawn = ""

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._clear()
        print(clean_text(text), file=self._stream, flush=True)

    @asynccontextmanager
    async def show(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """While inside, the line is what `describe` returns."""
        task = asyncio.create_task(self._keep_drawing(describe))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._clear()

    async def _keep_drawing(self, describe: Callable[[], str]) -> None:
        last = ""
        while True:
            text = clean_text(describe())
            if self._live:
                self._draw(text)
            elif text != last:
                print(last := text, file=self._stream, flush=True)
            await asyncio.sleep(_REDRAW_S if self._live else _PLAIN_S)

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._drawn = text[:width]
        self._stream.write(f"\r\x1b[K{self._drawn}")
        self._stream.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = ""
