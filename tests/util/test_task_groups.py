"""Tasks that end together."""

import asyncio

import pytest

from shoal.util.aio import run_together


async def sleep_for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("beside")


async def end() -> None:
    pass


def test_the_end_of_the_main_task_ends_the_others() -> None:
    ended: list[str] = []
    assert asyncio.run(run_together(give(3), sleep_for_ever(ended), end())) == 3
    assert ended == ["cancelled"]


def test_a_failure_of_another_task_ends_the_main_task_and_is_raised_unchanged() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="beside"):
        asyncio.run(run_together(sleep_for_ever(ended), fail(), sleep_for_ever(ended)))
    assert ended == ["cancelled", "cancelled"]


def test_cancellation_leaves_no_task_behind() -> None:
    ended: list[str] = []

    async def check() -> None:
        task = asyncio.create_task(run_together(sleep_for_ever(ended), sleep_for_ever(ended)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
    assert ended == ["cancelled", "cancelled"]
