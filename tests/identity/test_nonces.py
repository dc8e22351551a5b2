"""Nonces: each once, across restarts, in bounded memory and disk."""

import sqlite3
from pathlib import Path

import pytest

from shoal.errors import ConfigError, DiskError, UnavailableError
from shoal.identity.nonces import SLOT_S, NonceStore
from shoal.net.api_error import ApiError

NODE = "ab" * 32
START_S = 1_800_000_000


def spell_nonce(number: int) -> str:
    return f"{number:032x}"


def add(nonces: NonceStore, number: int, created_s: int = START_S, now_s: int | None = None, node: str = NODE) -> None:
    nonces.add_nonce(node, spell_nonce(number), created_s, 1000 * (created_s if now_s is None else now_s))


def is_refused(nonces: NonceStore, number: int, created_s: int = START_S, now_s: int | None = None) -> str:
    with pytest.raises(ApiError) as caught:
        add(nonces, number, created_s, now_s)
    return caught.value.code


def test_a_nonce_is_taken_once_for_each_node(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db")
    add(nonces, 1)
    assert is_refused(nonces, 1) == "replay"
    add(nonces, 2)
    add(nonces, 1, node="cd" * 32)
    assert len(nonces) == 3
    nonces.close()


def test_a_nonce_outlives_every_time_at_which_its_request_could_be_accepted(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db", window_s=60, keep_s=300)
    add(nonces, 1, now_s=START_S - 60)
    for now_s in range(START_S - 60, START_S + 300, 7):
        assert is_refused(nonces, 1, now_s=now_s) == "replay"
    nonces.close()


def test_old_nonces_are_forgotten_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    for minute in range(60):
        for number in range(50):
            add(nonces, number, START_S + 60 * minute)
        nonces.tidy()
        assert len(nonces) <= 50 * 7
    nonces.close()
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM nonce").fetchone()
    assert rows == (len(nonces),)


def test_what_was_signed_before_a_forgotten_nonce_is_refused_when_the_clock_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    add(nonces, 1)
    add(nonces, 2, START_S + 400)  # forgets the first
    assert len(nonces) == 1
    assert is_refused(nonces, 1) == "clock_set_back"
    nonces.tidy()
    nonces.close()
    nonces = NonceStore(path)
    assert is_refused(nonces, 1) == "clock_set_back"
    add(nonces, 3, START_S + 400)
    nonces.close()


def test_nonces_of_the_future_do_not_keep_others_from_being_forgotten(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db")
    add(nonces, 0, START_S + 10**7)  # the clock ran ahead, and was then corrected
    for minute in range(100):
        add(nonces, 1 + minute, START_S + 60 * minute)
    assert len(nonces) < 10
    assert is_refused(nonces, 0, START_S + 10**7) == "replay"
    nonces.close()


def test_a_clean_stop_keeps_all_nonces(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    for number in range(100):
        add(nonces, number)
    nonces.close()
    nonces = NonceStore(path)
    assert len(nonces) == 100
    for number in range(100):
        assert is_refused(nonces, number) == "replay"
    nonces.close()


def copy_live(path: Path, folder: Path) -> Path:
    """Copy the files while a process has them open: the state after a kill."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / path.name


def test_a_kill_loses_no_nonce(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    for number in range(10):
        add(nonces, number)
        after_kill = NonceStore(copy_live(path, tmp_path / f"after-{number}"))
        assert [is_refused(after_kill, earlier) for earlier in range(number + 1)] == ["replay"] * (number + 1)
        after_kill.close()
    nonces.close()


def test_a_kill_before_forgotten_nonces_left_the_file_lets_none_of_them_in(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    add(nonces, 1)
    add(nonces, 2, START_S + 400)  # forgets the first
    after_kill = NonceStore(copy_live(path, tmp_path / "after"))
    assert is_refused(after_kill, 1) == "replay"
    after_kill.close()
    nonces.close()


def test_a_full_book_refuses_rather_than_forgets(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db", max_entries=10)
    for number in range(10):
        add(nonces, number)
    assert is_refused(nonces, 10) == "busy"
    assert is_refused(nonces, 3) == "replay"
    assert len(nonces) == 10
    nonces.close()


def test_a_full_book_drops_first_what_the_clock_refuses_anyway(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db", max_entries=10)
    for number in range(10):
        add(nonces, number)
    later_s = START_S + 60 + 2 * SLOT_S
    add(nonces, 10, later_s)
    assert len(nonces) == 1
    assert is_refused(nonces, 3, now_s=later_s) == "clock_set_back"
    nonces.close()


def test_the_file_does_not_grow_with_time(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    nonces = NonceStore(path)
    sizes = []
    for minute in range(200):  # SQLite's own journal is full, and reused, after some 60
        for number in range(500):
            add(nonces, 1000 * minute + number, START_S + 60 * minute)
        nonces.tidy()
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert max(sizes[100:]) <= max(sizes[:100])
    nonces.close()


def test_one_process_has_the_book_open(tmp_path: Path) -> None:
    nonces = NonceStore(tmp_path / "nonces.db")
    with pytest.raises(UnavailableError, match="another process"):
        NonceStore(tmp_path / "nonces.db")
    nonces.close()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nonces.db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match="not a nonce file"):
        NonceStore(path)


def test_nonces_must_outlive_the_window(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than twice"):
        NonceStore(tmp_path / "nonces.db", window_s=60, keep_s=120)


class FullDisk:
    """A database whose disk is full."""

    def execute(self, *_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_request_that_cannot_be_noted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nonces = NonceStore(tmp_path / "nonces.db")
    with monkeypatch.context() as patch:
        patch.setattr(nonces, "_database", FullDisk())
        assert is_refused(nonces, 1) == "disk"
        with pytest.raises(DiskError, match="disk is full"):
            nonces.tidy()
    add(nonces, 1)
    nonces.close()
