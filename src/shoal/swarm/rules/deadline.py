"""How long things may take, from how long they took."""

from collections.abc import Sequence
from statistics import median_low

from shoal.swarm.params import MILLION, RunParams

MIN_MEASURED = 5
"""leases that must have been measured before their median counts"""
ROLLOUT_BYTES = 262_144
"""of a rollout with its prompt and proofs, for which an upload is given time"""
UPLOAD_BYTES_S = 65_536
"""slowest rate at which an upload is waited for; also the server's rule for bodies"""


def lease_time(params: RunParams, group_ms: Sequence[int], count: int) -> int:
    """Milliseconds that a lease of `count` groups gets; `group_ms` is what groups of earlier leases took each."""
    if len(group_ms) < MIN_MEASURED:
        return 1000 * params.lease_first_s
    wanted = params.lease_factor * median_low(group_ms) * count
    return min(max(wanted, 1000 * params.lease_min_s), 1000 * params.lease_max_s)


def upload_time(upload_s: int, size: int, rollouts: int) -> int:
    """Milliseconds that an upload gets; a file gets no more for being larger than such rollouts are.

    Who announces a large one may only want others to wait.
    """
    return 1000 * upload_s + 1000 * min(size, ROLLOUT_BYTES * rollouts) // UPLOAD_BYTES_S


def is_backup_due(params: RunParams, age_ms: int, time_ms: int) -> bool:
    """Whether groups were given out so long ago that somebody else may begin the same.

    `age_ms` counts from the first lease of the groups: who returns and takes them again makes them no younger.
    `time_ms` is what their lease gets."""
    return MILLION * age_ms >= params.backup_after * time_ms


def progress_time(params: RunParams, group_ms: Sequence[int]) -> int:
    """Milliseconds within which some work for a step should arrive: two leases, one after the other, and an upload."""
    return 2 * lease_time(params, group_ms, params.groups_per_lease) + 1000 * params.upload_s
