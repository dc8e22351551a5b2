"""What must run on an accelerator runs on a pretend one (`tests/fixtures/pretend_device.py`), with the CPU's bits.

The checks are in `program.py`, which is a process of its own. A tensor without a device, or `.numpy()` of one on the
device, ends it with an error that names the line.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.device.names import NAMES

ENGINE_WAITS = 4
"""per step: tokens, log-probs, whether they are finite, whether a row is greedy"""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.program"], capture_output=True, text=True, timeout=600, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{[result['name'] for result in found]}, then {done.stderr[-2000:]}"
    return {result["name"]: result for result in found}


@pytest.mark.parametrize("name", NAMES)
def test_results_equal_those_of_the_cpu(results: dict[str, dict[str, Any]], name: str) -> None:
    differing = [key for key, value in results[name].items() if value is False]
    assert not differing, results[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("learner")])
def test_a_training_step_waits_for_the_device_once_per_update(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["updates"] == 2 and results[name]["packs"] > 2
    assert sum(results[name]["waits"].values()) == 2, results[name]["waits"]


def test_sft_waits_once_per_step(results: dict[str, dict[str, Any]]) -> None:
    assert sum(results["sft"]["waits"].values()) == results["sft"]["steps"], results["sft"]["waits"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("replay")])
def test_a_replay_waits_a_fixed_number_of_times_per_pack(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["num"] == 12
    assert sum(results[name]["waits"].values()) <= 8, "one pack"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("engine")])
def test_an_engine_waits_a_fixed_number_of_times_per_step(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    assert found["versions"] == 2, "weights were swapped in the middle of a rollout"
    steps = {line: num for line, num in found["waits"].items() if " engine/sampling" in line or "engine/torch" in line}
    assert sum(steps.values()) <= ENGINE_WAITS * found["steps"], found["waits"]
    states = [num for line, num in found["waits"].items() if "toploc/stream" in line]
    assert sum(states) <= found["chunks"], "states leave the device once per chunk"


def test_the_pretend_device_refuses_what_a_device_refuses(results: dict[str, dict[str, Any]]) -> None:
    found = results["refusals"]
    assert found["refused"] == ["MixedDevicesError", "TypeError"]
    assert found["sum"] == 6.0 and sum(found["waits"].values()) == 1
