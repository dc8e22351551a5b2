"""How often honest owners are watched, how soon cheating ones are, and the cost.

    python bench/history.py              # a minute
    python bench/history.py --quick      # a few seconds

Swarms of eight owners whose speeds differ by a factor of 27. A group has 8 rollouts of a task; answers to hard tasks
are long and rarely correct. A lease that takes too long is done by the fastest owner instead, as in a run. Each step
has its own version, the least favourable case: a bag lasts for one step.
"""

import argparse
import heapq
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from shoal.audit.verify import open_scratch
from shoal.coordinator.rules.drift import RANKED, DriftEvidence, PopulationSamples, line_evidence
from shoal.coordinator.state import drift, run
from shoal.ledger.event import Event, EventKind, encode_body
from shoal.protocol.params import MILLION, RunParams, dump_params
from shoal.util.canonical import encode_canonical

Numbers = tuple[int, int, int]
"""tokens, reward and entropy of a group"""
Write = Callable[[Numbers, random.Random], Numbers]

SPEEDS = [0.4 * 1.6**place for place in range(8)]
CHEAT = 4
"""the owner that cheats, of medium speed"""
GROUP = 8
LEASE = 1500


def draw_numbers(rng: random.Random) -> Numbers:
    """Numbers of an honest group."""
    hard = rng.gauss(0, 1)
    tokens = round(600 * math.exp(0.35 * hard + rng.gauss(0, 0.15)))
    chance = 1 / (1 + math.exp(1.2 * hard))
    right = sum(rng.random() < chance for _ in range(GROUP))
    return tokens, right * MILLION // GROUP, round(MILLION * rng.gauss(0.7 + 0.05 * hard, 0.1))


def shorten(share: float) -> Write:
    """Completions are cut to a share of their length."""
    return lambda numbers, rng: (round(share * numbers[0]), numbers[1], numbers[2])


def take_best(numbers: Numbers, rng: random.Random) -> Numbers:
    """Wrong answers are sampled once more."""
    right = numbers[1] * GROUP // MILLION
    more = sum(rng.random() < right / GROUP for _ in range(GROUP - right))
    return numbers[0], (right + more) * MILLION // GROUP, numbers[2]


def cool(share: float) -> Write:
    """Tokens are likelier than they should be: a lower temperature, or greedy."""
    return lambda numbers, rng: (numbers[0], numbers[1], round(share * numbers[2]))


CHEATS: dict[str, Write] = {
    "lengths 10 % shorter": shorten(0.9),
    "lengths 20 % shorter": shorten(0.8),
    "lengths 40 % shorter": shorten(0.6),
    "best of two": take_best,
    "entropy 10 % lower": cool(0.9),
    "greedy (entropy 75 % lower)": cool(0.25),
}


def write_step(rng: random.Random, groups: int) -> Iterator[tuple[int, int, Numbers]]:
    """Groups by index: the owner that leased each first, the one that submitted it, and honest numbers."""
    clock = [(rng.random(), owner) for owner in range(len(SPEEDS))]
    heapq.heapify(clock)
    for _ in range(groups):
        at, owner = heapq.heappop(clock)
        numbers = draw_numbers(rng)
        took = numbers[0] / SPEEDS[owner]
        heapq.heappush(clock, (at + min(took, LEASE), owner))
        yield owner, owner if took <= LEASE else len(SPEEDS) - 1, numbers


def watch_swarm(
    seed: int, steps: int, groups: int, line: int, write: Write | None = None, after: int = 0
) -> dict[int, int]:
    """Which owners are watched, after how many of their groups; the cheat starts after some of its own groups."""
    rng, watched = random.Random(seed), {}
    evidence = [DriftEvidence() for _ in SPEEDS]
    for _ in range(steps):
        bag = PopulationSamples()
        for holder, author, honest in write_step(rng, groups):
            cheats = write is not None and author == CHEAT and evidence[CHEAT].groups >= after
            numbers = write(honest, rng) if write is not None and cheats else honest
            if holder in watched:
                continue
            parts = bag.place(numbers, [rng.getrandbits(64) for _ in RANKED])
            if parts is not None:
                evidence[holder].weigh_group(parts)
                if evidence[holder].peak >= line:
                    watched[holder] = evidence[holder].groups
        if write is not None and CHEAT in watched:
            break
    return watched


def show_validity(swarms: int, steps: int) -> None:
    """Honest owners that are ever watched."""
    total = swarms * len(SPEEDS)
    print(f"honest: {swarms} swarms of {len(SPEEDS)} owners, {steps} steps of 80 groups, tested after each group")
    for rate in (100_000, 10_000, 1_000):
        found = sum(len(watch_swarm(seed, steps, 80, line_evidence(rate))) for seed in range(swarms))
        print(f"  rate {rate / MILLION:<6g} {found} of {total} watched ({found / total:.2%})")


def show_power(swarms: int, line: int) -> None:
    """Groups that a cheat submits until it is watched, and honest owners watched in the same swarm."""
    print(f"{'cheat':<30}{'groups a version':>18}{'median':>8}{'worst':>8}{'missed':>8}{'others':>8}")
    for name, write in CHEATS.items():
        for groups in (24, 80, 400):
            runs = [watch_swarm(seed, 24_000 // groups, groups, line, write) for seed in range(swarms)]
            show_row(name, str(groups), runs)
    late = [watch_swarm(seed, 400, 80, line, CHEATS["lengths 20 % shorter"], after=1000) for seed in range(swarms)]
    since = [{owner: at - 1000 * (owner == CHEAT) for owner, at in found.items()} for found in late]
    show_row("lengths 20 % shorter", "80, late", since)


def show_row(name: str, groups: str, runs: Sequence[dict[int, int]]) -> None:
    """One line of the table."""
    found = sorted(run[CHEAT] for run in runs if CHEAT in run)
    others = sum(len(run.keys() - {CHEAT}) for run in runs)
    shown = f"{round(median(found))} {found[-1]}" if found else "- -"
    middle, worst = shown.split()
    print(f"{name:<30}{groups:>18}{middle:>8}{worst:>8}{len(runs) - len(found):>8}{others:>8}")


def show_cost(groups: int, owners: int) -> None:
    """One cut of a large step, in SQLite."""
    rng = random.Random(0)
    with open_scratch((drift.NUMBERS, drift.BAG, drift.HISTORY, run.RUN_STATE)) as connection:
        params = encode_canonical(dump_params(RunParams())).decode()
        connection.execute(
            run.RUN_STATE.insert(), [{"run": "demo", "operator": "", "beacon": "", "params": params, "stopped": 0}]
        )
        rows = [
            {
                "step": 1,
                "position": position,
                "submission": f"s{position}",
                "owner": f"o{position % owners}",
                "author": f"o{position % owners}",
                "version": 0,
                "numbers": f"[{','.join(map(str, draw_numbers(rng)))}]",
                "drift": "[[0,500000,40,20],[1,250000,40,10],[2,100000,40,4],[3,10000,40,0]]",
            }
            for position in range(groups)
        ]
        connection.execute(drift.NUMBERS.insert(), rows)
        body = encode_body({"groups": groups, "hash": "", "step": 1})
        event = Event(9, 0, EventKind.BATCH_CUT, "ab" * 32, "", body, b"", bytes(32), bytes(32))
        start = time.process_time()
        drift.weigh_step(event, connection)
        spent = time.process_time() - start
    each = 1e6 * spent / groups
    print(f"cut of {groups} groups of {owners} owners: {1e3 * spent:.0f} ms of CPU, {each:.0f} us per group")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer swarms")
    quick = parser.parse_args().quick
    show_validity(*(40, 5) if quick else (400, 10))
    show_power(3 if quick else 20, line_evidence(RunParams().watch_rate))
    show_cost(4096, 64)


if __name__ == "__main__":
    main()
