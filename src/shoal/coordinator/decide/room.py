"""Whether there is room for one more file of an owner: decided before the lease, so no one computes in vain."""

from shoal.coordinator.decide.context import Decision
from shoal.coordinator.rules.room import find_shortage, is_pool_tight
from shoal.coordinator.state.room import find_owner_room, find_total_room


def explain_shortage(decision: Decision, owner: str, file_bytes: int) -> str:
    """Why an owner gets no room for one more file, in one sentence; empty if it does."""
    own, total = find_owner_room(decision.connection, owner), find_total_room(decision.connection)
    return find_shortage(decision.params, own, file_bytes, all_over=total.over, all_bytes=total.stored)


def is_tight(decision: Decision) -> bool:
    """Whether the pool is short of room."""
    return is_pool_tight(decision.params, find_total_room(decision.connection).over)
