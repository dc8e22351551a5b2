"""Nonces: each once, across restarts, in bounded memory and disk."""

import sqlite3
from pathlib import Path

import pytest

from shoal.errors import ConfigError, DiskError
from shoal.swarm.nonces import SLOT_S, NonceBook
from shoal.swarm.refusal import AuthError

NODE = "ab" * 32
START_S = 1_800_000_000


def spell_nonce(number: int) -> str:
    return f"{number:032x}"


def add(book: NonceBook, number: int, created_s: int = START_S, now_s: int | None = None, node: str = NODE) -> None:
    book.add_nonce(node, spell_nonce(number), created_s, 1000 * (created_s if now_s is None else now_s))


def is_refused(book: NonceBook, number: int, created_s: int = START_S, now_s: int | None = None) -> str:
    with pytest.raises(AuthError) as caught:
        add(book, number, created_s, now_s)
    return caught.value.code


def test_a_nonce_is_taken_once_for_each_node(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db")
    add(book, 1)
    assert is_refused(book, 1) == "replay"
    add(book, 2)
    add(book, 1, node="cd" * 32)
    assert len(book) == 3
    book.close()


def test_a_nonce_outlives_every_time_at_which_its_request_could_be_accepted(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db", window_s=60, keep_s=300)
    add(book, 1, now_s=START_S - 60)
    for now_s in range(START_S - 60, START_S + 300, 7):
        assert is_refused(book, 1, now_s=now_s) == "replay"
    book.close()


def test_old_nonces_are_forgotten_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    for minute in range(60):
        for number in range(50):
            add(book, number, START_S + 60 * minute)
        book.tidy()
        assert len(book) <= 50 * 7
    book.close()
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM nonce").fetchone()
    assert rows == (len(book),)


def test_what_was_signed_before_a_forgotten_nonce_is_refused_when_the_clock_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    add(book, 1)
    add(book, 2, START_S + 400)  # forgets the first
    assert len(book) == 1
    assert is_refused(book, 1) == "clock_set_back"
    book.tidy()
    book.close()
    book = NonceBook(path)
    assert is_refused(book, 1) == "clock_set_back"
    add(book, 3, START_S + 400)
    book.close()


def test_nonces_of_the_future_do_not_keep_others_from_being_forgotten(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db")
    add(book, 0, START_S + 10**7)  # the clock ran ahead, and was set right
    for minute in range(100):
        add(book, 1 + minute, START_S + 60 * minute)
    assert len(book) < 10
    assert is_refused(book, 0, START_S + 10**7) == "replay"
    book.close()


def test_a_clean_stop_keeps_all_nonces(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    for number in range(100):
        add(book, number)
    book.close()
    book = NonceBook(path)
    assert len(book) == 100
    for number in range(100):
        assert is_refused(book, number) == "replay"
    book.close()


def copy_live(path: Path, folder: Path) -> Path:
    """The files as they are while a process has them open: what a kill would leave."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / path.name


def test_a_kill_loses_no_nonce(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    for number in range(10):
        add(book, number)
        after_kill = NonceBook(copy_live(path, tmp_path / f"after-{number}"))
        assert [is_refused(after_kill, earlier) for earlier in range(number + 1)] == ["replay"] * (number + 1)
        after_kill.close()
    book.close()


def test_a_kill_before_forgotten_nonces_left_the_file_lets_none_of_them_in(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    add(book, 1)
    add(book, 2, START_S + 400)  # forgets the first
    after_kill = NonceBook(copy_live(path, tmp_path / "after"))
    assert is_refused(after_kill, 1) == "replay"
    after_kill.close()
    book.close()


def test_a_full_book_refuses_rather_than_forgets(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db", max_entries=10)
    for number in range(10):
        add(book, number)
    assert is_refused(book, 10) == "busy"
    assert is_refused(book, 3) == "replay"
    assert len(book) == 10
    book.close()


def test_a_full_book_drops_first_what_the_clock_refuses_anyway(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db", max_entries=10)
    for number in range(10):
        add(book, number)
    later_s = START_S + 60 + 2 * SLOT_S
    add(book, 10, later_s)
    assert len(book) == 1
    assert is_refused(book, 3, now_s=later_s) == "clock_set_back"
    book.close()


def test_the_file_does_not_grow_with_time(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    book = NonceBook(path)
    sizes = []
    for minute in range(200):  # SQLite's own journal is full, and used again, after some 60
        for number in range(500):
            add(book, 1000 * minute + number, START_S + 60 * minute)
        book.tidy()
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert max(sizes[100:]) <= max(sizes[:100])
    book.close()


def test_one_process_has_the_book_open(tmp_path: Path) -> None:
    book = NonceBook(tmp_path / "nonces.db")
    with pytest.raises(ConfigError, match="another process"):
        NonceBook(tmp_path / "nonces.db")
    book.close()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match="no file of nonces"):
        NonceBook(path)


def test_nonces_must_outlive_the_window(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than twice"):
        NonceBook(tmp_path / "nonces.db", window_s=60, keep_s=120)


class FullDisk:
    """A database whose disk is full."""

    def execute(self, *_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_request_that_cannot_be_noted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = NonceBook(tmp_path / "nonces.db")
    with monkeypatch.context() as patch:
        patch.setattr(book, "_database", FullDisk())
        assert is_refused(book, 1) == "disk"
        with pytest.raises(DiskError, match="disk is full"):
            book.tidy()
    add(book, 1)
    book.close()
