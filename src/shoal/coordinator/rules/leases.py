"""Leases: how many a node may hold at once, how long they may take, and how much of a batch one owner may generate.

How many at once: one more for every few accepted submissions, half after each failure. This is the rule that avoids
congestion in networks (additive increase, multiplicative decrease): a node that delivers soon reaches the maximum, one
that hoards, expires or is rejected soon has one, and one is always left to recover with. An owner whose leases fail or
whose work is rejected repeatedly must pause between two leases: longer than work is reserved for it, so that others get
that work; and after a rejection for `CHARGE` times the CPU time that validators spent on it.

Who first: owners of record (`rules.standing`). Leases of all other owners are trials. While trials fail, there is one
per `spacing` of all these owners together, whatever their number; it doubles with each trial that fails and is halved
by each that is accepted. So identities that cost nothing cannot delay a run more often than that. Who gets the next one
is drawn; an owner with a failure comes after those without one, so a newcomer waits for no owner twice.

How long: derived from how long earlier leases of owners of record took. Only a range's first lease is measured: an
owner that held a range before may have computed it in advance. The deadline follows from a high quantile, so many fast
owners do not shorten the deadlines of slower ones, and from the owner's own times. A lease that makes progress is
extended. Neither own times nor progress delay a backup: an owner may state what it likes about itself.

How many groups: as many as take about `AIM_S`, if the run does not say otherwise; one for a trial.

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

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from shoal.coordinator.rules.standing import MAX_FAULTS, STRIKE, needs_work
from shoal.protocol.params import MILLION, RunParams

FREE_FAILURES = 3
"""consecutive failures before an owner has to pause"""
_REST_S, _MAX_REST_S, _MAX_REJECTED_REST_S = 40, 80, 3600
CHARGE = 400
"""time without a lease, as a multiple of the validators' CPU time on rejected work: N owners use N / 400 cores"""
SPACING_S, SPACED_LEASES = 1, 8
"""time between trials after the first one failed; the most is `trial_max_s`, or so many lease times if longer"""


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


def rest_time(params: RunParams, failures: int, strikes: int, charge_ms: int = 0) -> int:
    """Milliseconds after its last failure in which an owner gets no lease; longer than work is reserved for it."""
    if not params.trial_max_s:
        strikes = charge_ms = 0
    return max(_failure_rest(failures, strikes, params.reserve_s), charge_ms)


def _failure_rest(failures: int, strikes: int, reserve_s: int) -> int:
    count = max(failures, strikes // STRIKE)
    if count < FREE_FAILURES:
        return 0
    doubled = _REST_S << min(count - FREE_FAILURES, 16)
    most = _MAX_REJECTED_REST_S if strikes > MAX_FAULTS else _MAX_REST_S
    return 1000 * max(min(doubled, most), reserve_s + 1)


def owes_work(params: RunParams, strikes: int, failures: int, *, has_record: bool) -> bool:
    """Whether an owner gets its next lease only after a new proof of work.

    After too many rejections; and without a record after each failed lease but the first ones, which its first proof of
    work paid for: a lease is two events of the ledger, whether or not anything is delivered."""
    return needs_work(params, strikes) or (failures >= FREE_FAILURES and not has_record)


def charge_time(cpu_ms: int, before_ms: int) -> int:
    """Milliseconds without a lease for the CPU time that validators spent on rejected work; `before_ms` are those for
    what was rejected before, since work was last accepted. They add up: work may be rejected together."""
    return min(before_ms + CHARGE * cpu_ms, 1000 * _MAX_REJECTED_REST_S)


def space_trials(params: RunParams, spacing_ms: int, time_ms: int, *, failed: bool) -> int:
    """Milliseconds between two trials, after one failed or was accepted; `time_ms` is how long a lease takes."""
    if not failed:
        return spacing_ms // 2 if spacing_ms > 1000 * SPACING_S else 0
    most_ms = max(1000 * params.trial_max_s, SPACED_LEASES * time_ms) if params.trial_max_s else 0
    return min(max(2 * spacing_ms, 1000 * SPACING_S), most_ms)


def trial_delay(owner: str, granted_ms: int, spacing_ms: int, *, is_first: bool) -> int:
    """Milliseconds after the spacing from which an owner may have the next trial; `granted_ms` is that of the last one.

    They are drawn for each trial, so it does not help to ask often. `is_first`: an owner without a failure that was
    there before the last trial, so nobody can look for a key with a good draw; it comes before all others."""
    drawn = int.from_bytes(hashlib.sha256(f"{granted_ms} {owner}".encode()).digest()[:4]) * spacing_ms >> 32
    return drawn if is_first else spacing_ms + drawn


MIN_MEASURED = 5
"""number of measured leases from which their durations are used"""
MAX_TIMES, MAX_OWN_TIMES = 64, 6
"""leases whose durations are used, in total and per owner; one owner has less than a tenth, so alone it does not change
the time in which nine of ten groups are done"""
AIM_S = 10
"""duration of a lease whose size the run does not fix"""
_FIRST_TRIALS = 20
"""before durations are known, part of `lease_first_s` after which a trial gets a backup"""
ROLLOUT_BYTES = 262_144
"""size of a rollout with its prompt and proofs, for which an upload gets time"""
UPLOAD_BYTES_S = 65_536
"""slowest upload rate that is allowed; also the server's limit for request bodies"""


def usual_time(group_ms: Sequence[int]) -> int:
    """Milliseconds in which nine of ten groups are done; 0 until enough were measured."""
    return 0 if len(group_ms) < MIN_MEASURED else sorted(group_ms)[-(-9 * len(group_ms) // 10) - 1]


def lease_time(params: RunParams, group_ms: Sequence[int], count: int, own_ms: Sequence[int] = ()) -> int:
    """Milliseconds for a lease of `count` groups; `group_ms` are times per group of earlier leases, `own_ms` those of
    its owner, which give itself more time and nobody less."""
    usual_ms = usual_time(group_ms)
    if not usual_ms:
        return 1000 * params.lease_first_s
    wanted = params.lease_factor * max(usual_ms, *own_ms, 0) * count
    return min(max(wanted, 1000 * params.lease_min_s), 1000 * params.lease_max_s)


def extend_time(params: RunParams, held_ms: int, done: int, rollouts: int) -> int:
    """Milliseconds from its grant that a lease gets if `done` of its rollouts are finished after `held_ms`: half more
    than it needs at its own speed."""
    return min(held_ms * rollouts * 3 // (2 * done), 1000 * params.lease_max_s)


def lease_size(params: RunParams, group_ms: Sequence[int], nodes: int) -> int:
    """Groups of one lease, if so many are missing; `nodes` share a batch."""
    if params.groups_per_lease:
        return params.groups_per_lease
    usual_ms = usual_time(group_ms)
    if not usual_ms:
        return 1
    return max(1, min(1000 * AIM_S // usual_ms, params.most_per_lease, -(-params.groups_per_batch // max(1, nodes))))


def trial_time(params: RunParams, group_ms: Sequence[int], count: int) -> int:
    """Milliseconds after which groups that only trials hold get a further holder."""
    return usual_time(group_ms) * count or 1000 * params.lease_first_s // _FIRST_TRIALS


def upload_time(upload_s: int, size: int, rollouts: int) -> int:
    """Milliseconds for an upload; a file larger than such rollouts normally are gets no additional time.

    A node that announces a large file may only want others to wait.
    """
    return 1000 * upload_s + 1000 * min(size, ROLLOUT_BYTES * rollouts) // UPLOAD_BYTES_S


def is_backup_due(params: RunParams, age_ms: int, time_ms: int) -> bool:
    """Whether groups were granted so long ago that another node may start the same ones.

    `age_ms` counts from the first lease of the groups: returning and taking them again does not reset it.
    `time_ms` is the time that a lease of an owner without times of its own gets."""
    return MILLION * age_ms >= params.backup_after * time_ms


def progress_time(params: RunParams, group_ms: Sequence[int]) -> int:
    """Milliseconds within which some work for a step should arrive: two consecutive leases, and an upload."""
    return 2 * lease_time(params, group_ms, params.groups_per_lease or 1) + 1000 * params.upload_s


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
