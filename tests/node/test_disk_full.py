"""A full disk: the role waits for free space, reports that, and resumes."""

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import DiskError
from shoal.node.disk_full import outlast_disk
from shoal.util.disk import has_room
from shoal.util.files import append_line
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """Files of this process cannot grow beyond this many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.node.disk_full.FIRST_PAUSE_S", 0.01)


def test_a_disk_has_room_or_has_none_and_nothing_is_left_of_the_look(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    with full_disk():
        assert not has_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        has_room(tmp_path / "missing")


def test_work_restarts_when_there_is_room_again_and_the_wait_is_reported(tmp_path: Path, log) -> None:
    waits, tries, seen = RoleWaits("worker"), 0, []

    async def work() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "outbox/l1.parquet")
        return "done"

    async def look() -> None:
        while (wait := waits.longest()) is None:
            await asyncio.sleep(0.001)
        seen.append(wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    async def check() -> None:
        looking = asyncio.create_task(look())
        assert await outlast_disk(work, tmp_path, waits) == "done"
        await looking

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with full_disk():
        asyncio.run(check())
    (wait,) = seen
    assert (wait.name, wait.waiting_for) == ("disk", "room on its disk")
    assert wait.detail.startswith("outbox/l1.parquet: cannot be written (No space left on device)")
    assert tries == 2 and log.messages[-1] == "free space is available again, resuming" and waits.longest() is None


def test_errors_other_than_a_full_disk_end_the_work(tmp_path: Path) -> None:
    async def work() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(DiskError, match="Read-only"):
        asyncio.run(outlast_disk(work, tmp_path, RoleWaits("worker")))


def test_a_role_that_is_stopped_waits_for_room_no_more(tmp_path: Path) -> None:
    async def check() -> None:
        stopping = asyncio.Event()

        async def work() -> None:
            stopping.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        waits = RoleWaits("worker")
        with pytest.raises(DiskError, match="No space left") as caught:
            async with asyncio.timeout(60):
                await outlast_disk(lambda: outlast_disk(work, tmp_path, waits, stopping=stopping), tmp_path, waits)
        assert not caught.value.is_full

    asyncio.run(check())


def test_half_a_line_does_not_stay_on_a_full_disk(tmp_path: Path) -> None:
    log, lines = tmp_path / "spans", tmp_path / "lines"
    spans = SpanLog(log, "worker")
    with spans.span("one"):
        pass
    append_line(lines, "one")
    whole = log.stat().st_size
    with full_disk(whole + 5), spans.span("two"):
        pass
    assert log.stat().st_size == whole, "only one span is lost"
    with full_disk(6), pytest.raises(OSError, match="File too large"):
        append_line(lines, "two")
    append_line(lines, "three")
    with spans.span("three"):
        pass
    assert lines.read_text() == "one\nthree\n"
    assert [text.split('"name": "')[1][:3] for text in log.read_text().splitlines()] == ["one", "thr"]
