"""The dial: from what a run promises about cheats to how many rollouts of a submission are replayed.

Symbols: R rollouts in a submission, m of them replayed, drawn after it was committed; q = m / R the check rate; d the
power, the chance that a cheated rollout is found when it is replayed. The promise is (f, n, p): an owner that cheats in
a fraction f of its submissions, or of the rollouts of each, is caught within n submissions with probability p.

    D(m) = 1 - (1 - d)^m                 a submission that is cheated throughout is found
    P(caught within n) >= 1 - (1 - f D)^n

However the fraction is spread. Of a submission with a share x cheated, g(x) = 1 - (1 - x d)^m or more is the chance to
be found (draws without repetition are the better ones). g is concave and g(0) = 0, so g(x) >= x g(1) = x D; and with
shares x_1 .. x_n whose mean is f, prod (1 - g(x_i)) <= prod (1 - x_i D) <= (1 - f D)^n, the last by the inequality of
arithmetic and geometric means. The bound is met by who cheats throughout in submissions chosen by a coin of chance f:
cheating pays best in lumps, and the dial reckons with that.

Invariants:
- m is the least number that keeps the promise, and at least one;
- this module imports nothing of the swarm and no torch: parameters, commands and the validator all use it.
"""

import math
from typing import Annotated

from pydantic import Field

from shoal.config import Settings
from shoal.errors import ConfigError

Part = Annotated[float, Field(ge=1e-6, le=1.0)]
Chance = Annotated[float, Field(ge=1e-6, le=1.0 - 1e-6)]
"""whole millionths: that is what a ledger holds"""
MAX_SUBMISSIONS = 100_000
GOOD_SHARE = 2
"""An owner in good standing is held to the promise in n / GOOD_SHARE submissions: what it can have cheated when it is
caught is that much less than what one with a long record can."""


class Guarantee(Settings):
    """What a run promises: who cheats in a fraction of its work is caught within so many submissions."""

    fraction: Part = 0.1
    """f: share of its submissions in which an owner cheats, or of the rollouts of each"""
    submissions: Annotated[int, Field(ge=1, le=MAX_SUBMISSIONS)] = 100
    """n: of a trusted owner, within which it is caught; of one in good standing half as many"""
    probability: Chance = 0.99
    """p: with which it is"""


class ValidationConfig(Settings):
    """How much of what is handed in is checked."""

    guarantee: Guarantee = Guarantee()
    power: Part = 0.75
    """d: chance that a cheated rollout is found when it is replayed; docs/separation.md has it for each attack"""


def detect_cheat(checked: int, power: float) -> float:
    """D: the chance that a submission which is cheated throughout is found by replaying so many of its rollouts."""
    return -math.expm1(checked * math.log1p(-power)) if power < 1.0 else float(checked > 0)


def catch_owner(fraction: float, submissions: int, detection: float) -> float:
    """The chance, at least, that who cheats in a fraction of its work is caught within so many submissions."""
    missed = 1.0 - fraction * detection
    return -math.expm1(submissions * math.log(missed)) if missed > 0.0 else 1.0


def count_submissions(fraction: float, probability: float, detection: float) -> int:
    """n: the least number of submissions within which that chance is `probability`; for a detection above zero."""
    missed = 1.0 - fraction * detection
    number = max(1, math.floor(math.log1p(-probability) / math.log(missed))) if missed > 0.0 else 1
    while catch_owner(fraction, number, detection) < probability:
        number += 1
    return number


def count_checked(guarantee: Guarantee, power: float, rollouts: int) -> int | None:
    """m: the least number of a submission's rollouts that keeps a promise; None if all of them do not."""
    numbers = range(1, rollouts + 1)
    return next((number for number in numbers if keeps_promise(guarantee, power, number)), None)


def keeps_promise(guarantee: Guarantee, power: float, checked: int) -> bool:
    """Whether replaying so many rollouts of each submission keeps a promise."""
    chance = catch_owner(guarantee.fraction, guarantee.submissions, detect_cheat(checked, power))
    return chance >= guarantee.probability


def hasten(guarantee: Guarantee) -> Guarantee:
    """The promise on an owner in good standing."""
    return guarantee.model_copy(update={"submissions": -(-guarantee.submissions // GOOD_SHARE)})


def check_guarantee(guarantee: Guarantee, power: float, rollouts: int) -> None:
    """Refuse a promise that cannot be kept by replaying all rollouts of a submission; the smallest one is one group."""
    if keeps_promise(guarantee, power, rollouts):
        return
    raise ConfigError(
        f"validation.guarantee: cheating in {show_share(guarantee.fraction)} of the work is not caught within "
        f"{guarantee.submissions} submissions with probability {guarantee.probability:g} even if all {rollouts} "
        f"rollouts of the smallest submission are replayed; it would be with {_list_ways(guarantee, power, rollouts)}"
    )


def _list_ways(guarantee: Guarantee, power: float, rollouts: int) -> str:
    """What could be promised instead, one number changed."""
    fraction, submissions, probability = guarantee.fraction, guarantee.submissions, guarantee.probability
    detection = detect_cheat(rollouts, power)
    ways = [f"submissions = {count_submissions(fraction, probability, detection)}"]
    if (reached := _round_down(catch_owner(fraction, submissions, detection))) > 0.0:
        ways.append(f"probability = {reached:g}")
    least = -math.expm1(math.log1p(-probability) / submissions) / detection
    if (larger := math.ceil(1e4 * least) / 1e4) <= 1.0:
        ways.append(f"fraction = {larger:g}")
    return " or ".join(ways)


def _round_down(value: float) -> float:
    return math.floor(1e4 * value) / 1e4


def show_share(value: float) -> str:
    """A share in per cent, in as few digits as it takes."""
    return f"{100 * value:.3g} %"
