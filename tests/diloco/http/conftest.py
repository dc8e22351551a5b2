"""`fleet` in the path of these tests and of the processes that they start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("fleet")

from fleet import Fleet  # noqa: E402


@pytest.fixture
def tmp_path(quick_folder: Path) -> Path:
    """A folder in memory if possible: every round waits for the disk, and a kill is not a power cut."""
    return quick_folder


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Reducer and peers as processes, all of which are ended after the test."""
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()
