"""Odds of several rollouts against a rival (toploc/rivals.py), for assumed shares of cheated ones. Without torch."""

import math
from collections.abc import Sequence

SHARES = (0.1, 0.3, 1.0)
"""Shares of cheated rollouts for which odds are stated. Changing breaks: the odds of every verdict."""
MAX_ODDS = 10**15
"""largest odds that are stated, in millionths; a conviction needs fewer"""
_MILLION = 1_000_000
_MOST_NATS = 50.0


def mix_odds(log_odds: float, share: float) -> float:
    """The logarithm of 1 - x + x E: the odds of a rollout of an owner that cheats in a share x of them."""
    if share >= 1.0:
        return log_odds
    high = max(0.0, log_odds)
    return high + math.log((1.0 - share) * math.exp(-high) + share * math.exp(log_odds - high))


def sum_odds(rollouts: Sequence[float], share: float) -> float:
    """The logarithm of the odds of several rollouts, of which a share is cheated, from theirs."""
    return math.fsum(mix_odds(log_odds, share) for log_odds in rollouts)


def spell_odds(log_odds: float) -> int:
    """Odds in millionths, rounded down."""
    return min(MAX_ODDS, math.floor(_MILLION * math.exp(min(log_odds, _MOST_NATS))))
