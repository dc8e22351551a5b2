"""What the check rate implies: how much is replayed by standing, its cost, and a cheat's expected gain.

All amounts are in units of the pay of one submission. An owner that cheats on all rollouts of a submission is detected
with probability D (see protocol/check_rate.py) and then convicted, which burns L: its held pay, its bond, and the price
of an identity.

    gain = (1 - D) - D L,     negative if and only if L > (1 - D) / D

An owner that cheats on a share x of the rollouts gains x of the pay, is detected with probability at least x D and
loses L and the whole pay: at most x times as much. So the sign is the same, and the gain is largest for whole
submissions.
"""

from collections.abc import Iterator
from typing import NamedTuple

from shoal.protocol.check_rate import count_submissions, detect_cheat, show_share
from shoal.protocol.messages import Standing
from shoal.protocol.params import MILLION, RunParams, count_drawn

STANDINGS = (Standing.PROBATION, Standing.GOOD, Standing.TRUSTED)
JOIN_WORK = 1 << 22
JOIN_S = 5.0
"""seconds that joining takes on one core at `JOIN_WORK` hashes"""
COST_TOKENS = 512
"""length of the answers for which costs are stated"""
COST_FILE, COST_READ, COST_REPLAY = 0.14, 0.004, 0.37
"""CPU time of a validator in units of one generated rollout: to open a submission, to parse and rederive a rollout, to
replay it. Measured by bench/checking.py, about the worst of a small and a larger model; table in docs/validation.md."""
CONVICTIONS = 2
"""validator owners required for a conviction"""


class CheckRate(NamedTuple):
    """How the work of one standing is checked."""

    standing: Standing
    rollouts: int
    """in a submission of the usual size"""
    checked: int
    """of them"""
    least: int
    """rollouts replayed of the smallest submission, one group"""
    within: int
    """submissions within which the guarantee's fraction is caught with its probability"""

    @property
    def share(self) -> float:
        """q"""
        return self.checked / self.rollouts

    @property
    def cost(self) -> float:
        """Cost of checking as a share of generation, for answers of `COST_TOKENS` tokens."""
        return COST_FILE / self.rollouts + COST_READ + COST_REPLAY * self.share


def list_rates(params: RunParams) -> list[CheckRate]:
    """How the work of each standing is checked."""
    return [_rate_standing(params, standing) for standing in STANDINGS]


def expect_gain(params: RunParams, standing: Standing, *, join_work: int = JOIN_WORK) -> float:
    """Expected gain of cheating in one submission, in pays; the best over the submission sizes that a lease allows."""
    lost = count_burned(params, standing) + price_identity(params, join_work)
    sizes = params.group_size, params.most_per_lease * params.group_size
    drawn = [count_drawn(params.check_share(standing, rollouts), rollouts) for rollouts in sizes]
    found = [detect_cheat(checked, params.power, params.evidence) for checked in drawn]
    return max((1.0 - chance) - chance * lost for chance in found)


def price_identity(params: RunParams, join_work: int) -> float:
    """The cost of joining again, relative to the longest time that a submission may take on one core."""
    return JOIN_S * join_work / JOIN_WORK / params.lease_max_s


def count_burned(params: RunParams, standing: Standing) -> float:
    """What a conviction burns of an owner that has just reached a standing: bond and held pay."""
    if len(params.validators) < CONVICTIONS:
        return 0.0  # nobody can be convicted
    accepted = {Standing.GOOD: params.good_after, Standing.TRUSTED: params.trusted_after}.get(standing, 0)
    bond = min(accepted, params.stake_submissions)
    held = min(accepted - bond, params.hold_submissions)
    return bond * params.slash_share / MILLION + held


def list_warnings(params: RunParams, *, join_work: int = JOIN_WORK) -> Iterator[str]:
    """Warnings about parameters with which cheating pays."""
    if len(params.validators) < CONVICTIONS:
        if params.validators:
            yield "there is only one validator: nobody can be convicted, a cheat loses only the work that is detected"
        else:
            yield "there is no validator: nothing can be judged, so no step gets its groups; set params.validators"
        return
    for standing in STANDINGS:
        gain = expect_gain(params, standing, join_work=join_work)
        if gain > 0.0:
            cure = "group_size or join_work" if standing is Standing.PROBATION else "stake_submissions or slash_share"
            pays = f"{show_share(gain)} of a submission's pay per attempt"
            yield f"cheating pays for owners with standing {standing.value}: {pays}; raise {cure}"


def describe_check_rate(params: RunParams) -> tuple[str, ...]:
    """The check rate as text: a line for the guarantee and one for each standing."""
    promise = params.guarantee
    head = (
        f"cheating in {show_share(promise.fraction)} of the work is caught within {promise.submissions} submissions "
        f"with probability {promise.probability:g}, if replaying a cheated rollout detects it with probability "
        f"{params.power:g}"
    )
    return (head, *(_describe_rate(rate) for rate in list_rates(params)))


def _describe_rate(rate: CheckRate) -> str:
    who = f"{rate.standing.value}: {show_share(rate.share)} replayed ({rate.checked} of {rate.rollouts} rollouts"
    least = f", never fewer than {rate.least}" if rate.least < rate.checked else ""
    cost = f"costs {show_share(rate.cost)} of generation at {COST_TOKENS} tokens"
    return f"{who}{least}), caught within {rate.within} submissions, {cost}"


def _rate_standing(params: RunParams, standing: Standing) -> CheckRate:
    rollouts, promise = (params.groups_per_lease or 1) * params.group_size, params.guarantee
    checked = count_drawn(params.check_share(standing, rollouts), rollouts)
    least = count_drawn(params.check_share(standing, params.group_size), params.group_size)
    detection = detect_cheat(min(checked, least), params.power)
    within = count_submissions(promise.fraction, promise.probability, detection)
    return CheckRate(standing, rollouts, checked, least, within)
