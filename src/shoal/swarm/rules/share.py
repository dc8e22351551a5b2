"""How much of a batch one owner may write: bounded influence, whatever its work is like.

What no check can find fault with may still be chosen to do harm, and what one owner can do so is bounded by its part of
a batch. The bound is

    most = max(1, floor(share x G), ceil(G / N))        G groups of a batch, N owners at work

so it never asks of N owners what they cannot do: N x most >= G. While fewer than 1 / share owners are at work each has
an equal part. It holds where leases are granted, over what an owner holds, has delivered and had accepted with a
signal; no work is thrown away.

The bound yields: if for `share_wait_s` nobody else took what a step lacks, nobody else wants it, or is able, and a run
must not wait for who does not come. Who never had work accepted does not count there, or an identity, which costs
seconds, would bring a step another wait; others that take leases and do nothing have to rest (rules/width.py).

An owner is an identity. Who makes many of them has as many parts, and then what bounds it is what identities cost: the
work of joining, leases on probation, full checks of newcomers, a bond that each has to earn.
"""

from shoal.swarm.params import MILLION, RunParams


def is_bounded(params: RunParams) -> bool:
    """Whether a run bounds what one owner writes."""
    return params.owner_share < MILLION


def count_equals(params: RunParams) -> int:
    """Owners at work from which on more of them change nothing."""
    return -(-MILLION // params.owner_share)


def most_groups(params: RunParams, owners: int) -> int:
    """Groups of one batch that an owner may write while others want work; `owners` are those at work, itself too."""
    groups = params.groups_per_batch
    return max(1, groups * params.owner_share // MILLION, -(-groups // max(1, owners)))
