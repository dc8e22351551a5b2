"""Runs of `shoal train` to compare with, and `fake_swarm` on the path of these tests and their processes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("fake_swarm")

from fake_swarm import FakeSwarm, make_config, train_reference  # noqa: E402


@pytest.fixture
def tmp_path(quick_folder: Path) -> Path:
    """A folder in memory if possible: every step syncs files, and these tests simulate kills, not power failures."""
    return quick_folder


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `shoal train` with a swarm's beacons, k = 0."""
    return train_reference(make_config(tmp_path_factory.mktemp("reference")))


@pytest.fixture(scope="session")
def lagging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with k = 1."""
    return train_reference(make_config(tmp_path_factory.mktemp("lagging"), "async_level=1"))


@pytest.fixture
def swarm(tmp_path: Path, reference: Path) -> FakeSwarm:
    """A swarm that serves the batches of the reference."""
    return FakeSwarm(tmp_path / "swarm", reference)
