"""Logging of a process: one line format with time and role, or one JSON object per line.

    2026-11-18 00:40:12 worker     INFO  lease l7 returned

Modules log with `logging.getLogger(__name__)`; a running command calls `log_to_stderr` once. Details of a record go
into `extra={"fields": {...}}`: appended as `key=value`, or as keys of the JSON object. `extra={"is_drawn": True}` keeps
a record off a terminal on which a live bar or page shows the same.

Invariants:
- if the log stream is full or closed, the record is lost, but the role that logs continues;
- text from others cannot control the terminal: control characters are replaced;
- a live status line or progress bar and log lines do not overwrite each other: the code that draws one takes over the
  lines with `print_logs_with`.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
ENVIRONMENT = "SHOAL_LOG_LEVEL"
_PACKAGE = logging.getLogger("shoal")


@dataclass(slots=True)
class _Terminal:
    """How the stderr handler was set up."""

    role: str = "shoal"
    level: int = logging.INFO


_terminal = _Terminal()
_writers: list[Callable[[str], None]] = []
"""The last one prints the lines; if there is none, they go to stderr."""


def clean_text(text: str) -> str:
    """The text with control characters, including escape sequences, and invalid bytes replaced by `?`."""
    return "".join(char if char.isprintable() or char == "\n" else " " if char == "\t" else "?" for char in text)


def choose_level(name: str | None, *, verbose: bool = False, quiet: bool = False) -> int:
    """The level from the flag, from `-v` or `-q`, from the environment, or INFO."""
    if name is None:
        name = "debug" if verbose else "warning" if quiet else os.environ.get(ENVIRONMENT, "info").lower()
    if name not in LEVELS:
        raise ConfigError(f"{ENVIRONMENT}: must be one of {', '.join(LEVELS)}, got {name[:40]!r}")
    return logging.getLevelNamesMapping()[name.upper()]


@contextmanager
def log_to_stderr(role: str, level: int = logging.INFO, *, as_json: bool = False) -> Iterator[None]:
    """In this context, log records of this level and above to stderr, those of libraries from WARNING on."""
    handler, before, outer = _TerminalHandler(level), _PACKAGE.level, replace(_terminal)
    _terminal.role, _terminal.level = role, level
    handler.setFormatter(JsonFormatter(role) if as_json else LineFormatter(role))
    root = logging.getLogger()
    root.addHandler(handler)
    _PACKAGE.setLevel(min(level, logging.INFO))  # a log file may take more than the terminal
    try:
        yield
    finally:
        root.removeHandler(handler)
        _PACKAGE.setLevel(before)
        _terminal.role, _terminal.level = outer.role, outer.level


def is_quiet() -> bool:
    """Whether the user wants only warnings on the terminal."""
    return _terminal.level > logging.INFO


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """In this context, also append records of the package to a file."""
    handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(LineFormatter(_terminal.role))
    if _PACKAGE.level == logging.NOTSET:  # used as a library
        _PACKAGE.setLevel(logging.INFO)
    _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)
        with suppress(OSError):  # what could not be written before still cannot
            handler.close()


@contextmanager
def print_logs_with(write: Callable[[str], None]) -> Iterator[None]:
    """In this context, `write` prints the log lines instead of stderr, since it knows what is on the terminal."""
    _writers.append(write)
    try:
        yield
    finally:
        _writers.remove(write)


class _RoleFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role


class LineFormatter(_RoleFormatter):
    """Time, role, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by a traceback if there is one."""
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        fields = "".join(f" {key}={value}" for key, value in _read_fields(record).items())
        text = f"{record.getMessage()}{fields}{trace}"
        return clean_text(f"{time} {self._role:<10} {record.levelname:<7} {text}")


class JsonFormatter(_RoleFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in UTC, role, level, logger, message, and the fields of the record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        known = {"time": time, "role": self._role, "level": record.levelname.lower(), "logger": record.name}
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**known, "message": record.getMessage(), **_read_fields(record), **trace}, default=str)


class _TerminalHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _writers and getattr(record, "is_drawn", False):
            return
        try:
            line = self.format(record)
            if _writers:
                _writers[-1](line)
            else:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
        except (OSError, ValueError):  # full, gone or closed
            pass


class _FileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (overrides logging's)
        """Drop the record: a full disk must not end a run."""


def _read_fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields
