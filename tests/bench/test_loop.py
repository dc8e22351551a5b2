"""The probe of bench/loop.py: each stage gets only its own CPU time, and wrapped calls behave as before."""

import asyncio
import importlib.util
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

PROBE = Path(__file__).resolve().parents[2] / "bench" / "loop_probe"
OUTER, INNER = 0, 1


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROBE))
    spec = importlib.util.spec_from_file_location("loop_site", PROBE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("loop_stages", None)


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def read(path: Path) -> tuple[float, ...]:
    data = path.read_bytes()
    return struct.unpack(f"{len(data) // 8}d", data)


def test_a_stage_inside_another_is_counted_once(probe: ModuleType, tmp_path: Path) -> None:
    meter = probe.Meter(tmp_path / "1")
    inner = probe.wrap_call(meter, INNER, lambda: burn(0.02))

    def work() -> str:
        burn(0.01)
        inner()
        return "done"

    begun = time.thread_time()
    assert probe.wrap_call(meter, OUTER, work)() == "done"
    spent = time.thread_time() - begun
    outer_s, outer_calls, inner_s, inner_calls = read(tmp_path / "1")[:4]
    assert (outer_calls, inner_calls) == (1, 1)
    assert outer_s >= 0.01 and inner_s >= 0.02 and outer_s + inner_s <= spent


def test_a_coroutine_has_its_own_steps_and_not_those_of_others(probe: ModuleType, tmp_path: Path) -> None:
    meter = probe.Meter(tmp_path / "1")

    async def work() -> int:
        await asyncio.sleep(0)
        burn(0.005)
        return 7

    async def run() -> int:
        async def disturb() -> None:
            burn(0.2)

        found, _ = await asyncio.gather(probe.wrap_call(meter, OUTER, work)(), disturb())
        return found

    assert asyncio.run(run()) == 7
    cpu_s, calls = read(tmp_path / "1")[:2]
    assert calls == 1 and 0.005 <= cpu_s < 0.2


def test_a_measured_coroutine_is_cancelled_and_raises_as_before(probe: ModuleType, tmp_path: Path) -> None:
    meter, heard = probe.Meter(tmp_path / "1"), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise ValueError("after all") from None

    async def run() -> None:
        task = asyncio.create_task(probe.wrap_call(meter, OUTER, work)())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(ValueError, match="after all"):
            await task

    asyncio.run(run())
    assert heard == ["cancelled"]


def test_every_stage_names_something_that_exists(probe: ModuleType) -> None:
    for stage in probe.STAGES:
        for target in stage.targets:
            module, _, name = target.partition(":")
            place = importlib.import_module(module)
            for part in name.split("."):
                place = getattr(place, part)
            assert callable(place), target


def test_a_stage_that_is_never_entered_is_reported(monkeypatch: pytest.MonkeyPatch, probe: ModuleType) -> None:
    monkeypatch.syspath_prepend(str(PROBE.parent))
    loop, watch = importlib.import_module("loop"), importlib.import_module("loop_watch")
    names = [stage.name for stage in loop.STAGES]
    parts = {"worker-1": watch.Part(calls=Counter(names[:3])), "trainer": watch.Part(calls=Counter(names[4:]))}
    assert loop.list_idle(parts) == [names[3]]
