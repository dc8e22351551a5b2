"""Whether there is room for one more file of an owner: decided before the lease, so no one computes in vain."""

from shoal.coordinator.decide.context import Decision
from shoal.coordinator.rules.room import find_patience, find_shortage
from shoal.coordinator.state.room import find_owner_room, find_total_room


def explain_shortage(decision: Decision, owner: str, file_bytes: int) -> str:
    """Why an owner gets no room for one more file, in one sentence; empty if it does."""
    own, total = find_owner_room(decision.connection, owner), find_total_room(decision.connection)
    return find_shortage(decision.params, own, file_bytes, all_over=total.over, all_bytes=total.stored)


def read_patience(decision: Decision) -> int:
    """Bytes above which an owner without accepted work has its files that were not accepted deleted early."""
    return find_patience(decision.params, find_total_room(decision.connection).over)
