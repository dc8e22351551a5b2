"""How much of what a peer says it trained on is believed.

Symbols: c_i tokens that peer i claims in this round, R_i the median of what was believed of it in its last rounds,
M the lower median of all c_j of this round, f the factor (2).

    weight_i = min(c_i, f M, f R_i)        without the last term for a peer that has no record yet

Nobody can prove how many tokens it read, so a claim is worth as much as the peer's own record and the others' claims
make likely. With a minority of liars M is at most an honest claim, so a liar among k peers has at most the share
f / (f + k - 1) of the weight, whatever it says; and a record built on low claims cannot be cashed in at once.
"""

from collections.abc import Mapping, Sequence


def cap_claims(claims: Mapping[str, int], records: Mapping[str, Sequence[int]], factor: float) -> dict[str, int]:
    """The weight of each peer, at least 1."""
    if not claims:
        return {}
    ceiling = factor * find_median(list(claims.values()))
    weights = {}
    for peer, claim in claims.items():
        record = records.get(peer)
        limit = min(ceiling, factor * find_median(record)) if record else ceiling
        weights[peer] = max(1, min(claim, int(limit)))
    return weights


def find_median(values: Sequence[int]) -> int:
    """The lower of the two in the middle, where there are two."""
    return sorted(values)[(len(values) - 1) // 2]
