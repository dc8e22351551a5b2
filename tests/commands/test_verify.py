"""`shoal verify`: user mistakes give one-line errors before anything is loaded or requested."""

from pathlib import Path

import pytest

from shoal.cli import main

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("12", "--owner", "owner.key"), "invalid submission id '12', expected s followed by a number"),
        (("../s1", "--owner", "owner.key"), "invalid submission id"),
        (("s1", "--case", "case.json"), "--case: --file is required too"),
        (("s1", "--owner", "owner.key", "--threads", "0"), "--threads: must be 1 or more"),
    ],
)
def test_a_mistake_is_a_one_line_error(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert main(["verify", URL, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1 and told in error


def test_an_identity_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", URL, "s1"])
    assert end.value.code == 2 and "--owner --folder --case is required" in capsys.readouterr().err


def test_an_unreachable_address_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", URL, "s1", "--owner", str(tmp_path / "owner.key")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1
