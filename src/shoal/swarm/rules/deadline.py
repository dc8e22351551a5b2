"""How long things may take, from how long they took."""

from collections.abc import Sequence
from statistics import median_low

from shoal.swarm.params import MILLION, RunParams

MIN_MEASURED = 5
"""leases that must have been measured before their median counts"""
UPLOAD_BYTES_S = 65_536
"""slowest rate at which an upload is waited for; also the server's rule for bodies"""


def lease_time(params: RunParams, group_ms: Sequence[int], count: int) -> int:
    """Milliseconds that a lease of `count` groups gets; `group_ms` is what groups of earlier leases took each."""
    if len(group_ms) < MIN_MEASURED:
        return 1000 * params.lease_first_s
    wanted = params.lease_factor * median_low(group_ms) * count
    return min(max(wanted, 1000 * params.lease_min_s), 1000 * params.lease_max_s)


def upload_time(upload_s: int, size: int) -> int:
    """Milliseconds that an upload gets."""
    return 1000 * upload_s + 1000 * size // UPLOAD_BYTES_S


def is_backup_due(params: RunParams, granted_ms: int, deadline_ms: int, now_ms: int) -> bool:
    """Whether a lease has used so much of its time that somebody else may begin the same."""
    return MILLION * (now_ms - granted_ms) >= params.backup_after * (deadline_ms - granted_ms)
