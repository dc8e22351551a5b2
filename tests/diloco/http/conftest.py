"""`fleet` in the path of these tests and of the processes that they start."""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("fleet")

from fleet import Fleet  # noqa: E402

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where there is one: every round waits for the disk, and a kill is no loss of power."""
    with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Reducer and peers as processes, none of which is left in the end."""
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()
