"""Checks a lease against the recipe and the limits of this machine, and turns it into an order for the engine.

The coordinator is not trusted with the worker's memory: a lease is compared with the recipe, which the descriptor
fixes, and with limits set by the worker's owner. No field of it becomes part of a path.
"""

from dataclasses import dataclass

from shoal.config.run import Count, Settings
from shoal.protocol.beacon import read_seeds
from shoal.protocol.messages import Lease
from shoal.recipe import Recipe
from shoal.seeds import GroupSeeds


class LeaseError(ValueError):
    """A lease that this worker rejects; the text gives the reason."""


class WorkLimits(Settings):
    """Upper limits that the owner of a machine sets."""

    max_rollouts: Count = 4096
    """most rollouts of one lease"""
    max_tokens: Count = 65_536
    """most tokens of one completion"""
    memory_mb: Count = 4096
    """memory for keys, values and hidden states of the rollouts being generated, in addition to the weights"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOrder:
    """Groups first .. first + count - 1 of a step, to generate with a version."""

    lease: str
    step: int
    first: int
    count: int
    seeds: tuple[GroupSeeds, ...]
    """one per group"""
    version: int
    deadline_ms: int


def take_order(lease: Lease, recipe: Recipe, limits: WorkLimits) -> LeaseOrder:
    """The order of a lease; `LeaseError` if it exceeds the recipe or the limits."""
    asked, known = (lease.group_size, lease.max_tokens), (recipe.group_size, recipe.max_tokens)
    if asked != known:
        raise LeaseError(
            f"asks for {asked[0]} rollouts of {asked[1]} tokens, the recipe has {known[0]} of {known[1]} tokens"
        )
    if lease.max_tokens > limits.max_tokens:
        raise LeaseError(f"asks for {lease.max_tokens} tokens, this worker generates at most {limits.max_tokens}")
    if not 1 <= lease.count * lease.group_size <= limits.max_rollouts:
        raise LeaseError(f"asks for {lease.count * lease.group_size} rollouts, allowed are 1 to {limits.max_rollouts}")
    if not 0 <= lease.version < lease.step:
        raise LeaseError(f"is for step {lease.step} with v{lease.version}, which is too new")
    seeds = tuple(read_seeds(text) for text in lease.seeds)
    if [len(own.rollouts) for own in seeds] != [lease.group_size] * lease.count:
        raise LeaseError(f"does not have the seeds of {lease.count} groups of {lease.group_size} rollouts")
    return LeaseOrder(
        lease=lease.lease,
        step=lease.step,
        first=lease.first,
        count=lease.count,
        seeds=seeds,
        version=lease.version,
        deadline_ms=lease.deadline_ms,
    )
