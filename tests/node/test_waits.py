"""Every wait has a name, somebody it waits for and a deadline."""

import asyncio
import json
from pathlib import Path

import pytest

from shoal.node.spans import SpanLog
from shoal.node.waits import LONGEST_PAUSE_S, RoleWaits, WaitError
from shoal.swarm.asking import UnreachableError


async def answer(value: int, pauses: int = 0) -> int:
    for _ in range(pauses):
        await asyncio.sleep(0)
    return value


def test_a_wait_brings_what_it_waited_for_and_is_told_while_it_lasts() -> None:
    async def check() -> None:
        waits = RoleWaits("worker", clock=lambda: 5000)
        seen = []

        async def look() -> int:
            seen.append(waits.longest())
            return 7

        assert await waits.bound("lease", look(), for_whom="the coordinator", timeout_s=9) == 7
        (wait,) = seen
        assert wait is not None
        assert (wait.name, wait.owner, wait.for_whom) == ("lease", "worker", "the coordinator")
        assert (wait.since_ms, wait.deadline_ms) == (5000, 14000)
        assert waits.longest() is None

    asyncio.run(check())


def test_a_wait_that_passes_its_deadline_names_itself_and_ends_the_work() -> None:
    async def check() -> None:
        waits = RoleWaits("worker")
        work = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(WaitError, match=r"lease: waited 0\.01 s for the coordinator, in vain"):
            await waits.bound("lease", work, for_whom="the coordinator", timeout_s=0.01)
        assert work.cancelled()
        assert waits.list_waits() == []

    asyncio.run(check())


def test_a_deadline_of_the_works_own_is_not_taken_for_ours() -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(RoleWaits("worker").bound("lease", fail(), for_whom="it", timeout_s=60))


def test_a_wait_that_is_insisted_on_says_what_last_went_wrong() -> None:
    async def check() -> None:
        waits, seen = RoleWaits("worker", sleep=lambda _: asyncio.sleep(0)), []

        async def ask() -> int:
            wait = waits.longest()
            assert wait is not None
            seen.append(wait.detail)
            if len(seen) < 3:
                raise UnreachableError(f"no connection {len(seen)}")
            return 1

        await waits.insist("lease", ask, for_whom="it", timeout_s=9, reason="at first")
        assert seen == ["at first", "no connection 1", "no connection 2"]

    asyncio.run(check())


def test_of_several_waits_the_longest_is_told_and_the_quiet_ones_are_not() -> None:
    async def check() -> None:
        ticks = iter(range(100))
        waits = RoleWaits("trainer", clock=lambda: next(ticks))
        names = []

        async def inner() -> None:
            longest = waits.longest()
            names.extend([longest.name if longest else "", *(wait.name for wait in waits.list_waits())])

        async def nest() -> None:
            second = waits.bound("second", inner(), for_whom="b", timeout_s=9)
            await waits.bound("first", second, for_whom="a", timeout_s=9)

        await waits.bound("ahead", nest(), for_whom="nobody", timeout_s=9, told=False)
        assert names == ["first", "ahead", "first", "second"]

    asyncio.run(check())


def test_insisting_goes_on_through_failures_and_is_one_wait() -> None:
    async def check() -> None:
        ticks = iter(range(100))
        pauses: list[float] = []
        notes: list[str] = []
        since = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        waits = RoleWaits("worker", clock=lambda: next(ticks), sleep=sleep, note=notes.append)
        failures = [UnreachableError("away")] * 7

        async def ask() -> int:
            since.append(waits.list_waits()[0].since_ms)
            if failures:
                raise failures.pop()
            return 3

        assert await waits.insist("lease", ask, for_whom="the coordinator", timeout_s=5) == 3
        assert set(since) == {0}
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
        assert notes == ["lease: away"] * 7

    asyncio.run(check())


def test_insisting_asks_again_after_a_deadline_and_raises_what_is_final() -> None:
    async def check() -> None:
        notes: list[str] = []
        waits = RoleWaits("worker", note=notes.append, sleep=lambda _: asyncio.sleep(0))
        asked = 0

        async def ask() -> int:
            nonlocal asked
            asked += 1
            if asked == 1:
                await asyncio.Event().wait()
            if asked == 2:
                raise ValueError("final")
            return asked

        with pytest.raises(ValueError, match="final"):
            await waits.insist("lease", ask, for_whom="it", timeout_s=0.01)
        assert notes == ["lease: waited 0.01 s for it, in vain; goes on trying"]

    asyncio.run(check())


def test_waits_that_are_told_are_spans(tmp_path: Path) -> None:
    async def check() -> None:
        spans = SpanLog(tmp_path / "spans.jsonl", "worker", wall=lambda: 100.0, monotonic=lambda: 0.0)
        waits = RoleWaits("worker", spans=spans)
        await waits.bound("lease", answer(1), for_whom="the coordinator", timeout_s=5, step=3)
        await waits.bound("ahead", answer(1), for_whom="the coordinator", timeout_s=5, told=False)

    asyncio.run(check())
    (line,) = [json.loads(text) for text in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert line == {
        "role": "worker",
        "name": "lease",
        "kind": "wait",
        "start_ms": 100_000,
        "end_ms": 100_000,
        "for_whom": "the coordinator",
        "step": 3,
    }
