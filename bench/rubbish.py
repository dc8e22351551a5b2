"""An honest swarm attacked by owners of pure rubbish: how many steps per minute they cost it.

    python bench/rubbish.py [--quick] [--json]

A whole swarm (`shoal run`'s parts: two workers, two validators, k = 2) trains for a fixed time, in turn

    alone      nobody else
    fixed      with 40 owners that have no compute, five each of eight forms of rubbish (`redteam.behaviours.rubbish`):
               random bytes, files that take a parser long, wrong prompts, rewards and proofs, leases that are never
               answered, announced and not sent, or returned
    replaced   the same, but an owner that must pause, do its proof of work again or is banned is replaced by a new one.
               Joining costs 4,096 hashes, a few milliseconds

The owners of rubbish are there from the start, before any worker has accepted work. The steps are counted after the
first minute (--quick: after 30 s). The rubbish comes from the benchmark's own process, which takes CPU time from the
swarm that strangers would not take: `*_attackers` is its share of all cores, and `*_net_cost` the cost without it,
1 - rate / (rate alone x (1 - share)).
"""

import asyncio
import os
import time
from pathlib import Path

from sqlalchemy import text

from common import OUT, finish, mean, parse_flags
from shoal.audit.verify import verify_ledger
from shoal.coordinator.state import PROJECTIONS
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import list_parts
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.run import hold_swarm, open_supervisor
from shoal.launch.view import METRICS
from shoal.ledger.db import open_database, read_snapshot
from shoal.redteam.attacks.leases import flood_rubbish
from shoal.redteam.raw_requests import Budget
from shoal.redteam.scripted import open_attack_session
from shoal.train.report import read_metrics
from shoal.util.files import remove_dir
from swarms import load_swarm

SETTINGS = (
    "async_level=2",
    "steps=100000",
    "tasks.options={min_length=2, max_length=8}",
    "sft.options={}",
    "sft.steps=150",
    "engine.max_tokens=12",
    "batch.groups=8",
    "batch.group_size=8",
    "learner.lr=1e-5",
    "swarm.workers=2",
    "swarm.cheats=[]",
    "swarm.validators=2",
    "swarm.groups_per_lease=0",
    "checkpoint.every=50",
    "eval.every=0",
)
OWNERS = 40
ARMS = ("alone", "fixed", "replaced")
LIMIT_S = 600.0
_LOOK_S = 0.2


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    rounds, warm_s, measured_s = (1, 30.0, 40.0) if flags.quick else (3, 60.0, 90.0)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    shares: dict[str, list[float]] = {arm: [] for arm in ARMS}
    counts: dict[str, dict[str, int]] = {}
    for number in range(rounds):
        for arm in ARMS:
            rate, share, counts[arm] = asyncio.run(measure(f"rubbish-{arm}", number, arm, warm_s, measured_s))
            rates[arm].append(rate)
            shares[arm].append(share)
    figures = {f"{arm}_steps_per_min": mean(rates[arm]) for arm in ARMS}
    for arm in ARMS[1:]:
        left, share = mean(rates[arm]) / mean(rates["alone"]), mean(shares[arm]) - mean(shares["alone"])
        figures |= {f"{arm}_cost": 1 - left, f"{arm}_attackers": share, f"{arm}_net_cost": 1 - left / (1 - share)}
    figures |= {f"{arm}_{name}": count for arm in ARMS[1:] for name, count in counts[arm].items()}
    finish(flags, format_table(rates, figures), figures)


async def measure(
    name: str, seed: int, arm: str, warm_s: float, measured_s: float
) -> tuple[float, float, dict[str, int]]:
    """Of one swarm after its first minute: steps per minute, the share of all cores that this process takes, and counts
    of its ledger."""
    config = load_swarm(name, seed, OUT / "rubbish", SETTINGS)
    layout = SwarmPaths.of(config)
    if layout.root.exists():
        remove_dir(layout.root)
    with hold_swarm(layout):
        prepared = prepare_swarm(config, layout)
        parts = [part for part in list_parts(prepared) if part.name != "evaluator"]
        supervisor, stop = open_supervisor(prepared, parts), asyncio.Event()
        running = asyncio.create_task(supervisor.run(lambda: False, stop))
        flood = None if arm == "alone" else asyncio.create_task(attack(prepared, arm, LIMIT_S))
        try:
            await reach_step(prepared, 1, running, flood)
            await asyncio.sleep(warm_s)
            begun = count_steps(prepared), time.monotonic(), time.process_time()
            await asyncio.sleep(measured_s)
            ended = count_steps(prepared), time.monotonic(), time.process_time()
        finally:
            if flood is not None:
                flood.cancel()
                await asyncio.gather(flood, return_exceptions=True)
            stop.set()
            await running
    found = read_counts(prepared)
    remove_dir(layout.root)
    steps, seconds, busy_s = (last - first for first, last in zip(begun, ended, strict=True))
    return 60 * steps / seconds, busy_s / seconds / (os.cpu_count() or 1), found


async def attack(prepared: PreparedSwarm, arm: str, seconds: float) -> None:
    """Flood a swarm with rubbish for a while."""
    budget = Budget(identities=100_000, requests=10_000_000, seconds=seconds)
    folder = prepared.layout.root / "rubbish"
    async with open_attack_session(prepared.url, folder, budget=budget) as session:
        await flood_rubbish(session, OWNERS, replaced=arm == "replaced")


async def reach_step(
    prepared: PreparedSwarm, step: int, running: "asyncio.Task[bool]", flood: "asyncio.Task[None] | None"
) -> None:
    """Wait until so many steps are trained."""
    while count_steps(prepared) < step:
        if flood is not None and flood.done():
            flood.result()
        if running.done():
            raise SystemExit(f"{prepared.config.run}: ended early; see {prepared.layout.logs}")
        await asyncio.sleep(_LOOK_S)


def count_steps(prepared: PreparedSwarm) -> int:
    path: Path = prepared.layout.root / METRICS
    return len(read_metrics(path)) if path.exists() else 0


def read_counts(prepared: PreparedSwarm) -> dict[str, int]:
    """Owners, rejections, bans and events of a run whose ledger holds."""
    engine = open_database(str(prepared.layout.ledger))
    queries = {
        "owners": "SELECT count(*) FROM owner",
        "rejected": "SELECT count(*) FROM submission WHERE state LIKE 'rejected%'",
        "banned": "SELECT count(*) FROM ban",
        "events": "SELECT count(*) FROM event",
    }
    try:
        report = verify_ledger(engine, projections=PROJECTIONS)
        if not report.holds:
            raise SystemExit(f"{prepared.config.run}: its ledger does not hold: {report}")
        with read_snapshot(engine) as connection:
            return {name: int(connection.execute(text(query)).scalar_one()) for name, query in queries.items()}
    finally:
        engine.dispose()


def format_table(rates: dict[str, list[float]], figures: dict[str, float]) -> str:
    rows = ["| swarm | steps/min, each run | mean | cost | attackers' CPU | net cost |", "|---" * 6 + "|"]
    for arm, found in rates.items():
        each = ", ".join(f"{rate:.1f}" for rate in found)
        costs = [f"{100 * figures.get(f'{arm}_{name}', 0.0):.1f} %" for name in ("cost", "attackers", "net_cost")]
        rows.append(f"| {arm} | {each} | {mean(found):.1f} | {' | '.join(costs)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
