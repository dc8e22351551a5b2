"""`shoal redteam`: user mistakes give one-line errors, and the attacks are listed."""

import pytest

from shoal.cli import main
from shoal.redteam.registry import list_attacks
from shoal.redteam.validators import LIES

URL = "http://127.0.0.1:1"


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one-line error of a user mistake."""
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1, error
    return error


def test_the_attacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["redteam", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_attacks()) and any(line.split()[:2] == ["int8", "hard"] for line in lines)


def test_the_help_names_every_lie(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["redteam", "judge", "--help"])
    text = capsys.readouterr().out.rpartition("--lie NAME")[2]
    assert [lie for lie in LIES if lie not in text] == []


@pytest.mark.parametrize("command", [("redteam",), ("redteam", "work", URL), ("redteam", "campaign", URL)])
def test_an_unknown_attack_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert "unknown attack; available: adapter" in fail(capsys, *command, "--attack", "bribe")


def test_a_script_is_no_way_for_a_worker_to_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert "run it with `shoal redteam --attack late`" in fail(capsys, "redteam", "work", URL, "--attack", "late")


@pytest.mark.parametrize("flag", ["--repeat", "--abreast", "--submissions", "--seconds", "--slots", "--memory"])
def test_a_campaign_needs_positive_limits(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"{flag}: must be 1 or more" in fail(capsys, "redteam", "campaign", URL, "--attack", "int8", flag, "0")


def test_an_unknown_lie_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lie truth" in fail(capsys, "redteam", "judge", URL, "--lie", "truth")


def test_a_seed_is_no_debt(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--seed: must be 0 or more" in fail(capsys, "redteam", "--quick", "--seed", "-1")
