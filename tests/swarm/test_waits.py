"""Waits by name."""

from shoal.swarm.waits import MAX_WAITS, Wait, WaitBook


def test_a_wait_is_there_while_it_lasts():
    now = [1000]
    book = WaitBook(lambda: now[0])
    with book.wait("upload", owner="s5", for_whom="node n4", timeout_s=2):
        (wait,) = book.list_waits()
        assert (wait.name, wait.since_ms, wait.deadline_ms) == ("upload", 1000, 3000)
        assert not wait.is_overdue(3000) and wait.is_overdue(3001)
        assert wait.describe(3001).text == "s5 waits for node n4 for 2 s, 1 s past its deadline"
    assert book.list_waits() == []


def test_a_wait_ends_with_an_error_too():
    book = WaitBook(lambda: 0)
    try:
        with book.wait("x", owner="a", for_whom="b"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert book.list_waits() == []


def test_a_wait_without_a_deadline_is_never_overdue():
    info = Wait("x", "a", "b", 0, detail="because").describe(10**9)
    assert not info.overdue and info.text == "a waits for b for 1000000 s: because"


def test_the_book_does_not_grow_without_end():
    book = WaitBook(lambda: 0)
    waits = [book.wait("x", owner="a", for_whom="b") for _ in range(MAX_WAITS + 5)]
    for wait in waits:
        wait.__enter__()
    assert len(book.list_waits()) == MAX_WAITS and book.num_dropped == 5
    for wait in waits:
        wait.__exit__(None, None, None)
    assert book.list_waits() == []
