"""The outer step: what a run does with the mean of its peers' pseudo-gradients.

Symbols: theta outer weights, w_i where peer i arrived after its inner steps, d = mean over i of (theta - w_i),
m momentum, eta outer learning rate, mu_r momentum factor in round r.

    nesterov     m <- mu_r m + d        theta <- theta - eta (d + mu_r m)
    average      theta <- theta - d     (the mean of the peers' weights)

mu_r may rise over the first rounds (`ramp`), where pseudo-gradients are one long drift that momentum overshoots, and
fall over the last (`fade`), so that the run ends without the noise that momentum carries along.
eta = 0.7 and mu = 0.9 are those of Douillard et al., arXiv 2311.08105, and OpenDiLoCo, arXiv 2407.07852. With mu = 0
the step is plain SGD. Arithmetic is elementwise fp32 in a fixed order, so that every peer gets the same bits.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from shoal.config import Decay, Settings
from shoal.diloco.codecs.base import FLOAT
from shoal.diloco.state import FragmentState

FEW_ROUNDS = 30
RAMP_ROUNDS = 10
"""rounds over which momentum should rise in a run that starts from random weights"""


class OuterRule(Settings):
    """How the outer step is made."""

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
    """rounds that are planned; 0: not known"""

    @model_validator(mode="after")
    def _fade_has_an_end(self) -> "OuterRule":
        if self.fade and not self.rounds:
            raise ValueError("fade needs rounds, the number of rounds that are planned")
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
    """What is to be feared of this rule in a run of so many rounds; empty if nothing is.

    In early training successive pseudo-gradients point the same way, and momentum 0.9 makes up to 7 steps of each.
    """
    if not from_random or num_rounds >= FEW_ROUNDS or rule.name == "average" or rule.momentum <= 0.6 or rule.ramp:
        return ""
    return (
        f"{num_rounds} rounds from random weights are few for outer momentum {rule.momentum:g}, which will overshoot:"
        f" set rules.outer.ramp={RAMP_ROUNDS}, its momentum to 0.6 or less, or its name to average"
    )
