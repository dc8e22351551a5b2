"""Terminal output of a running command: a progress bar, or one status line, redrawn in place.

Without a terminal that can redraw, both become log lines. Results of a command go to stdout.
"""

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shoal.util.logs import clean_text, is_quiet, log_to_file, print_logs_with

if TYPE_CHECKING:
    from rich.progress import Progress

REWARD = "reward/mean"
"""metric of a step: mean task reward of the rollouts sampled for it"""
TOKENS_RATE = "perf/tokens_per_s"
"""metric of a step: generated tokens per second"""
PASS_RATE = "eval/pass_at_1"
"""metric of an evaluation: share of held-out completions that pass"""
_REDRAW_S = 0.25
_PLAIN_S = 5.0
logger = logging.getLogger(__name__)


class Console:
    """Progress of one training run: a live bar on a terminal, log lines otherwise, and everything in the run's log.

    Life cycle: start -> report_step / report_eval ... -> close.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stderr
        self._stack, self._clock = ExitStack(), clock
        if log_path is not None:
            self._stack.enter_context(log_to_file(log_path))
        self._bar = _build_bar(stream) if is_live(stream) and not is_quiet() else None
        self._pass_rate: float | None = None
        self._total = self._first = 0
        self._started_s = 0.0

    def start(self, total_steps: int, at_step: int) -> None:
        """Training starts or resumes with `at_step` steps already done."""
        self._total, self._first, self._started_s = total_steps, at_step, self._clock()
        if self._bar is not None:
            self._bar.add_task("step", total=total_steps, completed=at_step, state="")
            self._bar.start()
            self._stack.callback(self._bar.stop)
            self._stack.enter_context(print_logs_with(self._print_above))

    def report_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report that step `step` is done."""
        state = "  ".join(self._list_fields(step, metrics))
        logger.info("%s", f"step {step}/{self._total}  {state}".rstrip(), extra={"is_drawn": True})
        if self._bar is not None and self._bar.tasks:
            self._bar.update(self._bar.tasks[0].id, completed=step, state=state)

    def report_eval(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report the evaluation of version `step` on held-out tasks."""
        self._pass_rate = metrics.get(PASS_RATE)
        figures = "  ".join(f"{name.removeprefix('eval/')} {_show_figure(value)}" for name, value in metrics.items())
        logger.info("eval at step %d  %s", step, figures)

    def close(self) -> None:
        """Restore the terminal. Closing twice is harmless."""
        self._stack.close()

    def _list_fields(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        fields = []
        if (reward := metrics.get(REWARD)) is not None:
            fields.append(f"reward {reward:.3f}")
        if self._pass_rate is not None:
            fields.append(f"held-out {self._pass_rate:.3f}")
        if (rate := metrics.get(TOKENS_RATE)) is not None:
            fields.append(f"{rate:.0f} tokens/s")
        if self._first < step < self._total:
            per_step_s = (self._clock() - self._started_s) / (step - self._first)
            fields.append(f"{format_time(per_step_s * (self._total - step))} left")
        return fields

    def _print_above(self, line: str) -> None:
        assert self._bar is not None
        self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveLine:
    """A status line on one stream and results on another; they do not overwrite each other or the log."""

    def __init__(self, stream: TextIO | None = None, results: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._results = results or sys.stdout
        self._is_live = is_live(self._stream) and not is_quiet()
        self._drawn = ""

    def result(self, text: str) -> None:
        """Print a result where another program can read it; both streams are usually the same terminal."""
        self._clear()
        self._results.write(f"{text}\n")
        self._results.flush()

    @asynccontextmanager
    async def show(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """In this context, show what `describe` returns. An error in `describe` ends the block and is raised."""
        owner = asyncio.current_task()
        assert owner is not None, "must run in a task"
        task = asyncio.create_task(self._keep_drawing(describe))
        task.add_done_callback(lambda task: None if task.cancelled() else owner.cancel())
        with ExitStack() as stack:
            if self._is_live:
                stack.enter_context(print_logs_with(lambda line: self._write(f"{line}\n")))
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
            text = describe()
            if self._is_live:
                self._draw(clean_text(text))
            elif text != last:
                logger.info("%s", text)
                last = text
            await asyncio.sleep(_REDRAW_S if self._is_live else _PLAIN_S)

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write(text[:width])
        self._drawn = text[:width]

    def _clear(self) -> None:
        if self._drawn:
            self._write("")

    def _write(self, text: str) -> None:
        """Overwrite the current line."""
        self._drawn = ""
        try:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
        except (OSError, ValueError):  # losing the terminal must not end the role
            pass


def is_live(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can redraw lines and the user allows it."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not is_plain


def format_time(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _build_bar(stream: TextIO) -> "Progress":
    # Imported here: commands without a bar must start quickly.
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        console=Terminal(file=stream),
        refresh_per_second=4,
    )


def _show_figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
