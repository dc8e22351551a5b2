"""Numbered points at which a test may end the process, to see what a crash there leaves behind.

    WORK.1  asked, nothing decided            write.1  decided and written, not committed
    WORK.2  decided, nothing written          write.2  committed, nobody told
    WORK.3  on disk, not answered             blob.N   steps of storing a file, drop.N of removing one

where WORK is one of `WORKS`. Nothing can be set here from outside of the process, and without a hook a point costs one
comparison.
"""

from collections.abc import Callable

WORKS = ("lease", "commit", "upload", "receipt", "claim", "verdict", "cut", "publish", "redeem")
POINTS = frozenset(
    [f"{work}.{number}" for work in WORKS for number in (1, 2, 3)]
    + ["write.1", "write.2", "blob.1", "blob.2", "blob.3", "blob.4", "drop.1", "drop.2", "drop.3"]
)

_hook: Callable[[str], None] | None = None


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Have every point reported; None for nothing."""
    global _hook  # noqa: PLW0603 - one process, one hook
    _hook = hook


def reach(name: str, number: int) -> None:
    """Here is a point; unnamed ones are none."""
    if _hook is not None and name:
        point = f"{name}.{number}"
        assert point in POINTS, f"{point}: a point that the table does not have"
        _hook(point)
