"""`shoal diloco reduce` and `join`: user mistakes give one-line errors before anything is trained."""

from pathlib import Path

import pytest

from shoal.cli import main


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return f"data.source={path}"


def test_other_machines_are_served_only_if_that_is_said(book, tmp_path, capsys) -> None:
    assert main(["diloco", "reduce", book, "--listen", "0.0.0.0:0", "--data", str(tmp_path / "r")]) == 2
    assert "--public" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_rebuild_needs_the_key_that_peers_know(book, tmp_path, capsys) -> None:
    assert main(["diloco", "reduce", book, "--rebuild", "--data", str(tmp_path / "r")]) == 2
    assert "reducer.key" in capsys.readouterr().err


def test_a_certificate_without_its_key_and_a_name_that_is_no_key_are_mistakes(book, capsys) -> None:
    assert main(["diloco", "reduce", book, "--tls-cert", "cert.pem"]) == 2
    assert "--tls-key" in capsys.readouterr().err
    assert main(["diloco", "reduce", book, "--peer", "somebody"]) == 2
    assert "public key" in capsys.readouterr().err


def test_a_reducer_that_is_not_there_is_said_to_be_away(book, capsys) -> None:
    assert main(["diloco", "join", "http://127.0.0.1:9", book]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_delay_of_a_whole_round_is_refused(book, capsys) -> None:
    assert main(["diloco", "join", "http://127.0.0.1:9", book, "--delay", "20"]) == 2
    assert "--delay" in capsys.readouterr().err
