"""How many more groups of a step an owner may have now.

Invariants:
- the answer follows from the ledger and the time alone, so whoever takes a decision again finds the same;
- where a run has no bound nothing is counted.
"""

import math
from typing import NamedTuple

from shoal.swarm.rules.share import count_equals, is_bounded, most_groups
from shoal.swarm.state.leases import count_share, last_other, list_owners
from shoal.swarm.state.run import count_away
from shoal.swarm.state.steps import StepRow
from shoal.swarm.turn import Turn


class Room(NamedTuple):
    """What is left of an owner's share of a step."""

    groups: int
    wait_s: int = 0
    """until the bound yields, if nobody else takes what is missing; 0 if there is none"""


def find_room(turn: Turn, step: StepRow, owner: str) -> Room:
    """Groups of a step that an owner may still be given."""
    params = turn.params
    if not is_bounded(params):
        return Room(params.groups_per_batch)
    left = most_groups(params, _count_owners(turn, step, owner)) - count_share(turn.connection, step.step, owner)
    if left >= params.groups_per_lease:
        return Room(left)
    since_ms = max(step.opened_ms, last_other(turn.connection, step.step, owner))
    wait_ms = since_ms + 1000 * params.share_wait_s + count_away(turn.connection, since_ms) - turn.now_ms
    return Room(max(left, 0), math.ceil(wait_ms / 1000)) if wait_ms > 0 else Room(params.groups_per_batch)


def _count_owners(turn: Turn, step: StepRow, owner: str) -> int:
    """Owners that are at work: those that had leases of this step, or of the one before, as far as it matters."""
    most = count_equals(turn.params)
    owners = {owner, *list_owners(turn.connection, step.step - 1, most)}
    return len(owners | set(list_owners(turn.connection, step.step, most)))
