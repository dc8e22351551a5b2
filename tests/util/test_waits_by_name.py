"""Waits by name."""

from shoal.coordinator.status import describe_wait
from shoal.util.waits import MAX_WAITS, Wait, WaitTable


def test_a_wait_is_there_while_it_lasts():
    now = [1000]
    book = WaitTable(lambda: now[0])
    with book.wait("upload", owner="s5", waiting_for="node n4", timeout_s=2):
        (wait,) = book.list_waits()
        assert (wait.name, wait.since_ms, wait.deadline_ms) == ("upload", 1000, 3000)
        assert not wait.is_overdue(3000) and wait.is_overdue(3001)
        assert describe_wait(wait, 3001).text == "s5 waits for node n4, for 2 s, 1 s past its deadline"
    assert book.list_waits() == []


def test_a_wait_ends_with_an_error_too():
    book = WaitTable(lambda: 0)
    try:
        with book.wait("x", owner="a", waiting_for="b"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert book.list_waits() == []


def test_a_wait_without_a_deadline_is_never_overdue():
    info = describe_wait(Wait("x", "a", "b", 0, detail="because"), 10**9)
    assert not info.overdue and info.text == "a waits for b, for 1000000 s: because"


def test_the_book_does_not_grow_without_end():
    book = WaitTable(lambda: 0)
    waits = [book.wait("x", owner="a", waiting_for="b") for _ in range(MAX_WAITS + 5)]
    for wait in waits:
        wait.__enter__()
    assert len(book.list_waits()) == MAX_WAITS and book.num_dropped == 5
    for wait in waits:
        wait.__exit__(None, None, None)
    assert book.list_waits() == []
