"""Time until every worker has a version: bytes over the slowest stage of the tree, and a little per level.

Symbols: Z bytes of the version, R relays, w machines that pull it, U, V and d the rates of origin, relay and machine.
A server sends to at most `FAN_OUT` relays, so relays are in ceil(log) levels. Servers pass on what arrives before it is
complete (cut-through), so stages overlap and the slowest decides:

    time = Z / min(U / children, V / children, R_last V / w, d) x (1 + 0.003 levels)

The 0.3 % per level are measured, as are the sizes of deltas (docs/shardcast.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from shoal.plan.memory import count_trained
from shoal.plan.settings import ITEMSIZE, PlanSettings
from shoal.plan.shapes import ModelShape

FAN_OUT = 8
_LEVEL = 0.003
_BITS = 1e9 / 8
_DELTA_RATIOS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "bfloat16": ((3e-7, 205.0), (1e-6, 86.0), (3e-6, 40.0), (1e-5, 18.0), (1e-4, 5.3)),
    "float32": ((1e-6, 2.4), (1e-4, 1.7)),
}
"""size of a version / size of its delta by learning rate, measured (docs/shardcast.md)"""


@dataclass(frozen=True, slots=True)
class Links:
    """Relays and rates, in Gbit/s of each server or machine."""

    relays: int = 1
    origin_gbps: float = 10.0
    relay_gbps: float = 10.0
    worker_gbps: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedBroadcast:
    """Bytes of a version and the time until all have it."""

    kind: str
    """full, delta or adapter"""
    bytes: float
    seconds: float


def plan_broadcasts(
    shape: ModelShape, settings: PlanSettings, links: Links, machines: int
) -> tuple[PlannedBroadcast, ...]:
    """The ways a version can be sent, the one that the run uses for most steps last."""
    options = settings.trainer
    full = float(ITEMSIZE[options.publish] * shape.parameters)
    sizes = {"full": full}
    if options.lora is None:
        sizes["delta"] = full / delta_ratio(options.publish, settings.lr)
    else:
        sizes["adapter"] = float(ITEMSIZE[options.publish] * count_trained(shape, options))
    rate = find_rate(links, machines)
    levels = 1 + count_levels(links.relays)
    return tuple(PlannedBroadcast(kind, size, size / rate * (1 + _LEVEL * levels)) for kind, size in sizes.items())


def count_levels(relays: int) -> int:
    """Levels of relays below the origin."""
    levels, level = 0, FAN_OUT
    while relays > 0:
        relays, level, levels = relays - level, level * FAN_OUT, levels + 1
    return levels


def find_rate(links: Links, machines: int) -> float:
    """Bytes per second that reach the last machine."""
    if not links.relays:
        return min(links.origin_gbps / max(1, machines), links.worker_gbps) * _BITS
    levels = count_levels(links.relays)
    inner = sum(FAN_OUT**level for level in range(1, levels))
    last = links.relays - inner
    rates = [links.origin_gbps / min(FAN_OUT, links.relays), links.worker_gbps]
    if levels > 1:
        rates.append(links.relay_gbps / FAN_OUT)
    rates.append(links.relay_gbps * last / max(1, machines))
    return min(rates) * _BITS


def delta_ratio(dtype: str, lr: float) -> float:
    """Size of a version over that of its delta, interpolated between measured learning rates, constant outside."""
    points = _DELTA_RATIOS[dtype]
    if lr <= points[0][0]:
        return points[0][1]
    for (low, above), (high, below) in pairwise(points):
        if lr <= high:
            part = math.log(lr / low) / math.log(high / low)
            return math.exp(math.log(above) + part * math.log(below / above))
    return points[-1][1]
