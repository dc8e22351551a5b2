"""Urgent requests: they end with their callers, and no caller gets more than a share."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.fetch.scheduler import MAX_PER_PEER, MAX_URGENT, UrgentRequests


class FakeBlob:
    def __init__(self, version: int, have: tuple[int, ...] = (), *, gone: bool = False) -> None:
        self.entry = SimpleNamespace(version=version, gone=gone)
        self.have = have

    def has(self, index: int) -> bool:
        return index in self.have


def hold(table: UrgentRequests, blob: Any, index: int, peer: str = "peer", ended: list[int] | None = None) -> Any:
    on_end = (lambda: None) if ended is None else (lambda: ended.append(index))
    return table.hold((blob, index), peer, on_end)


def test_one_peer_has_a_limited_number_of_urgent_requests_and_gets_its_slots_back() -> None:
    table, blob = UrgentRequests(), FakeBlob(1)
    with ExitStack() as stack:
        assert all(stack.enter_context(hold(table, blob, index)) for index in range(MAX_PER_PEER))
        with hold(table, blob, 0) as taken, hold(table, blob, 999, "other") as granted:
            assert not taken and granted
    assert len(table) == 0
    with hold(table, blob, 0) as taken:
        assert taken


def test_the_total_is_limited_but_another_caller_of_an_urgent_shard_is_accepted() -> None:
    table, blob = UrgentRequests(), FakeBlob(1)
    with ExitStack() as stack:
        for index in range(MAX_URGENT):
            assert stack.enter_context(hold(table, blob, index, f"peer {index // MAX_PER_PEER}"))
        assert not stack.enter_context(hold(table, blob, MAX_URGENT, "late"))
        assert stack.enter_context(hold(table, blob, 3, "late"))
        assert len(table) == MAX_URGENT
    assert len(table) == 0


def test_the_last_caller_to_leave_ends_a_request_and_a_forgotten_request_ends_nothing() -> None:
    table, blob, ended = UrgentRequests(), FakeBlob(1), []
    first, second, third = (hold(table, blob, 7, peer, ended) for peer in "abc")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert not ended and (blob, 7) in table
    table.forget((blob, 7))
    third.__enter__()
    second.__exit__(None, None, None)
    assert not ended and (blob, 7) in table
    third.__exit__(None, None, None)
    assert ended == [7] and len(table) == 0


def test_what_is_here_or_cannot_come_is_not_missing() -> None:
    table = UrgentRequests()
    with hold(table, FakeBlob(1, have=(0,)), 0), hold(table, FakeBlob(2, gone=True), 0), hold(table, FakeBlob(3), 0):
        assert [blob.entry.version for blob, _ in table.list_missing()] == [3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_newer_versions_come_first_and_within_a_version_the_earliest_request(asked: list[tuple[int, int]]) -> None:
    table, blobs = UrgentRequests(), {version: FakeBlob(version) for version in range(4)}
    with ExitStack() as stack:
        for version, index in asked:
            stack.enter_context(hold(table, blobs[version], index))
        listed = [(blob.entry.version, index) for blob, index in table.list_missing()]
    assert listed == sorted(dict.fromkeys(asked), key=lambda pair: -pair[0])
    assert len(table) == 0
