"""The outer step, and the rules that all peers of a run agree on before the first round.

Changing any of the rules during a run breaks the run: peers would hold different bits after the next round.

Symbols: theta outer weights, w_i the weights of peer i after its inner steps, d = mean over i of (theta - w_i),
m momentum, eta outer learning rate, mu_r momentum factor in round r.

    nesterov     m <- mu_r m + d        theta <- theta - eta (d + mu_r m)
    average      theta <- theta - d     (the mean of the peers' weights)

mu_r may rise over the first rounds (`ramp`), in which pseudo-gradients are one long drift that momentum overshoots, and
fall over the last (`fade`), so that the run ends without the noise that momentum carries along.
eta = 0.7 and mu = 0.9 are the values of Douillard et al., arXiv 2311.08105, and OpenDiLoCo, arXiv 2407.07852. With mu =
0 the step is plain SGD. Arithmetic is elementwise fp32 in a fixed order, so that every peer gets the same bits.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from shoal.config.run import Count, Decay, Settings
from shoal.diloco.codecs.base import FLOAT
from shoal.diloco.round import RoundKey
from shoal.diloco.state import FragmentState, OuterState

FEW_ROUNDS = 30
RAMP_ROUNDS = 10
"""rounds over which momentum should rise in a run that starts from random weights"""


class OuterRule(Settings):
    """The rule of the outer step."""

    name: Literal["nesterov", "average"] = "nesterov"
    lr: Annotated[float, Field(gt=0.0, le=2.0)] = 0.7
    """eta"""
    momentum: Decay = 0.9
    """mu"""
    ramp: Annotated[int, Field(ge=0)] = 0
    """rounds over which mu rises from 0, in equal steps; 0: none"""
    fade: Annotated[int, Field(ge=0)] = 0
    """last rounds over which mu falls to 0; needs `rounds`"""
    rounds: Annotated[int, Field(ge=0)] = 0
    """planned number of rounds; 0: unknown"""

    @model_validator(mode="after")
    def _fade_has_an_end(self) -> "OuterRule":
        if self.fade and not self.rounds:
            raise ValueError("fade needs rounds, the planned number of rounds")
        return self


def pseudo_gradient(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Start minus end, in fp32."""
    return start.astype(FLOAT, copy=False) - end.astype(FLOAT, copy=False)


def find_momentum(rule: OuterRule, number: int) -> float:
    """mu_r of round `number`, counted from 0."""
    rise = min(1.0, number / rule.ramp) if rule.ramp else 1.0
    fall = min(1.0, max(0, rule.rounds - 1 - number) / rule.fade) if rule.fade else 1.0
    return rule.momentum * rise * fall


def step_outer(rule: OuterRule, part: FragmentState, delta: np.ndarray) -> FragmentState:
    """The fragment after one outer step along `delta`, the mean pseudo-gradient."""
    if rule.name == "average":
        return FragmentState(part.index, part.round + 1, part.theta - delta, part.momentum)
    mu, eta = FLOAT.type(find_momentum(rule, part.round)), FLOAT.type(rule.lr)
    momentum = part.momentum * mu + delta
    theta = part.theta - (momentum * mu + delta) * eta
    return FragmentState(part.index, part.round + 1, theta, momentum)


def warn_rounds(rule: OuterRule, num_rounds: int, *, from_random: bool) -> str:
    """Return a warning if this rule is risky in a run of so many rounds; otherwise an empty string.

    In early training successive pseudo-gradients point in the same direction, and momentum 0.9 turns each into up to 7
    steps.
    """
    if not from_random or num_rounds >= FEW_ROUNDS or rule.name == "average" or rule.momentum <= 0.6 or rule.ramp:
        return ""
    return (
        f"{num_rounds} rounds from random weights are too few for outer momentum {rule.momentum:g}; it overshoots:"
        f" set rules.outer.ramp={RAMP_ROUNDS}, rules.outer.momentum=0.6 or less, or rules.outer.name=average"
    )


CodecName = Literal["fp32", "fp16", "int8", "int4", "topk"]


class UpdateGuard(Settings):
    """Protection of the mean against one bad peer."""

    mode: Literal["mean", "trimmed", "median"] = "trimmed"
    """for each coordinate: token-weighted mean; the same without the outermost quarter at each end; median"""
    clip: Annotated[float, Field(gt=0.0)] = 3.0
    """maximum norm, and maximum token weight, as a multiple of the median over the peers"""


class Rules(Settings):
    """The settings that all peers agree on."""

    interval: Count = 50
    """H: inner steps between two rounds of a fragment"""
    codec: CodecName = "int4"
    """encoding of pseudo-gradients, in both directions"""
    dynamic: bool = True
    """whether slow peers take fewer inner steps, by measured speed; results then depend on timing"""
    outer: OuterRule = OuterRule()
    guard: UpdateGuard = UpdateGuard()


@dataclass(frozen=True, slots=True)
class DilocoPlan:
    """The agreed settings of one run, with its name and the sizes of its fragments."""

    run: str
    sizes: tuple[int, ...]
    """elements per fragment"""
    rules: Rules = field(default_factory=Rules)
    num_lanes: int = 0
    """data lanes; 0 if the averager does not manage the data"""
    seed: int = 0
    """seed of the data order; must be the same for all peers, so that an epoch reads every sequence once"""

    def name_round(self, state: OuterState, fragment: int) -> RoundKey:
        """The round of a fragment that starts from this state."""
        part = state.fragments[fragment]
        return RoundKey(self.run, part.round, fragment, part.hash)

    def find_step(self, number: int, fragment: int) -> int:
        """The step of the inner schedule at which a round of a fragment is due: fragments take turns within H steps."""
        interval = self.rules.interval
        return number * interval + interval * (fragment + 1) // len(self.sizes)

    def span_steps(self, number: int, fragment: int) -> int:
        """Steps of the inner schedule from this round's turn to the next fragment's."""
        following = (number, fragment + 1) if fragment + 1 < len(self.sizes) else (number + 1, 0)
        return self.find_step(*following) - self.find_step(number, fragment)

    def next_turn(self, state: OuterState, handed_in: Collection[int] = ()) -> int:
        """The fragment whose round is due next: the one furthest behind, counting rounds already submitted."""
        return min(range(len(self.sizes)), key=lambda i: (state.fragments[i].round + (i in handed_in), i))
