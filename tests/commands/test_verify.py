"""`shoal verify`: mistakes are sentences, and come before anything is loaded or asked."""

from pathlib import Path

import pytest

from shoal.cli import main

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("12", "--owner", "owner.key"), "'12': no id of a submission, which is s and a number"),
        (("../s1", "--owner", "owner.key"), "no id of a submission"),
        (("s1", "--case", "case.json"), "--case: the submission's file is needed too"),
        (("s1", "--owner", "owner.key", "--threads", "0"), "--threads: must be 1 or more"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert main(["verify", URL, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1 and told in error


def test_it_must_be_said_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", URL, "s1"])
    assert end.value.code == 2 and "--owner --folder --case is required" in capsys.readouterr().err


def test_nobody_at_the_address_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", URL, "s1", "--owner", str(tmp_path / "owner.key")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1
