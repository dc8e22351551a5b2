"""What parts cost: counted by session, kept from start to start, and what of it was checking."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.launch.cpu_usage import CpuMeter, add_costs, read_costs, read_seconds, share_checking

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ntime.sleep(60)"


def test_checking_is_a_share_of_all_who_generate() -> None:
    cpu_s = {"validator-1": 3.0, "validator-2": 1.0, "worker-1": 15.0, "cheat-1": 5.0, "trainer": 100.0}
    assert share_checking(cpu_s) == pytest.approx(0.2)
    assert share_checking(cpu_s, ["validator-2"]) == pytest.approx(0.15)
    assert share_checking({"validator-1": 3.0}) is None


def test_what_parts_took_is_added_up_over_their_starts(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    assert read_costs(path) == {}
    add_costs(path, {"worker-1": 1.5, "trainer": 2.0})
    add_costs(path, {"worker-1": 0.25, "worker-2": 4.0})
    assert read_costs(path) == {"worker-1": 1.75, "trainer": 2.0, "worker-2": 4.0}


@pytest.mark.skipif(sys.platform != "linux", reason="CPU is read from /proc")
def test_a_part_is_counted_since_the_beginning_that_was_set() -> None:
    async def measure() -> tuple[float, float]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BURN, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        states = {"worker-1": SimpleNamespace(process=process), "worker-2": SimpleNamespace(process=None)}
        meter = CpuMeter(SimpleNamespace(states=states))  # type: ignore[arg-type]
        task = asyncio.create_task(meter.run())
        try:
            await process.stdout.readline()
            while meter.cpu_s.get("worker-1", 0.0) < 0.3:
                await asyncio.sleep(0.05)
            spent = meter.cpu_s["worker-1"]
            meter.begin()
            return spent, meter.cpu_s["worker-1"]
        finally:
            task.cancel()
            process.kill()
            await process.wait()

    spent, since = asyncio.run(asyncio.wait_for(measure(), 60))
    assert spent >= 0.3 and since == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="CPU is read from /proc")
def test_cpu_seconds_are_those_of_a_whole_session() -> None:
    assert read_seconds()[os.getsid(0)] > 0
