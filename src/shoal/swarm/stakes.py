"""What the dial comes to: how much is replayed by standing, what that costs, and what a cheat can expect to gain.

All amounts are in pays of one submission. Who cheats in a submission throughout is found with probability D (see
dial.py) and then convicted, which burns L: what is held back of its pay, its bond, and the price of an identity.

    gain = (1 - D) - D L,     negative if and only if L > (1 - D) / D

Who cheats in a share x of the rollouts gains x of the pay, is found with probability x D or more and loses L and the
whole pay: at most x times as much. So the sign is the same, and the gain largest, for whole submissions.
"""

from collections.abc import Iterator
from typing import NamedTuple

from shoal.swarm.messages import Standing
from shoal.swarm.params import MILLION, RunParams, count_drawn
from shoal.swarm.rules.dial import count_submissions, detect_cheat, show_share

STANDINGS = (Standing.PROBATION, Standing.GOOD, Standing.TRUSTED)
NAMES = {Standing.PROBATION: "new", Standing.GOOD: "good", Standing.TRUSTED: "trusted"}
JOIN_WORK = 1 << 22
JOIN_S = 5.0
"""what joining takes on one core at `JOIN_WORK` hashes"""
COST_TOKENS = 512
"""of the answers that the costs are for"""
COST_FILE, COST_READ, COST_REPLAY = 0.14, 0.004, 0.37
"""CPU of a validator in rollouts generated: to open a submission, to read a rollout and derive it again, to replay it.
By bench/checking.py, about the worst of a small and a larger model; docs/validation.md has the table."""
CONVICTIONS = 2
"""owners of validators that it takes to convict"""


class Rate(NamedTuple):
    """How one standing is checked."""

    standing: Standing
    rollouts: int
    """in a submission of the usual size"""
    checked: int
    """of them"""
    least: int
    """rollouts that are replayed of the smallest submission, one group"""
    within: int
    """submissions within which the guarantee's fraction is caught with its probability"""

    @property
    def share(self) -> float:
        """q"""
        return self.checked / self.rollouts

    @property
    def cost(self) -> float:
        """Of checking, as a share of generation, if answers have `COST_TOKENS` tokens."""
        return COST_FILE / self.rollouts + COST_READ + COST_REPLAY * self.share


def list_rates(params: RunParams) -> list[Rate]:
    """How each standing is checked."""
    return [_rate_standing(params, standing) for standing in STANDINGS]


def expect_gain(params: RunParams, standing: Standing, *, join_work: int = JOIN_WORK) -> float:
    """What cheating in one submission brings, in pays of a submission; of the sizes that a lease may have the best."""
    price = price_identity(params, join_work)
    return max(
        _expect_one(params, standing, count * params.group_size, price) for count in {1, params.groups_per_lease}
    )


def price_identity(params: RunParams, join_work: int) -> float:
    """What joining anew costs, against the longest that a submission may take on one core."""
    return JOIN_S * join_work / JOIN_WORK / params.lease_max_s


def count_burned(params: RunParams, standing: Standing) -> float:
    """What a conviction burns of an owner that has just reached a standing: bond and held pay."""
    if len(params.validators) < CONVICTIONS:
        return 0.0  # nobody is convicted
    accepted = {Standing.GOOD: params.good_after, Standing.TRUSTED: params.trusted_after}.get(standing, 0)
    bond = min(accepted, params.stake_submissions)
    held = min(accepted - bond, params.hold_submissions)
    return bond * params.slash_share / MILLION + held


def list_warnings(params: RunParams, *, join_work: int = JOIN_WORK) -> Iterator[str]:
    """Parameters with which cheating pays."""
    if len(params.validators) < CONVICTIONS:
        yield "there is one validator: nobody can be convicted, and a cheat loses no more than what is found"
        return
    for standing in STANDINGS:
        gain = expect_gain(params, standing, join_work=join_work)
        if gain > 0.0:
            cure = "group_size or join_work" if standing is Standing.PROBATION else "stake_submissions or slash_share"
            told = f"cheating pays for {NAMES[standing]} owners: {show_share(gain)} of a submission's pay at each try"
            yield f"{told}; raise {cure}"


def describe_dial(params: RunParams) -> tuple[str, ...]:
    """The dial in words, a line for the promise and one for each standing."""
    promise = params.guarantee
    head = (
        f"cheating in {show_share(promise.fraction)} of the work is caught within {promise.submissions} submissions "
        f"with probability {promise.probability:g}, if a replay finds a cheated rollout with {params.power:g}"
    )
    return (head, *(_describe_rate(rate) for rate in list_rates(params)))


def _describe_rate(rate: Rate) -> str:
    who = f"{NAMES[rate.standing]}: {show_share(rate.share)} replayed ({rate.checked} of {rate.rollouts} rollouts"
    least = f", never fewer than {rate.least}" if rate.least < rate.checked else ""
    cost = f"costs {show_share(rate.cost)} of generation at {COST_TOKENS} tokens"
    return f"{who}{least}), caught within {rate.within}, {cost}"


def _rate_standing(params: RunParams, standing: Standing) -> Rate:
    rollouts, promise = params.groups_per_lease * params.group_size, params.guarantee
    checked = count_drawn(params.check_share(standing, rollouts), rollouts)
    least = count_drawn(params.check_share(standing, params.group_size), params.group_size)
    detection = detect_cheat(min(checked, least), params.power)
    within = count_submissions(promise.fraction, promise.probability, detection)
    return Rate(standing, rollouts, checked, least, within)


def _expect_one(params: RunParams, standing: Standing, rollouts: int, price: float) -> float:
    found = detect_cheat(count_drawn(params.check_share(standing, rollouts), rollouts), params.power)
    return (1.0 - found) - found * (count_burned(params, standing) + price)
