"""How much an attack may do: so many identities, requests and seconds, and not one more.

An attack is code that wants to do harm, if only to a run of one's own. What it may do is counted in one place, before
it is done; what would go beyond is not done, and ends the attack.
"""

import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from shoal.config import Settings


class BudgetError(Exception):
    """An attack that has used up what it may; one sentence that says of what."""


class Budget(Settings):
    """What one attack may do."""

    identities: Annotated[int, Field(ge=1, le=1000)] = 120
    """nodes that it makes, each with a key of its own"""
    requests: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """sent to the coordinator; weights come from relays and are not counted"""
    seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 120.0


class Purse:
    """What is left of a budget. The time counts from its making."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._clock, self._begun = budget, clock, clock()
        self.num_identities = 0
        self.num_requests = 0

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 if none are."""
        return max(0.0, self._budget.seconds - self.spent_s)

    @property
    def left_requests(self) -> int:
        """Requests that are left."""
        return self._budget.requests - self.num_requests

    def spend_request(self, count: int = 1) -> None:
        """Requests are about to be sent."""
        if self.num_requests + count > self._budget.requests:
            raise BudgetError(f"all of the {self._budget.requests} requests that it may send were sent")
        if not self.left_s:
            raise BudgetError(f"the {self._budget.seconds:g} s that it may take are over")
        self.num_requests += count

    def spend_identity(self) -> None:
        """An identity is about to be made."""
        if self.num_identities + 1 > self._budget.identities:
            raise BudgetError(f"all of the {self._budget.identities} identities that it may make were made")
        self.num_identities += 1
