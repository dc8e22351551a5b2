"""How many jobs a validator can lie in until it is found: the other side of rules/trust.py.

Symbols, of the jobs that a liar gets: c the share that are canaries, b the share of bad work beside them, s the share
of accepted work that is judged a second time, r the same of rejected work. A verdict that is wrong is graded so if two
other owners contradict it, or if it was on a canary. So for each job the chance h of a wrong grade is at least

    always accept    h = c + b s          first opinions only: as a second one it contradicts a rejection, and that is 1
    always reject    h = c' + g r         c' canaries that are good, g = 1 - c - b the share of good work

Who always lies about one side is never right about it, so its score only grows: w = ceil(BANNED_AT / WRONG) = 3 wrong
grades ban it, and ceil(LIMITED_AT / WRONG) = 2 limit it. Grades are independent, for second opinions are drawn by a
secret and nothing tells a canary from others before it is revealed. Until there are w wrong grades it takes

    E n = w / h jobs on average, and n jobs with probability p where P(Binomial(n, h) >= w) >= p.

It takes three owners of validators: with two nobody is in the majority. Canaries alone need no others.
"""

import math

from shoal.swarm.rules.trust import BANNED_AT, LIMITED_AT, WRONG

BANNED_BY, LIMITED_BY = -(-BANNED_AT // WRONG), -(-LIMITED_AT // WRONG)
"""wrong grades of one side without a right one"""


def expose_accepting(*, canaries: float, bad: float, second_share: float) -> float:
    """h of who accepts everything, at least."""
    return canaries + bad * second_share


def expose_rejecting(*, good: float, reject_share: float, canaries: float = 0.0) -> float:
    """h of who rejects everything; `canaries` are those whose work is good."""
    return canaries + good * reject_share


def find_liar(chance: float, jobs: int, wrongs: int = BANNED_BY) -> float:
    """The probability of so many wrong grades within so many jobs."""
    odds = [math.comb(jobs, number) * chance**number * (1.0 - chance) ** (jobs - number) for number in range(wrongs)]
    return max(0.0, 1.0 - sum(odds))


def count_jobs(chance: float, probability: float, wrongs: int = BANNED_BY) -> int:
    """The least number of jobs within which a liar has so many wrong grades with a probability."""
    assert 0.0 < chance <= 1.0 and 0.0 < probability < 1.0, "who is never graded is never found"
    low, high = wrongs, wrongs
    while find_liar(chance, high, wrongs) < probability:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if find_liar(chance, middle, wrongs) >= probability else (middle + 1, high)
    return low
