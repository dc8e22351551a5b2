from types import SimpleNamespace
from typing import Any

import pytest

from shoal.shardcast.fetch import Pace, check_range
from shoal.shardcast.http import Reply
from shoal.shardcast.link import SourceError


def test_the_deadline_moves_only_when_enough_came() -> None:
    pace = Pace(5.0, 100.0, now=10.0)
    assert pace.deadline == 15.0
    assert not pace.advance(499, now=12.0)
    assert pace.deadline == 15.0
    assert pace.advance(1, now=14.0)
    assert pace.deadline == 19.0
    assert not pace.advance(499, now=18.0)


def test_one_large_piece_moves_the_deadline_once() -> None:
    pace = Pace(5.0, 100.0, now=0.0)
    assert pace.advance(10**9, now=1.0)
    assert pace.deadline == 6.0
    assert not pace.advance(1, now=2.0)


def test_time_spent_on_our_own_disk_is_forgiven() -> None:
    pace = Pace(5.0, 100.0, now=0.0)
    pace.forgive(30.0)
    assert pace.deadline == 35.0


def build_answer(status: int, length: int | None, ranged: str | None = None) -> Any:
    started: list[int] = []

    def start_body(size: int) -> None:
        started.append(size)

    reply = Reply(status=status, length=length, retry_after_s=None, content_range=ranged, keep_alive=True)
    return SimpleNamespace(reply=reply, start_body=start_body, started=started)


def test_a_whole_shard_and_the_rest_of_one_are_taken() -> None:
    whole = build_answer(200, 100)
    check_range(whole, 0, 100)
    assert whole.started == [100]
    rest = build_answer(206, 60, "bytes 40-99/100")
    check_range(rest, 40, 100)
    assert rest.started == [60]


@pytest.mark.parametrize(
    ("start", "status", "ranged"),
    [
        (0, 206, "bytes 0-99/100"),
        (40, 200, None),
        (40, 206, None),
        (40, 206, "bytes 0-59/100"),
        (40, 206, "bytes 40-99/1000"),
        (40, 206, "bytes 40-98/100"),
    ],
)
def test_any_other_range_is_refused(start: int, status: int, ranged: str | None) -> None:
    with pytest.raises(SourceError):
        check_range(build_answer(status, 100 - start, ranged), start, 100)
