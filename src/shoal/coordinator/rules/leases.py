"""Leases: how many a node may hold at once, how long they may take, and how much of a batch one owner may generate.

How many at once: one more for every few accepted submissions, half after each failure. This is the rule that avoids
congestion in networks (additive increase, multiplicative decrease): a node that delivers soon reaches the maximum, one
that hoards, expires or is rejected soon has one, and one is always left to recover with. An owner whose leases fail
repeatedly must pause between two of them: longer than work is reserved for it, so that others get that work.

How long: derived from how long earlier leases took.

How much of a batch: bounded influence, whatever an owner's work is like. Work in which no check finds a fault may still
be chosen to do harm, and the harm one owner can do is bounded by its part of a batch. The bound is

    most = max(1, floor(share x G), ceil(G / N))        G groups of a batch, N active owners

so N owners can always fill a batch: N x most >= G. While fewer than 1 / share owners are active, their parts are equal.
The bound applies when leases are granted, to what an owner holds, has delivered and had accepted with a signal; no work
is discarded.

The bound is lifted: if for `share_wait_s` nobody else took the groups that a step lacks, nobody else wants or is able
to, and a run must not wait for absent owners. Owners without accepted work do not count there; otherwise a new
identity, which costs seconds, could delay a step again. Others that take leases and do nothing have to pause.

An owner is an identity. Someone with many identities has as many parts, and is then bounded by the cost of identities:
the work of joining, few leases on probation, full checks of new owners, a bond that each has to earn.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from shoal.protocol.params import MILLION, RunParams

FREE_FAILURES = 3
"""consecutive failures before an owner has to pause"""
_REST_S, _MAX_REST_S = 40, 80


class LeaseLimit(NamedTuple):
    """Concurrent leases of a node, and its progress to one more."""

    width: int = 1
    progress: int = 0
    """accepted submissions since the limit last changed"""


def raise_limit(old: LeaseLimit, raise_after: int, max_width: int) -> LeaseLimit:
    """The limit after an accepted submission."""
    if old.progress + 1 < raise_after:
        return LeaseLimit(old.width, old.progress + 1)
    return LeaseLimit(max(old.width, min(old.width + 1, max_width)), 0)


def halve_limit(old: LeaseLimit) -> LeaseLimit:
    """The limit after an expiry or a rejection."""
    return LeaseLimit(max(1, old.width // 2), 0)


def rest_time(failures: int, reserve_s: int) -> int:
    """Milliseconds after its last failure in which an owner gets no lease; longer than work is reserved for it."""
    if failures < FREE_FAILURES:
        return 0
    doubled = _REST_S << min(failures - FREE_FAILURES, 16)
    return 1000 * max(min(doubled, _MAX_REST_S), reserve_s + 1)


MIN_MEASURED = 5
"""number of measured leases from which their median is used"""
ROLLOUT_BYTES = 262_144
"""size of a rollout with its prompt and proofs, for which an upload gets time"""
UPLOAD_BYTES_S = 65_536
"""slowest upload rate that is allowed; also the server's limit for request bodies"""


def lease_time(params: RunParams, group_ms: Sequence[int], count: int) -> int:
    """Milliseconds for a lease of `count` groups; `group_ms` is the time per group of earlier leases."""
    if len(group_ms) < MIN_MEASURED:
        return 1000 * params.lease_first_s
    wanted = params.lease_factor * median_low(group_ms) * count
    return min(max(wanted, 1000 * params.lease_min_s), 1000 * params.lease_max_s)


def upload_time(upload_s: int, size: int, rollouts: int) -> int:
    """Milliseconds for an upload; a file larger than such rollouts normally are gets no additional time.

    A node that announces a large file may only want others to wait.
    """
    return 1000 * upload_s + 1000 * min(size, ROLLOUT_BYTES * rollouts) // UPLOAD_BYTES_S


def is_backup_due(params: RunParams, age_ms: int, time_ms: int) -> bool:
    """Whether groups were granted so long ago that another node may start the same ones.

    `age_ms` counts from the first lease of the groups: returning and taking them again does not reset it.
    `time_ms` is the time that their lease gets."""
    return MILLION * age_ms >= params.backup_after * time_ms


def progress_time(params: RunParams, group_ms: Sequence[int]) -> int:
    """Milliseconds within which some work for a step should arrive: two consecutive leases, and an upload."""
    return 2 * lease_time(params, group_ms, params.groups_per_lease) + 1000 * params.upload_s


def is_bounded(params: RunParams) -> bool:
    """Whether a run bounds how much one owner generates."""
    return params.owner_share < MILLION


def count_equals(params: RunParams) -> int:
    """The number of active owners beyond which more of them change nothing."""
    return -(-MILLION // params.owner_share)


def most_groups(params: RunParams, owners: int) -> int:
    """Groups of one batch that an owner may generate while others want work; `owners` counts all active ones."""
    groups = params.groups_per_batch
    return max(1, groups * params.owner_share // MILLION, -(-groups // max(1, owners)))
