"""Every wait has a name, something it waits for and a deadline."""

import asyncio
import json
from pathlib import Path

import pytest

from shoal.errors import UnreachableError
from shoal.util.aio import Backoff
from shoal.util.spans import SpanLog
from shoal.util.waits import LONGEST_PAUSE_S, RoleWaits, WaitError


async def answer(value: int, pauses: int = 0) -> int:
    for _ in range(pauses):
        await asyncio.sleep(0)
    return value


def test_a_wait_returns_its_result_and_is_listed_while_it_lasts() -> None:
    async def check() -> None:
        waits = RoleWaits("worker", clock=lambda: 5000)
        seen = []

        async def look() -> int:
            seen.append(waits.longest())
            return 7

        assert await waits.with_timeout("lease", look(), waiting_for="the coordinator", timeout_s=9) == 7
        (wait,) = seen
        assert wait is not None
        assert (wait.name, wait.owner, wait.waiting_for) == ("lease", "worker", "the coordinator")
        assert (wait.since_ms, wait.deadline_ms) == (5000, 14000)
        assert waits.longest() is None

    asyncio.run(check())


def test_a_wait_that_passes_its_deadline_names_itself_and_ends_the_work() -> None:
    async def check() -> None:
        waits = RoleWaits("worker")
        work = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(WaitError, match=r"lease: timed out after 0\.01 s waiting for the coordinator"):
            await waits.with_timeout("lease", work, waiting_for="the coordinator", timeout_s=0.01)
        assert work.cancelled()
        assert waits.list_waits() == []

    asyncio.run(check())


def test_a_deadline_of_the_works_own_is_not_taken_for_ours() -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(RoleWaits("worker").with_timeout("lease", fail(), waiting_for="it", timeout_s=60))


def test_a_repeated_wait_reports_its_last_failure() -> None:
    async def check() -> None:
        waits, seen = RoleWaits("worker", sleep=lambda _: asyncio.sleep(0)), []

        async def ask() -> int:
            wait = waits.longest()
            assert wait is not None
            seen.append(wait.detail)
            if len(seen) < 3:
                raise UnreachableError(f"no connection {len(seen)}")
            return 1

        await waits.retry_forever("lease", ask, waiting_for="it", timeout_s=9, reason="at first")
        assert seen == ["at first", "no connection 1", "no connection 2"]

    asyncio.run(check())


def test_the_longest_wait_is_reported_and_unreported_ones_are_not() -> None:
    async def check() -> None:
        ticks = iter(range(100))
        waits = RoleWaits("trainer", clock=lambda: next(ticks))
        names = []

        async def inner() -> None:
            longest = waits.longest()
            names.extend([longest.name if longest else "", *(wait.name for wait in waits.list_waits())])

        async def nest() -> None:
            second = waits.with_timeout("second", inner(), waiting_for="b", timeout_s=9)
            await waits.with_timeout("first", second, waiting_for="a", timeout_s=9)

        await waits.with_timeout("ahead", nest(), waiting_for="nobody", timeout_s=9, reported=False)
        assert names == ["first", "ahead", "first", "second"]

    asyncio.run(check())


def test_retrying_continues_through_failures_and_is_one_wait(log) -> None:
    async def check() -> None:
        ticks = iter(range(100))
        pauses: list[float] = []
        since = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        backoff = Backoff.steady(0.5, LONGEST_PAUSE_S)
        waits = RoleWaits("worker", clock=lambda: next(ticks), sleep=sleep, backoff=backoff)
        failures = [UnreachableError("away")] * 9

        async def ask() -> int:
            since.append(waits.list_waits()[0].since_ms)
            if failures:
                raise failures.pop()
            return 3

        assert await waits.retry_forever("lease", ask, waiting_for="the coordinator", timeout_s=5) == 3
        assert set(since) == {0}
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, *[LONGEST_PAUSE_S] * 4]
        said = ["lease: no answer from the coordinator: away; retrying", "lease: succeeded again"]
        assert log.messages == said, "one warning, however often it fails"

    asyncio.run(check())


def test_a_cause_that_lasts_is_a_warning_again_each_minute(log) -> None:
    now_ms = [0]
    waits, away = RoleWaits("worker", clock=lambda: now_ms[0]), UnreachableError("refused")
    for seconds in (0, 30, 60, 90, 121):
        now_ms[0] = 1000 * seconds
        waits.report_failure("joining", away, "joining: refused; retrying")
    said = "joining: refused; retrying"
    assert log.messages == [said, f"{said}, for 60 s now", f"{said}, for 121 s now"]


def test_one_cause_is_one_warning_until_the_wait_that_reported_it_succeeds(log) -> None:
    waits, away = RoleWaits("worker"), UnreachableError("refused")
    waits.report_failure("heartbeat", away, "the coordinator does not answer: refused")
    waits.report_failure("lease", away, "lease: refused")
    waits.report_failure("lease", UnreachableError("reset"), "lease: reset")
    assert log.messages == ["the coordinator does not answer: refused", "lease: reset"]
    waits.note_success("lease")
    waits.report_failure("lease", away, "lease: refused")
    waits.note_success("heartbeat")
    waits.report_failure("lease", away, "lease: refused")
    assert log.messages[2:] == ["lease: succeeded again", "heartbeat: succeeded again", "lease: refused"]


def test_retrying_asks_again_after_a_deadline_and_raises_what_is_final(log) -> None:
    async def check() -> None:
        waits = RoleWaits("worker", sleep=lambda _: asyncio.sleep(0))
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
            await waits.retry_forever("lease", ask, waiting_for="it", timeout_s=0.01)
        assert log.messages == ["lease: timed out after 0.01 s waiting for it; retrying"]

    asyncio.run(check())


def test_reported_waits_are_spans(tmp_path: Path) -> None:
    async def check() -> None:
        spans = SpanLog(tmp_path / "spans.jsonl", "worker", wall=lambda: 100.0, monotonic=lambda: 0.0)
        waits = RoleWaits("worker", spans=spans)
        await waits.with_timeout("lease", answer(1), waiting_for="the coordinator", timeout_s=5, step=3)
        await waits.with_timeout("ahead", answer(1), waiting_for="the coordinator", timeout_s=5, reported=False)

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
