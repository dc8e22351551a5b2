"""Check rate: from a run's detection guarantee to the number of rollouts replayed per submission.

Symbols: R rollouts in a submission, m of them replayed, drawn after it was committed; q = m / R the check rate; d the
power, the chance that replaying a cheated rollout detects it. The guarantee is (f, n, p): an owner that cheats in a
fraction f of its submissions, or of the rollouts of each, is caught within n submissions with probability p.

    D(m) = 1 - (1 - d)^m                 detection of a submission in which every rollout is cheated
    P(caught within n) >= 1 - (1 - f D)^n

This holds however the fraction is spread, as shown below. Evidence that is too weak in one rollout adds up
(toploc/rivals.py). Let a cheated rollout add g nats on average, with a standard deviation s, and let conviction take L
nats. A submission in which every rollout is cheated is then detected with at least the probability that m of them add
up to L. What c cheated submissions add is carried over, at a price of ln 10 nats for each and of ln(10 / 9) for each
honest one between them, separately for each of V validators, so of n' = n / V submissions:

    D(m) = max(1 - (1 - d)^m, P(m g + s sqrt(m) Z >= L)),        Z normal
    P(caught) >= sum_c P(Binomial(n', f) = c) P(c (m g - ln 10) - (n' - c) ln(10 / 9) + s sqrt(c m) Z >= L)

An owner that spreads its cheating over single rollouts is caught by this evidence if a replayed rollout adds G > 0 nats
on average, with a deviation S, when a fraction f of all is cheated: P(n' m G + S sqrt(n' m) Z >= L). Calibration
measures all four numbers. Weak evidence decides for whole submissions sooner than for single rollouts, so the rate is
chosen for the former, and whether the guarantee holds for the latter too is reported (`keeps_spread`).

Why spreading does not help against d alone. A submission with a share x of cheated rollouts is detected with a
probability of at least g(x) = 1 - (1 - x d)^m (drawing without replacement is better). g is concave and g(0) = 0, so
g(x) >= x g(1) = x D; and for shares x_1 .. x_n with mean f, prod (1 - g(x_i)) <= prod (1 - x_i D) <= (1 - f D)^n, the
last step by the inequality of arithmetic and geometric means. The bound is tight for an owner that cheats on all
rollouts of submissions chosen with probability f: cheating in whole submissions is the best strategy, and the rate
assumes it.

Invariants:
- m is the smallest number that meets the guarantee, and at least one;
- this module imports nothing of the swarm and no torch: parameters, commands and the validator all use it.
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, NamedTuple

from pydantic import Field

from shoal.config.run import Settings
from shoal.errors import ConfigError

Part = Annotated[float, Field(ge=1e-6, le=1.0)]
Chance = Annotated[float, Field(ge=1e-6, le=1.0 - 1e-6)]
"""integer millionths, because a ledger holds no floats"""
AttackNames = Annotated[list[str], Field(max_length=16, json_schema_extra={"allowed": "a list of attacks"})]
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
    """d: most that is assumed of the chance that replaying a cheated rollout detects it; less if less was measured"""
    promised: AttackNames = Field(default=["int8", "int8 in groups", "int4"])
    """attacks of the calibration that the guarantee must cover: a run with which it does not is refused"""


class EvidencePower(NamedTuple):
    """What replayed rollouts add to the evidence against an owner that cheats, in nats; zeros for nothing."""

    gain: float = 0.0
    """g: of a cheated rollout"""
    spread: float = 0.0
    """s: standard deviation of that"""
    mixed: float = 0.0
    """G: of any rollout if the guarantee's fraction is cheated"""
    mixed_spread: float = 0.0
    """S"""
    validators: int = 2
    """V: owners of validators, each of which sees its part"""


NO_EVIDENCE = EvidencePower()
EVIDENCE_LINE = math.log(1e9) + math.log(12)
"""L: the rate of false alarms, and the number of bets that share it"""
_RARE, _WAIT = math.log(10.0), math.log(10.0 / 9.0)


def detect_cheat(checked: int, power: float, evidence: EvidencePower = NO_EVIDENCE) -> float:
    """D: the chance that replaying so many rollouts detects a submission in which every rollout is cheated."""
    alone = -math.expm1(checked * math.log1p(-power)) if power < 1.0 else float(checked > 0)
    return max(alone, _reach(checked * evidence.gain, evidence.spread * math.sqrt(checked)))


def carry_evidence(guarantee: Guarantee, checked: int, evidence: EvidencePower) -> float:
    """The chance that evidence carried over the guarantee's submissions convicts an owner that cheats in whole ones."""
    seen, fraction = guarantee.submissions // max(1, evidence.validators), guarantee.fraction
    chance = 0.0
    for cheated in range(1, seen + 1):
        nats = cheated * (checked * evidence.gain - _RARE) - (seen - cheated) * _WAIT
        reached = _reach(nats, evidence.spread * math.sqrt(cheated * checked))
        chance += _count_chance(seen, cheated, fraction) * reached
    return min(1.0, chance)


def catch_spread(guarantee: Guarantee, checked: int, evidence: EvidencePower) -> float:
    """The chance that carried evidence convicts an owner that cheats in single rollouts of each submission."""
    seen = guarantee.submissions // max(1, evidence.validators) * checked
    return _reach(seen * evidence.mixed, evidence.mixed_spread * math.sqrt(seen)) if seen else 0.0


def _reach(nats: float, spread: float) -> float:
    """The chance that normally distributed evidence reaches the line."""
    if spread <= 0.0:
        return float(nats >= EVIDENCE_LINE)
    return 1.0 - NormalDist(nats, spread).cdf(EVIDENCE_LINE)


def _count_chance(trials: int, hits: int, chance: float) -> float:
    if chance >= 1.0:
        return float(hits == trials)
    log = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return math.exp(log + hits * math.log(chance) + (trials - hits) * math.log1p(-chance))


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


@lru_cache(maxsize=4096)
def count_checked(
    guarantee: Guarantee, power: float, rollouts: int, evidence: EvidencePower = NO_EVIDENCE
) -> int | None:
    """m: the smallest number of replayed rollouts that meets the guarantee; None if even replaying all does not."""
    numbers = range(1, rollouts + 1)
    return next((number for number in numbers if keeps_promise(guarantee, power, number, evidence)), None)


def keeps_promise(guarantee: Guarantee, power: float, checked: int, evidence: EvidencePower = NO_EVIDENCE) -> bool:
    """Whether replaying so many rollouts of each submission meets the guarantee for whole submissions."""
    chance = catch_owner(guarantee.fraction, guarantee.submissions, detect_cheat(checked, power, evidence))
    return chance >= guarantee.probability or carry_evidence(guarantee, checked, evidence) >= guarantee.probability


def keeps_spread(guarantee: Guarantee, power: float, checked: int, evidence: EvidencePower = NO_EVIDENCE) -> bool:
    """Whether it also meets the guarantee if the cheating is spread over single rollouts of each submission."""
    chance = catch_owner(guarantee.fraction, guarantee.submissions, detect_cheat(checked, power))
    return max(chance, catch_spread(guarantee, checked, evidence)) >= guarantee.probability


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
