"""Whether an owner's work is like everyone else's: evidence that grows group by group and is valid at any time.

A group of a version is a pure function of (run, step, index, version), its task is drawn by hash, and the node that
leases it does not know the result. So while all nodes are honest, the numbers of its groups (tokens, reward, mean
negative log-prob) come from one distribution, whoever generated them, fast or slow. Added to a bag in order of index,
each has a rank among those before it, ties broken by hash; these ranks are independent and uniform (a conformal test).
Divide the rank into 64 equal parts. A bet on part b with odds f(b), sum_b f(b) <= 64, has the wealth

    W <- (W + s_r) f(b)

where s_r is fresh money before the r-th bet, sum_r s_r <= 1, so that a change shows however late it comes. The drift of
stated from replayed log-probs depends on hardware and not on the task. There the bets are against the calibrated chance
m that an honest chunk exceeds a level, as in toploc/sequential_test.py: 1 + f (y / m - 1), y = 0 or 1. The mean over
all bets has an expectation of at most 1 at any time, and by Ville's inequality

    P(the mean ever reaches 1 / a) <= a.

Invariants:
- all arithmetic uses integers rounded down: everyone computes the same, and rounding never raises evidence;
- storage is bounded: a bag has at most `MAX_BAG` values and restarts when it is full, an owner has 40 numbers.

Changing breaks: every ledger that contains a watched owner.
"""

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal.protocol.params import MILLION

BINS = 64
DRAW_BITS = 64
"""bits of the number that breaks ties"""
MAX_BAG = 1024
LEAST_BAG = 3
"""minimum number of values for a rank to be meaningful"""
UNIT = 1 << 64
"""the integer that represents a wealth of 1"""
_ODDS_UNIT = 1 << 32
_MOST = UNIT << 48
"""maximum wealth of a bet: above every threshold"""
_MANTISSA = 64
MOST_EVIDENCE = 1 << 53


class DriftStream(StrEnum):
    """The quantities that are bet on."""

    LENGTH = "length"
    REWARD = "reward"
    ENTROPY = "entropy"
    DRIFT = "drift"


RANKED = (DriftStream.LENGTH, DriftStream.REWARD, DriftStream.ENTROPY)
"""in the order of a group's numbers"""


class DriftLevel(NamedTuple):
    """The number of checked chunks of one kind, and how many of them exceeded a level that honest chunks exceed with a
    chance of at most `chance` millionths."""

    level: int
    chance: int
    chunks: int
    above: int


def _tilt_odds(above: int, below: int) -> tuple[int, ...]:
    """Odds that grow by the factor above / below from each part to the next: a bet on a shift of the ranks."""
    weights = [above**part * below ** (BINS - 1 - part) for part in range(BINS)]
    return tuple(BINS * _ODDS_UNIT * weight // sum(weights) for weight in weights)


_RATIOS = ((65, 64), (33, 32), (17, 16), (5, 4))
"""for shifts of about 0.3, 0.6, 1.2 and more standard deviations; each in both directions"""
_RISING = tuple(_tilt_odds(above, below) for above, below in _RATIOS)
ODDS = (*_RISING, *(odds[::-1] for odds in _RISING))
BY_PART = tuple(zip(*ODDS, strict=True))
"""the odds of each bet, by part"""
FRACTIONS = ((1, 20), (1, 5), (1, 2), (9, 10))
"""fractions of the wealth that are bet on a level being exceeded"""
NUM_LEVELS = 4
_NUM_BETS = {stream: len(ODDS) for stream in RANKED} | {DriftStream.DRIFT: NUM_LEVELS * len(FRACTIONS)}


class PopulationSamples:
    """The numbers of a version's groups so far, sorted, for each stream."""

    def __init__(self, values: Sequence[Sequence[int]] = ((), (), ())) -> None:
        self.values = [list(own) for own in values]

    def place(self, numbers: Sequence[int], draws: Sequence[int]) -> tuple[int, ...] | None:
        """Add a group's numbers to the bag; return the parts they fall into, or None if there were too few values."""
        size = len(self.values[0])
        if size == MAX_BAG:
            self.values, size = [[] for _ in RANKED], 0
        parts = tuple(map(_find_part, self.values, numbers, draws))
        for own, number in zip(self.values, numbers, strict=True):
            insort(own, number)
        return parts if size >= LEAST_BAG else None


@dataclass(slots=True)
class DriftEvidence:
    """The wealth of the bets on one owner's work."""

    groups: int = 0
    submissions: int = 0
    """submissions whose drift was bet on"""
    wealth: dict[DriftStream, list[int]] = field(
        default_factory=lambda: {name: [0] * _NUM_BETS[name] for name in DriftStream}
    )
    peak: int = 0
    """largest mean wealth so far, in millionths: the quantity that Ville's inequality bounds"""
    leader: str = ""
    """the stream with the largest wealth at that time"""

    def weigh_group(self, parts: Sequence[int]) -> None:
        """Bet on the ranks of one more group."""
        self.groups += 1
        stake = stake_money(self.groups)
        for stream, part in zip(RANKED, parts, strict=True):
            pays = BY_PART[part]
            own = self.wealth[stream]
            self.wealth[stream] = [
                min((held + stake) * pay // _ODDS_UNIT, _MOST) for held, pay in zip(own, pays, strict=True)
            ]
        self._note_peak()

    def weigh_drift(self, levels: Sequence[DriftLevel]) -> None:
        """Bet on the drift of one more submission."""
        self.submissions += 1
        stake = stake_money(self.submissions)
        wealth = [held + stake for held in self.wealth[DriftStream.DRIFT]]
        for counted in levels:
            for place, fraction in enumerate(FRACTIONS, start=counted.level * len(FRACTIONS)):
                wealth[place] = _bet_chunks(wealth[place], fraction, counted)
        self.wealth[DriftStream.DRIFT] = wealth
        self._note_peak()

    def to_text(self) -> str:
        """The wealth in the form that is stored."""
        return json.dumps([self.wealth[stream] for stream in DriftStream], separators=(",", ":"))

    def _note_peak(self) -> None:
        means = {stream: sum(own) // len(own) for stream, own in self.wealth.items()}
        found = min(sum(means.values()) // len(means) * MILLION // UNIT, MOST_EVIDENCE)
        if found > self.peak:
            self.peak, self.leader = found, str(max(means, key=means.__getitem__))


def read_wealth(text: str) -> dict[DriftStream, list[int]]:
    """Parse what `to_text` wrote."""
    return dict(zip(DriftStream, json.loads(text), strict=True))


def stake_money(number: int) -> int:
    """s_r for r = 1, 2, ...: the block of 2^j values that starts at 2^j shares 1 / ((j + 1) (j + 2)); all sum to 1."""
    block = number.bit_length() - 1
    return (UNIT >> block) // ((block + 1) * (block + 2))


def line_evidence(rate: int) -> int:
    """The evidence in millionths at which an owner is watched; an honest owner ever reaches it with a chance of `rate`
    millionths."""
    assert rate > 0, "a rate of 0 has no threshold"
    return -(-MILLION * MILLION // rate)


def read_draws(digest: bytes) -> tuple[int, ...]:
    """The numbers that break ties, derived from a hash."""
    size = DRAW_BITS // 8
    return tuple(int.from_bytes(digest[size * place : size * (place + 1)], "big") for place in range(len(RANKED)))


def _find_part(sorted_values: Sequence[int], number: int, draw: int) -> int:
    """Which of `BINS` equal parts contains the rank of a number among the values and itself; `draw` breaks ties."""
    less = bisect_left(sorted_values, number)
    equal = bisect_right(sorted_values, number, lo=less) - less + 1
    return BINS * ((less << DRAW_BITS) + draw * equal) // ((len(sorted_values) + 1) << DRAW_BITS)


def _bet_chunks(held: int, fraction: tuple[int, int], counted: DriftLevel) -> int:
    """Wealth after a bet on each of some chunks: the product of their odds, independent of order."""
    part, whole = fraction
    miss = (whole - part) * _ODDS_UNIT // whole
    hit = miss + part * MILLION * _ODDS_UNIT // (whole * counted.chance)
    exponent = -32 * counted.chunks
    for odds, times in ((hit, counted.above), (miss, counted.chunks - counted.above)):
        power, shift = _raise_odds(odds, times)
        held, exponent = held * power, exponent + shift
    if held and held.bit_length() + exponent > _MOST.bit_length():  # before shifting: the exponent may be large
        return _MOST
    return min(held << exponent if exponent > 0 else held >> -exponent, _MOST)


def _raise_odds(odds: int, times: int) -> tuple[int, int]:
    """(m, e) with m 2^e at most odds^times and m short: 10,000 chunks cost little more than a few."""
    found, shift, base, rise = 1, 0, odds, 0
    while times:
        if times & 1:
            found, shift = _shorten(found * base, shift + rise)
        base, rise = _shorten(base * base, 2 * rise)
        times >>= 1
    return found, shift


def _shorten(number: int, shift: int) -> tuple[int, int]:
    surplus = max(0, number.bit_length() - _MANTISSA)
    return number >> surplus, shift + surplus
