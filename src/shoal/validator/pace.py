"""How fast a validator is while it judges: for whoever watches, and for how many jobs it takes at a time."""

from collections import deque
from dataclasses import dataclass

from shoal.swarm.messages import MAX_JOBS

RECENT = 32
"""judgements that count"""
PATIENCE = 4
"""what is claimed at once takes at most one part in so many of a claim's time"""
GROWTH = 2
"""times as much may be claimed after each judgement that was in time, once one was not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """One judgement of jobs at once."""

    jobs: int
    rollouts: int
    """replayed"""
    tokens: int
    """replayed"""
    seconds: float
    """from the files to the opinions"""


class Pace:
    """The last judgements of a validator."""

    def __init__(self) -> None:
        self._stints: deque[Stint] = deque(maxlen=RECENT)
        self._most = MAX_JOBS
        self.rollouts = self.tokens = 0
        """replayed since the start"""

    def add(self, stint: Stint) -> None:
        """Count one more judgement."""
        self._stints.append(stint)
        self._most = min(MAX_JOBS, GROWTH * self._most)
        self.rollouts += stint.rollouts
        self.tokens += stint.tokens

    def note_late(self) -> None:
        """What was claimed was not judged in time: one job is claimed next, whatever the pace was.

        Jobs differ: a newcomer's is replayed in full, a trusted owner's in part. Who had many of the cheap kind would
        claim as many of the dear one again and again, and be limited for what it let lapse.
        """
        self._most = 1

    @property
    def rollouts_per_s(self) -> float:
        return self._rate(sum(stint.rollouts for stint in self._stints))

    @property
    def tokens_per_s(self) -> float:
        return self._rate(sum(stint.tokens for stint in self._stints))

    def choose_most(self, claim_s: float) -> int:
        """Jobs to claim at once: as many as can be judged well before their claims end, one until that is known."""
        per_s = self._rate(sum(stint.jobs for stint in self._stints))
        return max(1, min(self._most, int(per_s * claim_s / PATIENCE)))

    def describe(self) -> str:
        """In words; empty before the first judgement."""
        if not self._stints:
            return ""
        return f"replays {self.rollouts_per_s:,.0f} rollouts/s, {self.tokens_per_s:,.0f} tokens/s"

    def _rate(self, number: int) -> float:
        seconds = sum(stint.seconds for stint in self._stints)
        return number / seconds if seconds > 0.0 else 0.0
