"""The status line: output stays readable, and errors are reported."""

import asyncio
import errno
import io
import logging

import pytest

from shoal.util.console import LiveLine
from shoal.util.logs import log_to_stderr

logger = logging.getLogger("shoal.test")


class Screen(io.StringIO):
    """A terminal that two streams write to."""

    def isatty(self) -> bool:
        return True

    def read_lines(self) -> list[str]:
        """The lines that a user sees; a cleared line is replaced by what was written after it."""
        return [line.rpartition("\x1b[K")[2] for line in self.getvalue().split("\n")]


def draw(screen: io.StringIO, work, describe=lambda: "working") -> None:
    async def run() -> None:
        line = LiveLine(screen, screen)
        async with asyncio.timeout(20), line.show(describe):
            await work(line)

    with log_to_stderr("pull"):
        asyncio.run(run())


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def test_results_and_notes_have_lines_of_their_own(screen: Screen) -> None:
    async def work(line: LiveLine) -> None:
        while "working" not in screen.getvalue():
            await asyncio.sleep(0.001)
        line.result("out/v1")
        logger.info("left for v2")
        line.result("out/v2")

    draw(screen, work)
    first, note, *rest = screen.read_lines()
    assert (first, rest) == ("out/v1", ["out/v2", ""]) and note.endswith("pull       INFO    left for v2")


def test_a_line_that_is_drawn_again_does_not_touch_what_was_said(screen: Screen) -> None:
    seen = []

    def describe() -> str:
        seen.append(None)
        return f"look {len(seen)}"

    async def work(line: LiveLine) -> None:
        line.result("out/v1")
        while len(seen) < 3:
            await asyncio.sleep(0.01)

    draw(screen, work, describe)
    assert screen.read_lines() == ["out/v1", ""]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_the_description_ends_the_command_at_once(screen: Screen, late: bool) -> None:
    seen = []

    def describe() -> str:
        seen.append(None)
        if len(seen) > late:
            raise ZeroDivisionError("a bug")
        return "fine"

    async def work(line: LiveLine) -> None:
        await asyncio.sleep(5)
        seen.append("timed out")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        draw(screen, work, describe)
    assert seen == [None] * (1 + late)


def test_an_error_of_the_work_itself_passes(screen: Screen) -> None:
    async def work(line: LiveLine) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        draw(screen, work)


def test_a_cancellation_passes(screen: Screen) -> None:
    async def work(line: LiveLine) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        draw(screen, work)


def test_control_characters_do_not_reach_the_terminal(screen: Screen) -> None:
    async def work(line: LiveLine) -> None:
        logger.info("evil \x1b[2J\x07")

    draw(screen, work, lambda: "x\x1by")
    assert "\x1b[2J" not in screen.getvalue() and "\x1by" not in screen.getvalue()


class FullLog(io.StringIO):
    """A log on a full disk."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise OSError(self.error, "refused")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE])
def test_an_unwritable_terminal_stops_nothing(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(line: LiveLine) -> None:
        logger.info("said")
        await asyncio.sleep(0.01)

    monkeypatch.setattr("sys.stderr", FullLog(error))
    draw(FullLog(error), work)
