"""Rates per caller, in a table of bounded size.

A bucket is one number, the time at which it would be full again: `burst` tokens fit, `rate` a second come back. A name
that is not in the table has a full bucket, so asking costs no memory, and forgetting the longest unused name (which is
what happens to one too many) gives it at most a burst.
"""


class Buckets:
    """One token bucket for each name."""

    def __init__(self, rate: float, burst: float, capacity: int) -> None:
        self._token_s = 1.0 / rate
        self._burst_s = burst / rate
        self._capacity = capacity
        self._full_s: dict[str, float] = {}
        """by name, the longest unused first"""

    def __len__(self) -> int:
        return len(self._full_s)

    def find_wait(self, name: str, now_s: float) -> float:
        """Seconds until the name has a token, 0 if it has one; changes nothing."""
        full_s = self._full_s.get(name)
        if full_s is None:
            return 0.0
        debt_s = full_s - now_s
        if debt_s > 3 * self._burst_s:  # more than anybody can owe: the clock was set back, and nobody pays for that
            return 0.0
        return max(0.0, debt_s + self._token_s - self._burst_s)

    def take_tokens(self, name: str, now_s: float, count: float = 1.0) -> None:
        """Take tokens out of a bucket, also more than are in it, down to a burst below none."""
        full_s = self._full_s.pop(name, now_s)
        if not now_s <= full_s <= now_s + 3 * self._burst_s:
            full_s = now_s
        self._full_s[name] = min(full_s + count * self._token_s, now_s + 2 * self._burst_s)
        if len(self._full_s) > self._capacity:
            del self._full_s[next(iter(self._full_s))]
