"""Upstream servers as a client sees them, and the draw that spreads shards over them.

The weight of a source is its success rate times its rate in bytes per second, both exponential moving averages; a shard
goes to a source with probability proportional to weight / (1 + requests under way there). Greed would put every client
onto the same best server. The rate is that of all requests under way together: each of four gets a quarter of a link,
and would make a fast source look like a slow one.

Invariants:
- no weight is ever 0: a source that was bad once is tried again (`FLOOR`), and each draw that goes elsewhere lifts a
  weight that lies below the mean towards it (`HEAL`);
- a failure cools a source for a while, a wrong hash bans it for a longer while; both end by themselves, so that nothing
  a source does can stop a client for ever, and neither can an honest one with a single bad sector;
- only sources that announced a version are asked for it. When none does any more, the version is gone. One that has
  not answered for `LOST_S` is still asked, but announces nothing until it answers again.

Nothing here does I/O; the clock and the randomness are arguments.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from shoal.errors import ConfigError
from shoal.shardcast.http import Url, parse_url

ALPHA = 0.3
"""Share of the newest request in the moving averages."""
HEAL = 0.02
"""Share of the way to the mean by which a draw lifts the weights of those it passed over."""
FLOOR = 0.002
"""Smallest weight, as a share of the largest."""
BUSY_S = 0.5
"""How long a source that cannot give a version now is not asked for it."""
COOL_S = (0.25, 15.0)
"""First and longest pause after failures in a row."""
BAN_S = (5.0, 300.0)
"""First and longest pause after wrong bytes; each further wrong shard doubles it."""
WRONG_LIMIT = 3
"""Wrong shards after which a ban holds for every version and not for one."""
LOST_S = 10.0
"""How long a source may be unreachable before what it announced counts as announced no more."""
_MEASURED_BYTES = 1 << 14
"""Smaller answers say more about the latency than about the rate."""


@dataclass(slots=True)
class Tally:
    """What came of the requests to one source."""

    shards: int = 0
    """shards that arrived and were right"""
    bytes: int = 0
    """bytes of bodies received, right or not"""
    failures: int = 0
    """requests that ended in anything else"""
    wrong: int = 0
    """of these, bytes that were not what the manifest says"""
    reason: str = ""
    """the last failure in words"""


@dataclass(slots=True, eq=False)
class Source:
    """One upstream server: how it did so far and when it may be asked again."""

    url: Url
    success: float = 1.0
    rate: float | None = None
    weight: float | None = None
    """None until something was measured; the mean of the others stands in for it"""
    busy: int = 0
    """requests for shards under way"""
    cool_until: float = 0.0
    num_cooled: int = 0
    bans: dict[str, float] = field(default_factory=dict)
    """until when, by the digest of a version; the empty digest stands for all"""
    heads: set[str] = field(default_factory=set)
    """digests of the versions it announced and did not take back"""
    denied: bool = False
    """whether it turned us away for want of a ticket when it was last asked"""
    listed: bool = False
    """whether its list was read at least once"""
    lost_at: float | None = None
    """since when its list cannot be read; None if the last attempt went well, or the first is under way"""
    tally: Tally = field(default_factory=Tally)

    def __str__(self) -> str:
        return str(self.url)

    @property
    def heard(self) -> bool:
        """Whether its list was read, or an attempt to read it failed."""
        return self.listed or self.lost_at is not None

    def banned_until(self, digest: str) -> float:
        return max(self.bans.get(digest, 0.0), self.bans.get("", 0.0))


class SourceBook:
    """All sources of one client. One event loop uses it."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        alpha: float = ALPHA,
        heal: float = HEAL,
    ) -> None:
        self.sources = [Source(url) for url in dict.fromkeys(map(parse_url, urls))]
        if not self.sources:
            raise ConfigError("sources: at least one is needed, such as http://127.0.0.1:8600")
        self.clock = clock
        self._alpha = alpha
        self._heal = heal

    def draw(self, rng: random.Random, digest: str, avoid: Collection[Source] = ()) -> Source | None:
        """A source to ask for a shard of that version now, or None if all that hold it are cooling or banned.

        Those in `avoid` are taken only if there is no other.
        """
        ready = self.list_ready(digest)
        ready = [source for source in ready if source not in avoid] or ready
        if not ready:
            return None
        weights = self.weigh_all()
        drawn = rng.choices(ready, [weights[source] / (1 + source.busy) for source in ready])[0]
        self._lift_others(drawn, sum(weights.values()) / len(weights))
        return drawn

    def list_ready(self, digest: str) -> list[Source]:
        """The sources that hold a version and are neither cooling nor banned for it."""
        now = self.clock()
        return [source for source in self.list_holders(digest) if self._ready_at(source, digest) <= now]

    def list_holders(self, digest: str) -> list[Source]:
        return [source for source in self.sources if digest in source.heads]

    def list_announcers(self, digest: str) -> list[Source]:
        """The sources that announce a version at this moment: those that also answer."""
        oldest = self.clock() - LOST_S
        return [one for one in self.list_holders(digest) if one.lost_at is None or one.lost_at > oldest]

    def find_pause(self, digest: str) -> float | None:
        """Seconds until a source can be asked for that version; None if no source holds it."""
        times = [self._ready_at(source, digest) for source in self.list_holders(digest)]
        return max(0.0, min(times) - self.clock()) if times else None

    def weigh_all(self) -> dict[Source, float]:
        """The weights as the draw sees them: unknown ones at the mean, none below the floor."""
        known = [source.weight for source in self.sources if source.weight is not None]
        mean = sum(known) / len(known) if known else 1.0
        plain = {source: mean * source.success if source.weight is None else source.weight for source in self.sources}
        floor = FLOOR * max(plain.values()) or 1.0
        return {source: max(weight, floor) for source, weight in plain.items()}

    def record_success(self, source: Source, num_bytes: int, seconds: float) -> None:
        """A request was answered in full."""
        source.num_cooled = 0
        source.success += self._alpha * (1.0 - source.success)
        if num_bytes >= _MEASURED_BYTES:
            self.record_rate(source, num_bytes, seconds)
        self._reset_weight(source)

    def record_rate(self, source: Source, num_bytes: int, seconds: float) -> None:
        """How fast a source was, whether it came to an end or not."""
        rate = num_bytes / max(seconds, 1e-6) * (1 + source.busy)
        source.rate = rate if source.rate is None else source.rate + self._alpha * (rate - source.rate)
        self._reset_weight(source)

    def record_failure(self, source: Source, reason: str, pause: float = 0.0) -> None:
        """A request failed: the source is left alone for a while that doubles from failure to failure."""
        source.tally.failures += 1
        source.tally.reason = reason
        source.success -= self._alpha * source.success
        self._reset_weight(source)
        now = self.clock()
        if source.cool_until > now and not pause:
            return  # several requests that died together are one failure
        shortest, longest = COOL_S
        source.cool_until = now + min(longest, max(pause, shortest * 2 ** min(source.num_cooled, 16)))
        source.num_cooled += 1

    def record_busy(self, source: Source, digest: str, reason: str, pause: float) -> None:
        """It cannot give this version now: it is left alone for that one, a little longer than it asked for."""
        source.tally.failures += 1
        source.tally.reason = reason
        until = self.clock() + min(COOL_S[1], max(pause, BUSY_S))
        source.bans = self._list_bans(source) | {digest: max(until, source.bans.get(digest, 0.0))}

    def record_list(self, source: Source) -> None:
        """Its list was read: whatever failed before, it answers again."""
        source.listed, source.lost_at, source.num_cooled = True, None, 0

    def record_wrong(self, source: Source, digest: str, reason: str) -> None:
        """It sent bytes that are not what was signed: banned for that version, after `WRONG_LIMIT` for all."""
        source.tally.wrong += 1
        self.record_failure(source, reason)
        shortest, longest = BAN_S
        until = self.clock() + min(longest, shortest * 2 ** min(source.tally.wrong - 1, 16))
        source.bans = self._list_bans(source) | {digest: until}
        if source.tally.wrong >= WRONG_LIMIT:
            source.bans[""] = until

    def _list_bans(self, source: Source) -> dict[str, float]:
        return {held: end for held, end in source.bans.items() if end > self.clock()}

    def _ready_at(self, source: Source, digest: str) -> float:
        return max(source.cool_until, source.banned_until(digest))

    def _reset_weight(self, source: Source) -> None:
        if source.rate is not None:
            source.weight = source.success * source.rate

    def _lift_others(self, drawn: Source, mean: float) -> None:
        for source in self.sources:
            if source is not drawn and source.weight is not None and source.weight < mean:
                source.weight += self._heal * (mean - source.weight)
