"""Logging: one format, levels from flags and environment, and an unwritable stream that stops nothing."""

import io
import json
import logging
import re
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.errors import ConfigError
from shoal.util.logs import choose_level, clean_text, log_to_file, log_to_stderr

logger = logging.getLogger("shoal.test")


def test_a_line_has_time_role_level_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr("worker"):
        logger.info("lease %s is given back", "l7", extra={"fields": {"step": 3}})
        logging.getLogger("some.library").info("not ours")
        logging.getLogger("some.library").warning("but this")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d worker     INFO    lease l7 is given back step=3", lines[0])
    assert len(lines) == 2 and lines[1].endswith("worker     WARNING but this")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr("worker", as_json=True):
        logger.warning("two\nlines", extra={"fields": {"step": 3}})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("+00:00")
    expected = {"role": "worker", "level": "warning", "logger": "shoal.test", "message": "two\nlines", "step": 3}
    assert line == expected


def test_nothing_is_logged_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("shoal").level
    with log_to_stderr("worker", logging.DEBUG):
        logger.debug("seen")
    logger.info("unseen")
    assert "unseen" not in capsys.readouterr().err and logging.getLogger("shoal").level == before


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert clean_text("a\x1b[31mb\x00\r\tc\nd\udcff") == "a?[31mb?? c\nd?"
    with log_to_stderr("worker"):
        logger.info("%s", "\x1b[2J")
    assert "\x1b" not in capsys.readouterr().err


class Closed(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), BrokenPipeError(), ValueError("I/O operation on closed file")]
)
def test_a_stream_that_is_full_or_closed_costs_the_record_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Closed(error))
    with log_to_stderr("worker"):
        logger.error("lost")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_file_on_a_full_disk_costs_the_record_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr("train"), log_to_file(Path("/dev/full")):
        logger.info("kept on the terminal")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_has_the_lines_that_a_quiet_terminal_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr("train", logging.WARNING), log_to_file(tmp_path / "log.txt"):
        logger.info("step 1/2")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "log.txt").read_text().endswith("train      INFO    step 1/2\n")


@pytest.mark.parametrize(
    ("flags", "environment", "level"),
    [
        ({}, None, logging.INFO),
        ({}, "DEBUG", logging.DEBUG),
        ({"verbose": True}, "error", logging.DEBUG),
        ({"quiet": True}, None, logging.WARNING),
    ],
)
def test_flags_win_over_the_environment(
    flags: dict[str, bool], environment: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_LOG_LEVEL", raising=False)
    if environment is not None:
        monkeypatch.setenv("SHOAL_LOG_LEVEL", environment)
    assert choose_level(None, **flags) == level
    assert choose_level("error", **flags) == logging.ERROR


def test_an_unknown_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="SHOAL_LOG_LEVEL: must be one of debug"):
        choose_level(None)


@pytest.mark.parametrize("words", [["-q", "tasks"], ["tasks", "-q"], ["--log-json", "tasks", "-v"]])
def test_the_flags_stand_before_the_command_or_after_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "sort" in capsys.readouterr().out
