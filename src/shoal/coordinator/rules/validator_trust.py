"""A validator's record: a bet against its honesty, in integer points.

A verdict is graded when the truth is known: by two other owners whose numbers are unambiguous, or by a canary. Graded
work is good or bad, and each owner of validators has a score for each: a validator that accepts everything is right
about all good work, which is no evidence of honesty.

    right: score - 1, not below 0        wrong: score + 14        from 20 on: limited        from 40 on: banned

With x = 4/3 the wealth x^score is that of a bet which multiplies by x^14 = 56.1 when a verdict is wrong and by 1/x when
it is right. For a validator that is wrong with a probability of at most p = 1/250 the bet is fair or worse:

    p x^14 + (1 - p) / x = 0.9715 <= 1

Bound. Let n be the number of verdicts graded so far. An honest owner's score reaches 40 with a probability of at most
n / x^40, which is n / 99,437, for each of the two scores.
Proof. A score that does not go below 0 is the largest log wealth of all bets that were started at some time, so x^score
is at most their sum, R = (R + 1) M with M the factor above. E M <= 1, hence R_n - n is a supermartingale, E R_n <= n,
and by Doob's inequality P(max R >= A) <= E R_n / A <= n / A. []

This is the worst case that p allows; docs/validation.md states what honest validators do.
A validator that is wrong about more than one in fifteen of either kind gains points on average and is found; one that
is always wrong about one kind is limited by the second graded verdict of that kind and banned by the third.

Silence. The verdict `inconclusive` is never wrong, but a validator that always gives it is useless: others are asked
each time. So it is compared with what others could decide about the same work, and nothing else:

    inconclusive on work that others accepted: silence + 1        a clear verdict: silence - 1, not below 0
    from 32 on: limited, and the silence is halved. It leads neither to a ban nor to a burned bond

Where nobody has the weights nothing is accepted, and nothing counts. Rejected work does not count either: a stranger
could submit a file that one reader cannot handle, but to be accepted it must work. A machine with problems may be
silent 31 times in a row. A validator that is silent independently with a probability of at most q < 1/2 reaches 32
within n verdicts with a probability of at most n / x^32, x = (1 - q) / q, by the proof above: n / 1.8e15 at q = 1/4.

How many jobs a validator can lie in until it is found: the converse of the bound above.

Symbols, for the jobs that a liar gets: c the share that are canaries, b the share of other bad work, s the share of
accepted work that is judged a second time, r the same for rejected work. A wrong verdict is graded as wrong if two
other owners contradict it, or if it was on a canary. So for each job the chance h of a wrong grade is at least

    always accept    h = c + b s          first opinions only: a second opinion contradicts a rejection, and then h = 1
    always reject    h = c' + g r         c' canaries that are good, g = 1 - c - b the share of good work

A validator that always lies about one side is never right about it, so its score only grows: w = ceil(BANNED_AT /
WRONG) = 3 wrong grades ban it, and ceil(LIMITED_AT / WRONG) = 2 limit it. Grades are independent, because second
opinions are drawn with a secret and nothing distinguishes a canary before it is revealed. Reaching w wrong grades takes

    E n = w / h jobs on average, and n jobs with probability p where P(Binomial(n, h) >= w) >= p.

This needs three owners of validators: with two there is no majority. Canaries alone need no others.
"""

from collections.abc import Sequence
from enum import StrEnum

from shoal.protocol.messages import Finding

RIGHT, WRONG = -1, 14
LIMITED_AT, BANNED_AT = 20, 40
"""Changing breaks: the bound above. Scores in the ledger were computed with the rule of their time."""
SILENT_AT = 32
"""Changing breaks: what docs/validation.md states"""
MARGIN = 2.0
"""factor between a number and its threshold for the number to be unambiguous, on either side"""


class ActualOutcome(StrEnum):
    """What the work turned out to be."""

    GOOD = "good"
    BAD = "bad"


def next_score(score: int, *, right: bool) -> int:
    """The score after one more graded verdict."""
    return max(0, score + (RIGHT if right else WRONG))


def undo_score(score: int, *, right: bool) -> int:
    """The score without a grade that turned out to be wrong."""
    return max(0, score - (RIGHT if right else WRONG))


def next_silence(silence: int, *, speaks: bool) -> int:
    """The silence after one more verdict that counts."""
    return max(0, silence - 1) if speaks else silence + 1


def halve_silence(silence: int) -> int:
    """The silence that remains when its owner was limited: high enough to be limited sooner the next time."""
    return silence // 2


def is_sure(findings: Sequence[Finding], *, accepts: bool) -> bool:
    """Whether the numbers of a verdict are unambiguous: all of them if it accepts, otherwise one that failed."""
    plain = [
        is_plain(float(found.statistic), float(found.threshold), passed=accepts)
        for found in findings
        if accepts or not found.passed
    ]
    return all(plain) if accepts else any(plain)


def is_plain(statistic: float, threshold: float, *, passed: bool) -> bool:
    """Whether no honest validator could find the opposite: far within a threshold, or far beyond it.

    A threshold of 0 belongs to an exact rule, which is either broken or not.
    """
    if threshold <= 0:
        return True
    return statistic * MARGIN <= threshold if passed else statistic >= MARGIN * threshold
