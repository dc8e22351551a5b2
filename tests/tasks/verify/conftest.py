"""Sandboxes, started once for all their tests, and real problems, if they are available next to the checkout."""

import json
import sys
from pathlib import Path

import pytest

from shoal.sandbox.isolate import SandboxLimits
from shoal.tasks.verify.code.verifier import CodeVerifier

LIMITS = SandboxLimits(cpu_s=1, wall_s=20.0, memory_bytes=256 << 20)


@pytest.fixture(scope="session")
def boxes():
    """Sandboxes with the best isolation that this machine permits."""
    yield from open_boxes(namespaces=True)


@pytest.fixture(scope="session")
def bare_boxes():
    """Sandboxes as on a machine that does not permit namespaces."""
    yield from open_boxes(namespaces=False)


def open_boxes(*, namespaces):
    if sys.platform != "linux":
        pytest.skip("boxes need Linux")
    verifier = CodeVerifier(size=2, limits=LIMITS, namespaces=namespaces)
    yield verifier
    verifier.close()


@pytest.fixture(scope="session")
def load_lines():
    """The records of a file in a folder `shared/data` next to any parent of this one; skips if there is none."""

    def load(name):
        for folder in Path(__file__).resolve().parents:
            path = folder / "shared" / "data" / name
            if path.is_file():
                return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pytest.skip(f"no shared/data/{name} next to the checkout")

    return load
