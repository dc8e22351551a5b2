import io
import logging
from pathlib import Path

import pytest

from shoal.util.console import PASS_RATE, REWARD, TOKENS_RATE, Console, format_time, is_live
from shoal.util.logs import log_to_stderr

logger = logging.getLogger("shoal.test")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return FakeTerminal()


def test_without_a_terminal_each_report_is_a_line_of_the_log(log) -> None:
    clock = FakeClock()
    console = Console(stream=io.StringIO(), clock=clock)
    console.start(total_steps=10, at_step=4)
    console.report_eval(4, {PASS_RATE: 0.25, "eval/greedy": None})
    clock.now_s = 20.0
    console.report_step(6, {REWARD: 0.5, TOKENS_RATE: 1234.4, "loss": 3.0})
    console.close()
    assert log.messages == [
        "eval at step 4  pass_at_1 0.25  greedy none",
        "step 6/10  reward 0.500  held-out 0.250  1234 tokens/s  0:40 left",
    ]


def test_the_last_step_has_no_time_left_to_show(log) -> None:
    console = Console(stream=io.StringIO())
    console.start(total_steps=1, at_step=0)
    console.report_step(1, {})
    console.close()
    assert log.messages == ["step 1/1"]


def test_everything_reported_is_in_the_log(tmp_path: Path) -> None:
    for _ in range(2):  # a resumed run appends
        console = Console(tmp_path / "log.txt", io.StringIO())
        logger.info("begin")
        console.start(total_steps=2, at_step=0)
        console.report_step(1, {REWARD: 1.0})
        console.report_eval(1, {PASS_RATE: 1.0})
        console.close()
    lines = [line.split("INFO", 1)[1].strip() for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [line.split("  ")[0] for line in lines] == ["begin", "step 1/2", "eval at step 1"] * 2


def test_a_terminal_gets_a_bar_that_closes_cleanly(terminal: FakeTerminal) -> None:
    console = Console(stream=terminal)
    with log_to_stderr("train"):
        console.start(total_steps=3, at_step=1)
        logger.info("hello [bold]there[/bold]")
        console.report_step(2, {REWARD: 0.5})
        console.close()
        console.close()
    shown = terminal.getvalue()
    assert "INFO    step 2" not in shown, "the bar shows it"
    assert "hello [bold]there[/bold]" in shown
    assert "2/3" in shown
    assert "reward 0.500" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_plain_text_gets_it(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert is_live(terminal)
    monkeypatch.setenv(name, value)
    assert not is_live(terminal)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_time_is_written_as_a_clock_would(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
