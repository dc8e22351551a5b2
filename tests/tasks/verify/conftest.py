"""Boxes, started once for all tests of them, and real problems, where somebody has put them beside the checkout."""

import json
import sys
from pathlib import Path

import pytest

from shoal.box.walls import Limits
from shoal.tasks.verify.code.verifier import CodeVerifier

LIMITS = Limits(cpu_s=1, wall_s=20.0, memory_bytes=256 << 20)


@pytest.fixture(scope="session")
def boxes():
    """Boxes with the best walls that this machine permits."""
    yield from open_boxes(namespaces=True)


@pytest.fixture(scope="session")
def bare_boxes():
    """Boxes as where namespaces are not permitted."""
    yield from open_boxes(namespaces=False)


def open_boxes(*, namespaces):
    if sys.platform != "linux":
        pytest.skip("boxes need Linux")
    verifier = CodeVerifier(size=2, limits=LIMITS, namespaces=namespaces)
    yield verifier
    verifier.close()


@pytest.fixture(scope="session")
def load_lines():
    """The records of a file in a folder `shared/data` beside any parent of this one; skips where there is none."""

    def load(name):
        for folder in Path(__file__).resolve().parents:
            path = folder / "shared" / "data" / name
            if path.is_file():
                return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pytest.skip(f"no shared/data/{name} beside the checkout")

    return load
