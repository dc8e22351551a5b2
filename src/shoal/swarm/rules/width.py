"""How many leases a node may hold at once: one more for every few accepted submissions, half for each failure.

The same rule that keeps a network from congesting: who delivers is soon at the most, who hoards, expires or is rejected
is soon at one, and one is always left to come back with.
"""

from typing import NamedTuple


class Width(NamedTuple):
    """Leases at once, and how far it is to one more."""

    width: int = 1
    progress: int = 0
    """accepted submissions since it last changed"""


def raise_width(old: Width, raise_after: int, max_width: int) -> Width:
    """After an accepted submission."""
    if old.progress + 1 < raise_after:
        return Width(old.width, old.progress + 1)
    return Width(max(old.width, min(old.width + 1, max_width)), 0)


def halve_width(old: Width) -> Width:
    """After an expiry or a rejection."""
    return Width(max(1, old.width // 2), 0)
