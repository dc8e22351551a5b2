"""`fleet` in the path of these tests and of the processes that they start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("fleet")

from fleet import Fleet  # noqa: E402


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Reducer and peers as processes, none of which is left in the end."""
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()
