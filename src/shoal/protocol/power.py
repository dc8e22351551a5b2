"""From measured power to the check rate: which attacks a guarantee covers, and how much must be replayed for that.

The power against each attack is in the run's calibration file (calibrate/power.py). The attacks that the settings
promise to catch decide how much is replayed: the one that takes most. A promise that is not kept even if everything is
replayed is refused, with what the operator can do. The other attacks are reported: within how many submissions they are
caught at that rate, or that they are not.

This module imports no torch: a swarm that is resumed starts without it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import NamedTuple

from shoal.errors import ConfigError
from shoal.protocol.check_rate import (
    NO_EVIDENCE,
    EvidencePower,
    Guarantee,
    ValidationConfig,
    count_checked,
    hasten,
    keeps_promise,
    keeps_spread,
    show_share,
)
from shoal.protocol.params import MILLION, set_check_rate
from shoal.toploc.odds import SHARES, mix_odds

_TRIED = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""numbers of submissions within which an attack may be caught"""
_LEAST_POWER = 1 / MILLION


@dataclass(frozen=True)
class AttackPower:
    """What was measured of one attack."""

    attack: str
    found: float
    """share of its rollouts that one check alone rejects"""
    odds: tuple[float, ...] = ()
    """logarithm of the odds of each measured rollout; empty where nothing is carried over"""
    honest: tuple[float, ...] = ()
    """of honest rollouts, for the same rival"""

    def weigh(self, fraction: float, validators: int) -> EvidencePower:
        """What replayed rollouts add to the evidence against an owner that cheats in a fraction of its work."""
        if not self.odds or fmean(self.odds) <= 0.0:
            return NO_EVIDENCE
        mixed, spread = max(self._mix(fraction, share) for share in SHARES)
        gain, deviation = fmean(self.odds), pstdev(self.odds)
        # The mean of a sample is uncertain: it is lowered by twice its standard error.
        gain -= 2.0 * deviation / math.sqrt(len(self.odds))
        if gain <= 0.0:
            return NO_EVIDENCE
        return EvidencePower(gain, deviation, max(0.0, mixed), spread, validators)

    def _mix(self, fraction: float, share: float) -> tuple[float, float]:
        """Mean and standard deviation of what one replayed rollout adds to the bet on a share of cheated ones."""
        parts = [
            (weight / len(logs), [mix_odds(log, share) for log in logs])
            for weight, logs in ((fraction, self.odds), (1.0 - fraction, self.honest))
            if logs and weight > 0.0
        ]
        mean = sum(weight * sum(values) for weight, values in parts)
        square = sum(weight * sum((value - mean) ** 2 for value in values) for weight, values in parts)
        error = math.sqrt(square / (len(self.odds) + len(self.honest)))
        return mean - 2.0 * error, math.sqrt(square)


def read_power(calibration: bytes) -> list[AttackPower]:
    """The measured power of a calibration file; empty if it was not measured, `ConfigError` if it is no such file."""
    try:
        data = json.loads(calibration)
        honest = data.get("honest_odds", {})
        return [
            AttackPower(row["attack"], row["found"], tuple(row["odds"]), tuple(honest.get(row["rival"] or "", ())))
            for row in data.get("power", [])
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a calibration file: {error!a:.200}") from None


class Coverage(NamedTuple):
    """How a guarantee fares against one attack."""

    attack: str
    power: float
    evidence: EvidencePower
    checked: int | None
    """rollouts of a submission that must be replayed for an owner in good standing; None if all are not enough"""
    kept: bool
    """whether the guarantee is kept for every owner if all are replayed"""


class Dial:
    """The check rate of a run, by measured power."""

    def __init__(
        self, config: ValidationConfig, powers: Sequence[AttackPower], *, rollouts: int, validators: int
    ) -> None:
        """`rollouts` are those of a submission of the usual size."""
        self._config, self._rollouts = config, rollouts
        self.covers = [self._cover(power, max(1, validators)) for power in powers]

    @cached_property
    def hardest(self) -> Coverage | None:
        """The promised attack that takes most replays; None if no power was measured."""
        promised = [cover for cover in self.covers if cover.attack in self._config.promised]
        return max(promised, key=lambda cover: cover.checked or self._rollouts + 1, default=None)

    def set_params(self) -> dict[str, int]:
        """The parameters of the run that follow; `ConfigError` if a promised attack is not covered."""
        params = set_check_rate(self._config)
        broken = [c.attack for c in self.covers if c.attack in self._config.promised and not c.kept]
        if broken:
            raise ConfigError(
                f"validation.guarantee: {describe_promise(self._config.guarantee)} cannot be kept against "
                f"{', '.join(broken)}, even if all {self._rollouts} rollouts of a submission are replayed; use "
                "policy.publish_dtype=float32, larger leases (swarm.groups_per_lease), more submissions, or remove the "
                "attack from validation.promised"
            )
        if self.hardest is None:
            return params
        evidence = self.hardest.evidence
        return params | {
            "check_power": max(1, math.floor(self.hardest.power * MILLION)),
            "evidence_gain": math.floor(evidence.gain * MILLION),
            "evidence_spread": math.ceil(evidence.spread * MILLION),
            "evidence_mixed": math.floor(evidence.mixed * MILLION),
            "evidence_mixed_spread": math.ceil(evidence.mixed_spread * MILLION),
        }

    def describe(self, checked: int) -> list[tuple[bool, str]]:
        """A line for each attack if so many rollouts of a submission are replayed, and whether it is always caught."""
        lines = []
        for cover in self.covers:
            within = self._count_within(cover, checked)
            seen = f"{cover.attack}: at least {show_share(cover.power)} of its rollouts are found alone"
            if cover.evidence.gain:
                seen += f", each adds {cover.evidence.gain:.2g} nats"
            if within is None:
                advice = "use policy.publish_dtype=float32"
                lines.append((False, f"{seen}; NOT caught within {_TRIED[-1]:,} submissions: {advice}"))
            else:
                is_kept = self._is_kept_spread(cover, checked)
                rest = "" if is_kept else ", but NOT if it is spread over single rollouts"
                lines.append((is_kept, f"{seen}; caught within {within:,} submissions{rest}"))
        return lines

    def _is_kept_spread(self, cover: Coverage, checked: int) -> bool:
        return keeps_spread(self._config.guarantee, cover.power, checked, cover.evidence)

    def _cover(self, power: AttackPower, validators: int) -> Coverage:
        guarantee = self._config.guarantee
        found = max(_LEAST_POWER, min(self._config.power, power.found))
        evidence = power.weigh(guarantee.fraction, validators)
        checked = count_checked(hasten(guarantee), found, self._rollouts, evidence)
        kept = keeps_promise(guarantee, found, self._rollouts, evidence)
        return Coverage(power.attack, found, evidence, checked, kept)

    def _count_within(self, cover: Coverage, checked: int) -> int | None:
        for number in _TRIED:
            promise = self._config.guarantee.model_copy(update={"submissions": number})
            if keeps_promise(promise, cover.power, checked, cover.evidence):
                return number
        return None


def describe_promise(guarantee: Guarantee) -> str:
    """A guarantee in words."""
    return (
        f"catching cheating in {show_share(guarantee.fraction)} of the work within {guarantee.submissions} submissions "
        f"with probability {guarantee.probability:g}"
    )
