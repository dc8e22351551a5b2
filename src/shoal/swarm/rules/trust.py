"""What a validator's record makes of it: a bet against its being honest, in whole points.

A verdict is graded when the truth is plain: by two other owners whose numbers leave no doubt, or by a canary. Graded
work is good or bad, and each owner of validators has two scores, one for each: who accepts everything is right about
all good work, and that is no evidence of anything.

    right: score - 1, not below 0        wrong: score + 14        from 20 on: limited        from 40 on: banned

With x = 4/3 the wealth x^score is that of a bet which multiplies by x^14 = 56.1 when a verdict is wrong and by 1/x when
it is right. For who is wrong with a probability of at most p = 1/250 that is fair or worse:

    p x^14 + (1 - p) / x = 0.9715 <= 1

Bound. Be n the verdicts graded so far. An honest owner's score reaches 40 with a probability of at most n / x^40, which
is n / 99,437, for each of the two scores.
Proof. A score that does not go below 0 is the largest log wealth of all bets that were begun at some time, so x^score
is at most their sum, R = (R + 1) M with M the factor above. E M <= 1, hence R_n - n is a supermartingale, E R_n <= n,
and by Doob's inequality P(max R >= A) <= E R_n / A <= n / A. []

That is the worst that p allows; what honest validators do is in docs/validation.md.
Who is wrong about more than one in fifteen of either kind gains points on average, so is found; who is always wrong
about one kind is limited by the second graded verdict of that kind and banned by the third.

Silence. To say `inconclusive` is never wrong, and who always says it is of no use: others are asked each time. So it is
held against what others could say of the same work, and nothing else:

    inconclusive on what was accepted by others: silence + 1        a clear verdict: silence - 1, not below 0
    from 32 on: limited, and the silence is halved. Nobody is banned for it, and no bond is burned

Where nobody has the weights nothing is accepted, and nothing counts. What was rejected does not count either: a
stranger could hand in what one reader is helpless against, but to be accepted it must work. A machine in trouble may be
silent 31 times in a row. Who is silent with a probability of at most q < 1/2, one time like the other, reaches 32
within n verdicts with a probability of at most n / x^32, x = (1 - q) / q, by the proof above: n / 1.8e15 at q = 1/4.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

RIGHT, WRONG = -1, 14
LIMITED_AT, BANNED_AT = 20, 40
"""Changing breaks: the bound above. Scores in the ledger are what the rule of their time made."""
SILENT_AT = 32
"""Changing breaks: what docs/validation.md states"""
MARGIN = 2.0
"""how far from its threshold a number must be to be plain: this many times it, or this part of it"""


class Side(StrEnum):
    """What the work turned out to be."""

    GOOD = "good"
    BAD = "bad"


def next_score(score: int, *, right: bool) -> int:
    """The score after one more graded verdict."""
    return max(0, score + (RIGHT if right else WRONG))


def undo_score(score: int, *, right: bool) -> int:
    """The score without a grade that turned out to be mistaken."""
    return max(0, score - (RIGHT if right else WRONG))


def next_silence(silence: int, *, speaks: bool) -> int:
    """The silence after one more verdict that counts."""
    return max(0, silence - 1) if speaks else silence + 1


def halve_silence(silence: int) -> int:
    """What is left of it when its owner was limited: enough to be limited sooner the next time."""
    return silence // 2


def is_sure(findings: Sequence[Mapping[str, Any]], *, accepts: bool) -> bool:
    """Whether the numbers of a verdict, as an event has them, are plain: all if it accepts, else one that failed."""
    plain = [
        is_plain(float(found["statistic"]), float(found["threshold"]), passed=accepts)
        for found in findings
        if accepts or not found["passed"]
    ]
    return all(plain) if accepts else any(plain)


def is_plain(statistic: float, threshold: float, *, passed: bool) -> bool:
    """Whether no honest validator could find the opposite: far within a threshold, or far beyond it.

    A threshold of 0 is a rule's, which is broken or not.
    """
    if threshold <= 0:
        return True
    return statistic * MARGIN <= threshold if passed else statistic >= MARGIN * threshold
