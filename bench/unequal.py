"""Workers of very different speed that join late, leave and stall: what happens to their work.

    python bench/unequal.py [--quick] [--json]

A whole swarm (`shoal run`'s parts) with four workers, k = 2, groups of up to 24 digits to sort, one group per lease:

    worker-1  as fast as it can
    worker-2  a quarter of that: stopped for three quarters of every 0.2 s (SIGSTOP, SIGCONT)
    worker-3  stopped for a minute in the middle (--quick: 15 s)
    worker-4  joins after a tenth of the steps and leaves after three quarters

What was generated and its outcome are read from the ledger. Tokens reach training if their group was trained, or
accepted and filtered out because its rewards are all equal. All others count as lost: submissions that were not
accepted, and leases that ended without one, each counted as if it had been completed (with a group's mean length).

Slow problems would be starved if long groups of slow workers were dropped, or if a batch took what is ready first. So
two samples are compared (Kolmogorov-Smirnov, one value per group, the tokens of its longest rollout): accepted groups
of the slow worker with those of worker-1, and trained groups with all groups that have a signal.
"""

import asyncio
import json
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sqlalchemy import Connection, text

from common import OUT, finish, mean, parse_flags
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.run import open_supervisor
from shoal.launch.supervisor import Supervisor
from shoal.launch.view import METRICS, read_steps
from shoal.ledger.db import open_database, read_snapshot
from shoal.train.report import read_metrics
from swarms import find_part, load_swarm, pick_parts, run_swarm

SETTINGS = (
    "async_level=2",
    "tasks.options={min_length=2, max_length=24}",
    "sft.options={}",
    "sft.steps=150",
    "engine.max_tokens=26",
    "batch.groups=16",
    "learner.lr=5e-5",
    "swarm.workers=4",
    "swarm.cheats=[]",
    "swarm.groups_per_lease=1",
    "swarm.slots=64",
    "swarm.lease_s=10",
    "eval.every=0",
)
FAST, SLOW, PAUSED, GUEST = "worker-1", "worker-2", "worker-3", "worker-4"
TURN_S, SLOW_SHARE = 0.2, 0.25


@dataclass(slots=True)
class Disturbances:
    """What is done to the workers, and when."""

    steps: int
    pause_s: float
    pause_begun: float = 0.0
    pause_ended: float = 0.0

    async def drive(self, prepared: PreparedSwarm, supervisor: Supervisor) -> None:
        """Slow one worker down, stall one for a while, let one join and leave."""
        await asyncio.gather(
            slow_down(supervisor, SLOW, SLOW_SHARE),
            self._pause(prepared, supervisor),
            self._invite(prepared),
        )

    async def _pause(self, prepared: PreparedSwarm, supervisor: Supervisor) -> None:
        await reach_step(prepared, self.steps // 8)
        process = await find_part(supervisor, PAUSED)
        self.pause_begun = read_last_time(prepared)
        process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.pause_s)
        finally:
            process.signal(signal.SIGCONT)
        self.pause_ended = self.pause_begun + self.pause_s

    async def _invite(self, prepared: PreparedSwarm) -> None:
        await reach_step(prepared, self.steps // 10)
        guest, leave = open_supervisor(prepared, pick_parts(prepared, [GUEST])), asyncio.Event()
        running = asyncio.create_task(guest.run(lambda: False, leave))
        try:
            await reach_step(prepared, self.steps * 3 // 4)
        finally:
            leave.set()
            await running


@dataclass(slots=True)
class Groups:
    """The outcome of the groups of a run."""

    trained: list[int] = field(default_factory=list)
    """tokens of the longest rollout of each"""
    with_signal: list[int] = field(default_factory=list)
    by_part: dict[str, list[int]] = field(default_factory=dict)
    """of accepted groups"""
    reached: int = 0
    """tokens"""
    lost: int = 0
    given_out: int = 0
    accepted: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    """leases by how they ended"""

    @property
    def share(self) -> float:
        return self.reached / (self.reached + self.lost)


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    disturbances = Disturbances(steps=24, pause_s=15.0) if flags.quick else Disturbances(steps=80, pause_s=60.0)
    config = load_swarm("unequal", 0, OUT / "unequal", [*SETTINGS, f"steps={disturbances.steps}"])
    prepared, _ = run_swarm(config, apart=[GUEST], drive=disturbances.drive)
    groups = read_groups(prepared)
    figures = collect_figures(prepared, disturbances, groups)
    finish(flags, format_table(groups, figures), figures)


async def slow_down(supervisor: Supervisor, name: str, share: float) -> None:
    """Let a part run for a share of the time, forever."""
    process = await find_part(supervisor, name)
    try:
        while True:
            process.signal(signal.SIGSTOP)
            await asyncio.sleep((1 - share) * TURN_S)
            process.signal(signal.SIGCONT)
            await asyncio.sleep(share * TURN_S)
    finally:
        process.signal(signal.SIGCONT)  # a stopped process could not be asked to end


async def reach_step(prepared: PreparedSwarm, step: int) -> None:
    """Wait until that many steps are trained."""
    while not read_steps(prepared.layout.root / METRICS) & set(range(step, prepared.config.steps + 1)):
        await asyncio.sleep(0.2)


def read_last_time(prepared: PreparedSwarm) -> float:
    """When the last step was trained, by the trainer's clock."""
    return float(read_metrics(prepared.layout.root / METRICS)[-1]["time"])


def read_groups(prepared: PreparedSwarm) -> Groups:
    """Read the ledger of a finished run."""
    engine = open_database(str(prepared.layout.ledger))
    try:
        with read_snapshot(engine) as connection:
            return _collect_groups(connection, prepared)
    finally:
        engine.dispose()


def _collect_groups(connection: Connection, prepared: PreparedSwarm) -> Groups:
    size, names, groups = prepared.config.batch.group_size, prepared.names, Groups()
    tokens = _read_tokens(connection, size)
    for row in connection.execute(text("SELECT state, count(*) FROM lease GROUP BY state ORDER BY state")):
        groups.ends[row[0]] = row[1]
    query = "SELECT g.submission, g.place, g.signal, g.batched, s.node FROM trained_group g JOIN submission s "
    for name, place, has_signal, batched, node in connection.execute(text(f"{query} ON s.submission = g.submission")):
        lengths = tokens[name].pop(place)
        groups.accepted += 1
        groups.by_part.setdefault(names[node], []).append(max(lengths))
        if has_signal:
            groups.with_signal.append(max(lengths))
        if batched:
            groups.trained.append(max(lengths))
        if batched or not has_signal:
            groups.reached += sum(lengths)
        else:
            groups.lost += sum(lengths)
    groups.lost += sum(sum(lengths) for places in tokens.values() for lengths in places.values())
    groups.given_out = int(connection.execute(text("SELECT sum(count) FROM span")).scalar_one())
    ended = "SELECT coalesce(sum(count), 0) FROM lease WHERE state IN ('returned', 'expired', 'cancelled')"
    unwritten = int(connection.execute(text(ended)).scalar_one())
    groups.lost += round(unwritten * groups.reached / groups.accepted)
    return groups


def _read_tokens(connection: Connection, size: int) -> dict[str, dict[int, list[int]]]:
    """Tokens of each submitted rollout, by submission and position of its group."""
    found = {}
    for seq, body in connection.execute(text("SELECT seq, body FROM event WHERE kind = 'sub.commit'")):
        lengths = [int(entry["tokens"]) for entry in json.loads(body)["rollouts"]]
        found[f"s{seq}"] = {place: lengths[place * size : (place + 1) * size] for place in range(len(lengths) // size)}
    return found


def collect_figures(prepared: PreparedSwarm, disturbances: Disturbances, groups: Groups) -> dict[str, float]:
    times = [float(line["time"]) for line in read_metrics(prepared.layout.root / METRICS)]
    gaps = [after - before for before, after in pairwise(times)]
    inside = [time for time in times if disturbances.pause_begun < time <= disturbances.pause_ended]
    figures = {
        "tokens_reached": groups.share,
        "groups_given_out": groups.given_out,
        "groups_not_accepted": groups.given_out - groups.accepted,
        "groups_with_signal_not_trained": len(groups.with_signal) - len(groups.trained),
        "steps_in_pause": len(inside),
        "step_s": mean(gaps),
        "longest_gap_s": max(gaps),
    }
    pairs = {
        "slow_fast": (groups.by_part.get(SLOW, []), groups.by_part.get(FAST, [])),
        "trained_generated": (groups.trained, groups.with_signal),
    }
    for name, (left, right) in pairs.items():
        if left and right:
            figures[f"{name}_ks"], figures[f"{name}_p"] = compare_samples(left, right)
    return figures


def compare_samples(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Kolmogorov-Smirnov: the largest distance between the two distributions, and the probability of it by chance.

    Uses the limiting distribution; with ties, which lengths have, the true probability is larger.
    """
    values = sorted({*left, *right})
    distance = max(abs(_count_upto(left, value) - _count_upto(right, value)) for value in values)
    root = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return distance, 1.0  # the series does not converge, and its sum is 1 to twelve digits
    series = sum((-1) ** (term - 1) * math.exp(-2 * (term * scaled) ** 2) for term in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * series))


def _count_upto(sample: Sequence[float], value: float) -> float:
    return sum(item <= value for item in sample) / len(sample)


def format_table(groups: Groups, figures: dict[str, float]) -> str:
    rows = ["| worker | groups accepted | mean tokens of the longest rollout |", "|---|---|---|"]
    rows += [f"| {name} | {len(found)} | {mean(found):.1f} |" for name, found in sorted(groups.by_part.items())]
    rows += ["", f"leases by their end: {', '.join(f'{count} {state}' for state, count in groups.ends.items())}"]
    rows += ["", "| figure | value |", "|---|---|"]
    return "\n".join([*rows, *(f"| {name} | {value:.4g} |" for name, value in figures.items())])


if __name__ == "__main__":
    main()
