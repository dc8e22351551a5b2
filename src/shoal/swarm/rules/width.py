"""How many leases a node may hold at once: one more for every few accepted submissions, half for each failure.

The same rule that keeps a network from congesting: who delivers is soon at the most, who hoards, expires or is rejected
is soon at one, and one is always left to come back with. Whose leases come to nothing again and again has to rest
between two of them: longer than work is kept for it, so that others get that work.
"""

from typing import NamedTuple

FREE_FAILURES = 3
"""in a row, before an owner has to rest"""
_REST_S, _MAX_REST_S = 40, 80


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


def rest_time(failures: int, reserve_s: int) -> int:
    """Milliseconds after its last failure for which an owner gets no lease; longer than work is kept for it."""
    if failures < FREE_FAILURES:
        return 0
    doubled = _REST_S << min(failures - FREE_FAILURES, 16)
    return 1000 * max(min(doubled, _MAX_REST_S), reserve_s + 1)
