"""What the user sees while a run goes on: a live bar on a terminal, one plain line per report anywhere else.

Every report also goes to the run's log, always as a plain line with the time. Text that models wrote may appear in
notes, so control characters, which could drive the terminal, are replaced.

Life cycle: start -> report_step / report_eval / note ... -> close. `note` works before `start` as well.
"""

import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shoal.disk import spare_words

REWARD = "reward/mean"
"""metric of a step: mean task reward of the rollouts sampled for it"""
TOKENS_RATE = "perf/tokens_per_s"
"""metric of a step: generated tokens per second"""
PASS_RATE = "eval/pass_at_1"
"""metric of an evaluation: share of held-out completions that pass"""


class Console:
    """Reports of one run to one stream and one log file."""

    def __init__(
        self,
        log_path: Path | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._log = None if log_path is None else log_path.open("a", encoding="utf-8", buffering=1)
        self._clock = clock
        self._bar = _build_bar(self._stream) if is_live(self._stream) else None
        self._pass_rate: float | None = None
        self._total = self._first = 0
        self._started_s = 0.0

    def start(self, total_steps: int, at_step: int) -> None:
        """Training begins, or goes on, with `at_step` steps already done."""
        self._total, self._first, self._started_s = total_steps, at_step, self._clock()
        if self._bar is not None:
            self._bar.add_task("step", total=total_steps, completed=at_step, state="")
            self._bar.start()

    def report_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Step `step` is done."""
        state = "  ".join(self._list_fields(step, metrics))
        line = f"step {step}/{self._total}  {state}".rstrip()
        self._write_log(line)
        if self._bar is None:
            self._print_line(line)
        elif self._bar.tasks:
            self._bar.update(self._bar.tasks[0].id, completed=step, state=state)

    def report_eval(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Version `step` was evaluated on held-out tasks."""
        self._pass_rate = metrics.get(PASS_RATE)
        figures = "  ".join(f"{name.removeprefix('eval/')} {_show_figure(value)}" for name, value in metrics.items())
        self.note(f"eval at step {step}  {figures}")

    def note(self, text: str) -> None:
        """Tell the user something."""
        for line in clean_text(text).splitlines():
            self._write_log(line)
            self._print_line(line)

    def close(self) -> None:
        """Leave the terminal as it was. Closing twice is harmless."""
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            with spare_words():
                self._log.close()

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

    def _print_line(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            return
        encoding = self._stream.encoding or "utf-8"
        # A terminal of another encoding must not end the run over a letter it lacks.
        with spare_words():
            print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)

    def _write_log(self, line: str) -> None:
        if self._log is not None and not self._log.closed:
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            with spare_words():
                self._log.write(f"{now} {line}\n")


def is_live(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can redraw lines, and its user has nothing against it."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not is_plain


def clean_text(text: str) -> str:
    """The text with control characters, escape sequences among them, and stray bytes replaced by `?`."""
    return "".join(char if char.isprintable() or char == "\n" else " " if char == "\t" else "?" for char in text)


def format_time(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _build_bar(stream: TextIO) -> Progress:
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
