"""The parts of a swarm are killed in turn, at random times, and the run ends with the right batches and weights.

`bench/chaos.py` does the same fifty times; what it checks is in `bench/lineage.py`.
"""

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.paths import WIDE

from shoal.launch.layout import SwarmPaths
from shoal.launch.settings import LaunchConfig

_FOLDER = str(Path(__file__).parents[2] / "bench")
_SCRIPTS = ("chaos", "lineage", "common")
SEED, KILLS = 3, 7
pytestmark = [pytest.mark.long, pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")]


@dataclass(frozen=True)
class Ended:
    """A run that ended despite kills."""

    chaos: Any
    config: LaunchConfig
    outcome: Any
    notes: list[str]

    @property
    def root(self) -> Path:
        return SwarmPaths.of(self.config).root

    def find_flaws(self) -> list[str]:
        return self.chaos.find_flaws(self.config)


@pytest.fixture(scope="module")
def chaos() -> Iterator[Any]:
    """The benchmark, which is a script and not a package: its folder does not stay on the path."""
    sys.path.insert(0, _FOLDER)
    try:
        yield import_module("chaos")
    finally:
        sys.path.remove(_FOLDER)
        for name in _SCRIPTS:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def ended(chaos: Any, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    few = ["swarm.workers=1", "swarm.validators=1", "steps=7", WIDE]
    config = chaos.load_settings(tmp_path_factory.mktemp("runs"), *few)
    notes: list[str] = []
    outcome = chaos.run_chaos(config, kills=KILLS, seed=SEED, note=notes.append)
    return Ended(chaos, config, outcome, notes)


def test_a_swarm_whose_parts_were_killed_ends_as_one_that_nobody_touched(ended: Ended, tmp_path: Path) -> None:
    outcome = ended.outcome
    assert not outcome.flaws, "\n".join([*outcome.flaws, *ended.notes])
    assert len(outcome.kills) == KILLS
    assert {"coordinator", "trainer"} <= {kill.part for kill in outcome.kills}, "at least these are killed"
    assert not ended.chaos.compare_alone(ended.config, tmp_path / "alone")


def test_what_is_not_as_it_must_be_is_found(ended: Ended) -> None:
    versions = ended.root / "versions"
    check_found(ended, versions / "v000007" / "model.safetensors", lambda data: data[:-1] + b"!", "root in the ledger")
    check_found(ended, ended.root / "metrics.jsonl", lambda data: data + data, "metrics.jsonl")
    check_found(ended, versions / "published.jsonl", _rename_roots, "different hashes in the ledger")
    check_found(ended, ended.root / "coordinator" / "ledger.db", None, "shoal ledger verify")


def check_found(ended: Ended, path: Path, change: Callable[[bytes], bytes] | None, flaw: str) -> None:
    """Corrupt a file, check that it is noticed, and restore it."""
    whole = path.read_bytes()
    if change is None:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE submission SET committed_ms = committed_ms + 1")
    else:
        path.write_bytes(change(whole))
    assert any(flaw in text for text in ended.find_flaws())
    path.write_bytes(whole)


def _rename_roots(data: bytes) -> bytes:
    lines = [json.loads(line) | {"root": "0" * 64} for line in data.splitlines()]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
