"""Who waits for what: wishes end with their callers, and nobody has more than a share."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.urgent import MAX_PER_PEER, MAX_URGENT, UrgentBook


def make_entry(version: int, have: tuple[int, ...] = (), *, gone: bool = False) -> Any:
    blob = SimpleNamespace(has=lambda index: index in have)
    return SimpleNamespace(version=version, full=blob, delta=None, gone=gone)


def hold(book: UrgentBook, entry: Any, index: int, peer: str = "peer", ended: list[int] | None = None) -> Any:
    on_end = (lambda: None) if ended is None else (lambda: ended.append(index))
    return book.hold(entry, (f"digest{entry.version}", "full", index), peer, on_end)


def test_one_peer_has_only_so_many_wishes_and_gets_its_places_back() -> None:
    book, entry = UrgentBook(), make_entry(1)
    with ExitStack() as stack:
        assert all(stack.enter_context(hold(book, entry, index)) for index in range(MAX_PER_PEER))
        with hold(book, entry, 0) as taken, hold(book, entry, 999, "other") as granted:
            assert not taken and granted
    assert len(book) == 0
    with hold(book, entry, 0) as taken:
        assert taken


def test_all_together_have_only_so_many_but_another_caller_of_an_urgent_shard_is_welcome() -> None:
    book, entry = UrgentBook(), make_entry(1)
    with ExitStack() as stack:
        for index in range(MAX_URGENT):
            assert stack.enter_context(hold(book, entry, index, f"peer {index // MAX_PER_PEER}"))
        assert not stack.enter_context(hold(book, entry, MAX_URGENT, "late"))
        assert stack.enter_context(hold(book, entry, 3, "late"))
        assert len(book) == MAX_URGENT
    assert len(book) == 0


def test_the_last_caller_to_leave_ends_a_wish_and_a_wish_that_was_forgotten_ends_nothing() -> None:
    book, entry, ended = UrgentBook(), make_entry(1), []
    first, second, third = (hold(book, entry, 7, peer, ended) for peer in "abc")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert not ended and ("digest1", "full", 7) in book
    book.forget(("digest1", "full", 7))
    third.__enter__()
    second.__exit__(None, None, None)
    assert not ended and ("digest1", "full", 7) in book
    third.__exit__(None, None, None)
    assert ended == [7] and len(book) == 0


def test_what_is_here_or_cannot_come_is_not_missing() -> None:
    book = UrgentBook()
    with hold(book, make_entry(1, have=(0,)), 0), hold(book, make_entry(2, gone=True), 0), hold(book, make_entry(3), 0):
        assert [entry.version for _, entry in book.list_missing()] == [3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_newer_versions_come_first_and_of_one_version_who_asked_first(asked: list[tuple[int, int]]) -> None:
    book, entries = UrgentBook(), {version: make_entry(version) for version in range(4)}
    with ExitStack() as stack:
        for version, index in asked:
            stack.enter_context(hold(book, entries[version], index))
        listed = [(entry.version, key[2]) for key, entry in book.list_missing()]
    assert listed == sorted(dict.fromkeys(asked), key=lambda pair: -pair[0])
    assert len(book) == 0
