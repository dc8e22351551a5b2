"""What a worker takes on: a lease that fits the recipe and this machine, as an order for its engine.

A lease comes from a coordinator that the worker need not trust with its memory: what it asks for is compared with the
recipe, which the descriptor fixes, and with limits that the worker's owner sets. Nothing of it becomes a path.
"""

from dataclasses import dataclass

from shoal.config import Count, Settings
from shoal.recipe import Recipe
from shoal.swarm.beacon import number_beacon
from shoal.swarm.messages import Lease


class LeaseError(ValueError):
    """A lease that this worker will not work on: one sentence that says why."""


class WorkLimits(Settings):
    """What the owner of a machine lends, at most."""

    max_rollouts: Count = 4096
    """of one lease"""
    max_tokens: Count = 65_536
    """of one completion"""
    memory_mb: Count = 4096
    """for keys, values and hidden states of the rollouts under way; beside the weights"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Groups first .. first + count - 1 of a step, to be written with a version from `oldest` to `step` - 1."""

    lease: str
    step: int
    first: int
    count: int
    beacon: int
    oldest: int
    deadline_ms: int

    def allows(self, version: int) -> bool:
        """Whether rollouts of a version may be handed in."""
        return self.oldest <= version < self.step


def take_order(lease: Lease, recipe: Recipe, limits: WorkLimits) -> Order:
    """The order that a lease is; `LeaseError` for one that goes beyond recipe or limits."""
    asked, known = (lease.group_size, lease.max_tokens), (recipe.group_size, recipe.max_tokens)
    if asked != known:
        raise LeaseError(
            f"asks for {asked[0]} rollouts of {asked[1]} tokens, the recipe says {known[0]} of {known[1]} tokens"
        )
    if lease.max_tokens > limits.max_tokens:
        raise LeaseError(f"asks for {lease.max_tokens} tokens, this worker writes up to {limits.max_tokens}")
    if not 1 <= lease.count * lease.group_size <= limits.max_rollouts:
        raise LeaseError(f"asks for {lease.count * lease.group_size} rollouts, allowed are 1 to {limits.max_rollouts}")
    if not 0 <= lease.oldest_version < lease.step:
        raise LeaseError(f"step {lease.step} with versions from v{lease.oldest_version} on")
    return Order(
        lease=lease.lease,
        step=lease.step,
        first=lease.first,
        count=lease.count,
        beacon=number_beacon(lease.beacon),
        oldest=lease.oldest_version,
        deadline_ms=lease.deadline_ms,
    )
