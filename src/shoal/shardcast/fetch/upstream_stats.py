"""Statistics of upstream servers, and the random draw that spreads shards over them.

The weight of an upstream is its success rate times its rate in bytes per second, both exponential moving averages. A
shard goes to an upstream with probability proportional to weight / (1 + requests in flight there). Always taking the
best would put every client onto the same server. The rate is that of all requests in flight together: each of four gets
a quarter of a link, and would make a fast upstream look like a slow one.

Invariants:
- no weight is ever 0: an upstream that failed is tried again (`FLOOR`), and each draw that goes elsewhere raises a
  weight below the mean towards it (`HEAL`);
- after a failure an upstream is paused for a while, after a wrong hash banned for longer. Both end by themselves, so
  that no upstream can stop a client forever, and an honest one is not excluded for a single bad sector;
- a version is requested only from upstreams that announced it. When none does any more, the version is gone. An
  upstream without a response for `UNREACHABLE_S` is still asked, but announces nothing until it responds again.

Nothing here does I/O; the clock and the randomness are arguments.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from shoal.errors import ConfigError
from shoal.net.http import Url, parse_url

ALPHA = 0.3
"""Weight of the newest request in the moving averages."""
HEAL = 0.02
"""Share of the distance to the mean by which a draw raises the weights of upstreams that were not drawn."""
FLOOR = 0.002
"""Minimum weight, as a share of the largest."""
BUSY_S = 0.5
"""How long a version is not requested from an upstream that cannot send it now."""
COOL_S = (0.25, 15.0)
"""First and maximum pause after consecutive failures."""
BAN_S = (5.0, 300.0)
"""First and maximum ban after wrong bytes; each further wrong shard doubles it."""
WRONG_LIMIT = 3
"""Number of wrong shards after which a ban applies to all versions."""
UNREACHABLE_S = 10.0
"""How long an upstream may be unreachable before its announcements no longer count."""
_MEASURED_BYTES = 1 << 14
"""Smaller responses measure the latency rather than the rate."""


@dataclass(slots=True)
class RequestCounts:
    """Results of the requests to one upstream."""

    shards: int = 0
    """shards that arrived and were correct"""
    bytes: int = 0
    """bytes of bodies received, correct or not"""
    failures: int = 0
    """requests that ended in any other way"""
    wrong: int = 0
    """number of failures with bytes that do not match the manifest"""
    reason: str = ""
    """description of the last failure"""


@dataclass(slots=True, eq=False)
class Upstream:
    """One upstream server: its statistics, and when it may be asked again."""

    url: Url
    success: float = 1.0
    rate: float | None = None
    weight: float | None = None
    """None until measured; the mean of the others is used instead"""
    busy: int = 0
    """requests for shards in flight"""
    cool_until: float = 0.0
    num_cooled: int = 0
    bans: dict[str, float] = field(default_factory=dict)
    """end of the ban, by the digest of a version; the empty digest means all versions"""
    announced: set[str] = field(default_factory=set)
    """digests of the versions it announced and did not withdraw"""
    denied: bool = False
    """whether it rejected our last request because of the ticket"""
    listed: bool = False
    """whether its list was read at least once"""
    unreachable_since: float | None = None
    """since when its list cannot be read; None if the last attempt succeeded, or the first is in progress"""
    counts: RequestCounts = field(default_factory=RequestCounts)

    def __str__(self) -> str:
        return str(self.url)

    @property
    def answered(self) -> bool:
        """Whether its list was read, or an attempt to read it failed."""
        return self.listed or self.unreachable_since is not None

    def banned_until(self, digest: str) -> float:
        return max(self.bans.get(digest, 0.0), self.bans.get("", 0.0))


class UpstreamTable:
    """All upstreams of one client. Used from one event loop."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        heal: float = HEAL,
    ) -> None:
        self.all = [Upstream(url) for url in dict.fromkeys(map(parse_url, urls))]
        if not self.all:
            raise ConfigError("sources: at least one is required, for example http://127.0.0.1:8600")
        self.clock = clock
        self._heal = heal

    def draw(self, rng: random.Random, digest: str, avoid: Collection[Upstream] = ()) -> Upstream | None:
        """Draw an upstream for a shard of that version; None if all that hold it are paused or banned.

        Those in `avoid` are drawn only if there is no other.
        """
        ready = self.list_ready(digest)
        ready = [upstream for upstream in ready if upstream not in avoid] or ready
        if not ready:
            return None
        weights = self.weigh_all()
        drawn = rng.choices(ready, [weights[upstream] / (1 + upstream.busy) for upstream in ready])[0]
        mean = sum(weights.values()) / len(weights)
        for upstream in self.all:
            if upstream is not drawn and upstream.weight is not None and upstream.weight < mean:
                upstream.weight += self._heal * (mean - upstream.weight)
        return drawn

    def list_ready(self, digest: str) -> list[Upstream]:
        """The upstreams that hold a version and are neither paused nor banned for it."""
        now = self.clock()
        return [upstream for upstream in self.list_holders(digest) if self._ready_at(upstream, digest) <= now]

    def list_holders(self, digest: str) -> list[Upstream]:
        return [upstream for upstream in self.all if digest in upstream.announced]

    def list_announcers(self, digest: str) -> list[Upstream]:
        """The reachable upstreams that currently announce a version."""
        oldest = self.clock() - UNREACHABLE_S
        return [
            one for one in self.list_holders(digest) if one.unreachable_since is None or one.unreachable_since > oldest
        ]

    def find_pause(self, digest: str) -> float | None:
        """Seconds until an upstream can be asked for that version; None if no upstream holds it."""
        times = [self._ready_at(upstream, digest) for upstream in self.list_holders(digest)]
        return max(0.0, min(times) - self.clock()) if times else None

    def weigh_all(self) -> dict[Upstream, float]:
        """The weights used for the draw: the mean for unknown ones, and none below the floor."""
        known = [upstream.weight for upstream in self.all if upstream.weight is not None]
        mean = sum(known) / len(known) if known else 1.0
        plain = {one: mean * one.success if one.weight is None else one.weight for one in self.all}
        floor = FLOOR * max(plain.values()) or 1.0
        return {upstream: max(weight, floor) for upstream, weight in plain.items()}

    def record_success(self, upstream: Upstream, num_bytes: int, seconds: float) -> None:
        """Record a complete response."""
        upstream.num_cooled = 0
        upstream.success += ALPHA * (1.0 - upstream.success)
        if num_bytes >= _MEASURED_BYTES:
            self.record_rate(upstream, num_bytes, seconds)
        self._reset_weight(upstream)

    def record_rate(self, upstream: Upstream, num_bytes: int, seconds: float) -> None:
        """Record the rate of an upstream, whether its transfer was completed or not."""
        rate = num_bytes / max(seconds, 1e-6) * (1 + upstream.busy)
        upstream.rate = rate if upstream.rate is None else upstream.rate + ALPHA * (rate - upstream.rate)
        self._reset_weight(upstream)

    def record_failure(self, upstream: Upstream, reason: str, pause: float = 0.0) -> None:
        """Record a failed request: the upstream is paused, for twice as long after each further failure."""
        upstream.counts.failures += 1
        upstream.counts.reason = reason
        upstream.success -= ALPHA * upstream.success
        self._reset_weight(upstream)
        now = self.clock()
        if upstream.cool_until > now and not pause:
            return  # several requests that failed together count once
        shortest, longest = COOL_S
        upstream.cool_until = now + min(longest, max(pause, shortest * 2 ** min(upstream.num_cooled, 16)))
        upstream.num_cooled += 1

    def record_busy(self, upstream: Upstream, digest: str, reason: str, pause: float) -> None:
        """Record that it cannot send this version now: it is paused for it, slightly longer than it asked for."""
        upstream.counts.failures += 1
        upstream.counts.reason = reason
        until = self.clock() + min(COOL_S[1], max(pause, BUSY_S))
        upstream.bans = self._list_bans(upstream) | {digest: max(until, upstream.bans.get(digest, 0.0))}

    def record_list(self, upstream: Upstream) -> None:
        """Record that its list was read: it is reachable again."""
        upstream.listed, upstream.unreachable_since, upstream.num_cooled = True, None, 0

    def record_wrong(self, upstream: Upstream, digest: str, reason: str) -> None:
        """Record bytes that do not match the manifest: banned for that version, after `WRONG_LIMIT` for all."""
        upstream.counts.wrong += 1
        self.record_failure(upstream, reason)
        shortest, longest = BAN_S
        until = self.clock() + min(longest, shortest * 2 ** min(upstream.counts.wrong - 1, 16))
        upstream.bans = self._list_bans(upstream) | {digest: until}
        if upstream.counts.wrong >= WRONG_LIMIT:
            upstream.bans[""] = until

    def _list_bans(self, upstream: Upstream) -> dict[str, float]:
        return {held: end for held, end in upstream.bans.items() if end > self.clock()}

    def _ready_at(self, upstream: Upstream, digest: str) -> float:
        return max(upstream.cool_until, upstream.banned_until(digest))

    def _reset_weight(self, upstream: Upstream) -> None:
        if upstream.rate is not None:
            upstream.weight = upstream.success * upstream.rate
