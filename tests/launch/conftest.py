"""A tiny swarm that was made ready, once for all tests; those that change it take a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY

from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.settings import LaunchConfig, load_launch


def _load_tiny(out: Path, *overrides: str) -> LaunchConfig:
    few = ["sft.steps=2", "sft.eval_every=2", "swarm.calibration=64"]
    return load_launch(TINY, [f"out={out}", *few, *overrides])


@pytest.fixture(scope="session")
def load_tiny() -> Callable[..., LaunchConfig]:
    """The settings of a tiny swarm in a folder, with overrides."""
    return _load_tiny


@pytest.fixture(scope="session")
def made_ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of run directories with one of a tiny swarm, as `prepare` leaves it."""
    out = tmp_path_factory.mktemp("runs")
    config = _load_tiny(out, 'swarm.cheats=["int8"]')
    prepare_swarm(config, SwarmPaths.of(config))
    return out


@pytest.fixture
def out(made_ready: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made_ready, tmp_path / "runs", symlinks=True))


@pytest.fixture
def prepared(out: Path) -> PreparedSwarm:
    """The tiny swarm, ready to be started."""
    config = _load_tiny(out, 'swarm.cheats=["int8"]')
    return prepare_swarm(config, SwarmPaths.of(config))
