"""Check rate: from a run's detection guarantee to the number of rollouts replayed per submission.

Symbols: R rollouts in a submission, m of them replayed, drawn after it was committed; q = m / R the check rate; d the
power, the chance that replaying a cheated rollout detects it. The guarantee is (f, n, p): an owner that cheats in a
fraction f of its submissions, or of the rollouts of each, is caught within n submissions with probability p.

    D(m) = 1 - (1 - d)^m                 detection of a submission in which every rollout is cheated
    P(caught within n) >= 1 - (1 - f D)^n

This holds however the fraction is spread. A submission with a share x of cheated rollouts is detected with probability
at least g(x) = 1 - (1 - x d)^m (drawing without replacement is better). g is concave and g(0) = 0, so
g(x) >= x g(1) = x D; and for shares x_1 .. x_n with mean f, prod (1 - g(x_i)) <= prod (1 - x_i D) <= (1 - f D)^n, the
last step by the inequality of arithmetic and geometric means. The bound is tight for an owner that cheats on all
rollouts of submissions chosen with probability f: cheating in whole submissions is the best strategy, and the rate
assumes it.

Invariants:
- m is the smallest number that meets the guarantee, and at least one;
- this module imports nothing of the swarm and no torch: parameters, commands and the validator all use it.
"""

import math
from typing import Annotated

from pydantic import Field

from shoal.config.run import Settings
from shoal.errors import ConfigError

Part = Annotated[float, Field(ge=1e-6, le=1.0)]
Chance = Annotated[float, Field(ge=1e-6, le=1.0 - 1e-6)]
"""integer millionths, because a ledger holds no floats"""
MAX_SUBMISSIONS = 100_000
GOOD_SHARE = 2
"""An owner in good standing must be caught within n / GOOD_SHARE submissions: it can have cheated that much less than
an owner with a long record when it is caught."""


class Guarantee(Settings):
    """The detection guarantee: an owner that cheats in a fraction of its work is caught within some submissions."""

    fraction: Part = 0.1
    """f: share of its submissions in which an owner cheats, or of the rollouts of each"""
    submissions: Annotated[int, Field(ge=1, le=MAX_SUBMISSIONS)] = 100
    """n: submissions within which a trusted owner is caught; an owner in good standing within half as many"""
    probability: Chance = 0.99
    """p: probability of being caught"""


class ValidationConfig(Settings):
    """How much of the submitted work is checked."""

    guarantee: Guarantee = Guarantee()
    power: Part = 0.75
    """d: chance that replaying a cheated rollout detects it; docs/separation.md lists it for each attack"""


def detect_cheat(checked: int, power: float) -> float:
    """D: the chance that replaying so many rollouts detects a submission in which every rollout is cheated."""
    return -math.expm1(checked * math.log1p(-power)) if power < 1.0 else float(checked > 0)


def catch_owner(fraction: float, submissions: int, detection: float) -> float:
    """Lower bound of the chance to catch an owner that cheats in a fraction of its work within so many submissions."""
    missed = 1.0 - fraction * detection
    return -math.expm1(submissions * math.log(missed)) if missed > 0.0 else 1.0


def count_submissions(fraction: float, probability: float, detection: float) -> int:
    """n: the smallest number of submissions within which that chance is `probability`; needs a detection above zero."""
    missed = 1.0 - fraction * detection
    number = max(1, math.floor(math.log1p(-probability) / math.log(missed))) if missed > 0.0 else 1
    while catch_owner(fraction, number, detection) < probability:
        number += 1
    return number


def count_checked(guarantee: Guarantee, power: float, rollouts: int) -> int | None:
    """m: the smallest number of replayed rollouts that meets the guarantee; None if even replaying all does not."""
    numbers = range(1, rollouts + 1)
    return next((number for number in numbers if keeps_promise(guarantee, power, number)), None)


def keeps_promise(guarantee: Guarantee, power: float, checked: int) -> bool:
    """Whether replaying so many rollouts of each submission meets the guarantee."""
    chance = catch_owner(guarantee.fraction, guarantee.submissions, detect_cheat(checked, power))
    return chance >= guarantee.probability


def hasten(guarantee: Guarantee) -> Guarantee:
    """The guarantee for an owner in good standing."""
    return guarantee.model_copy(update={"submissions": -(-guarantee.submissions // GOOD_SHARE)})


def check_guarantee(guarantee: Guarantee, power: float, rollouts: int) -> None:
    """Reject a guarantee that replaying all rollouts of the smallest submission (one group) does not meet."""
    if keeps_promise(guarantee, power, rollouts):
        return
    raise ConfigError(
        f"validation.guarantee: cheating in {show_share(guarantee.fraction)} of the work is not caught within "
        f"{guarantee.submissions} submissions with probability {guarantee.probability:g} even if all {rollouts} "
        f"rollouts of the smallest submission are replayed; possible values: {_list_ways(guarantee, power, rollouts)}"
    )


def _list_ways(guarantee: Guarantee, power: float, rollouts: int) -> str:
    """The guarantees that would be possible, each with one number changed."""
    fraction, submissions, probability = guarantee.fraction, guarantee.submissions, guarantee.probability
    detection = detect_cheat(rollouts, power)
    ways = [f"submissions = {count_submissions(fraction, probability, detection)}"]
    if (reached := math.floor(1e4 * catch_owner(fraction, submissions, detection)) / 1e4) > 0.0:
        ways.append(f"probability = {reached:g}")
    least = -math.expm1(math.log1p(-probability) / submissions) / detection
    larger = math.ceil(1e4 * least) / 1e4
    if catch_owner(min(larger, 1.0), submissions, detection) >= probability:
        ways.append(f"fraction = {min(larger, 1.0):g}")
    return " or ".join(ways)


def show_share(value: float) -> str:
    """Format a share in per cent, with as few digits as possible."""
    return f"{100 * value:.3g} %"
