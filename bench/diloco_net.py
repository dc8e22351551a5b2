"""DiLoCo's engine over a network: sync time compared with other engines, utilisation behind slow links, and an
extrapolation to larger runs.

    python bench/diloco_net.py [--quick] [--json] [--only sync|utilisation|paper] [--hivemind PYTHON]

Sync: seconds from submitting a vector to having the mean of all, between processes on loopback. Compared are this
package's reducer (robust mean, signed, on disk before it is announced), gloo's all-reduce, torchft's if it is
installed, and hivemind's if an interpreter that has it is given, all in one run on one machine, with the same number
of floats.

Utilisation: four peers, each behind a link of 100 Mbit/s and 25 ms each way, with inner steps of a fixed length that
simulate an accelerator: share of time that they compute, when waiting for each outcome and with overlapped transfers.

Extrapolation (`paper`): round time and utilisation of 1B and 10B parameters on 4 and 14 sites, from the bytes and the
seconds per element measured here.
"""

import argparse
import importlib.util
import math
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from common import build_parser, finish
from diloco_processes import (
    Work,
    find_ports,
    make_context,
    make_plan,
    run_workers,
    serve_reducer,
    serve_slow,
    sync_gloo,
    sync_http,
    sync_torchft,
    train_peer,
)
from diloco_rival import time_hivemind
from shoal.diloco.codecs import encode_feedback, find_codec
from shoal.diloco.reduce import FinishedRound, apply_outcome, close_round
from shoal.diloco.round import Update
from shoal.diloco.state import start_state

RATE, DELAY_S = 100e6 / 8, 0.025
SIZES = (2_500_000, 25_000_000)
PEERS = (2, 4)
REPEATS = 4
CODECS = ("fp32", "int8", "int4")
WORK_PARAMETERS, WORK_STEP_S, WORK_INTERVAL = 2_500_000, 0.04, 50

FLOPS = 8 * 989e12 * 0.4
"""FLOP/s of an extrapolated site: 8 H100 (989 TFLOP/s dense bf16 by the data sheet) at 40 % utilisation"""
STEP_TOKENS = 1 << 19
"""tokens per inner step of an extrapolated site"""
REDUCER_RATE = 10e9 / 8
REDUCER_CORES = 8
"""threads that share the pieces of a vector (`shoal.diloco.background`)"""


@dataclass(frozen=True)
class Costs:
    """Core-seconds per element."""

    encode: float
    """an update, at its site"""
    reduce: float
    """each site's update, at the reducer"""
    apply: float
    """an outcome, at a site: decode, outer step, hash"""


@dataclass(frozen=True)
class Row:
    """One line of the extrapolated table."""

    parameters: float
    sites: int
    rate: float
    sync_s: float
    step_s: float

    @property
    def waiting_steps(self) -> int:
        """H for 95 % utilisation if every round is waited for."""
        return math.ceil(19 * self.sync_s / self.step_s)

    @property
    def overlapped_steps(self) -> int:
        """H for no waiting if the whole transfer is overlapped."""
        return math.ceil(self.sync_s / self.step_s)

    def find_share(self, interval: int) -> float:
        """Utilisation at this H without overlap."""
        return interval * self.step_s / (interval * self.step_s + self.sync_s)


def main() -> None:
    flags = parse_flags()
    context = make_context()
    lines: list[str] = []
    figures: dict[str, float] = {}
    if flags.only in (None, "sync"):
        lines, figures = measure_sync(context, SIZES[:1] if flags.quick else SIZES, REPEATS, flags.hivemind)
    if flags.only in (None, "utilisation"):
        waiting, overlapped = measure_utilisation(context, 4 if flags.quick else 8)
        figures |= {"utilisation": overlapped, "utilisation_waiting": waiting}
        lines += ["", f"utilisation of 4 peers at 100 Mbit/s, 50 ms round trip, {WORK_PARAMETERS:,} parameters,"]
        lines += [f"int4, rounds of {WORK_INTERVAL} steps of {1000 * WORK_STEP_S:.0f} ms:"]
        lines += [f"  every outcome waited for {waiting:.1%}, transfer overlapped {overlapped:.1%}"]
    if flags.only in (None, "paper"):
        costs = min((measure_costs(SIZES[0]) for _ in range(5)), key=lambda found: found.reduce)
        figures |= {f"{name}_ns_per_element": 1e9 * seconds for name, seconds in costs.__dict__.items()}
        lines += ["", *format_paper(make_table(costs))]
    finish(flags, "\n".join(lines), figures)


def parse_flags() -> argparse.Namespace:
    """The flags of every benchmark, and the selection of parts."""
    parser = build_parser("DiLoCo's engine over a network: sync time, utilisation, extrapolation")
    parser.add_argument("--only", choices=("sync", "utilisation", "paper"), help="one of the three parts")
    parser.add_argument("--hivemind", metavar="PYTHON", help="an interpreter that has hivemind 1.1.12")
    return parser.parse_args()


def measure_sync(
    context: Any, sizes: tuple[int, ...], repeats: int, hivemind: str | None
) -> tuple[list[str], dict[str, float]]:
    """Seconds per sync of every available engine."""
    lines, figures = ["sync, seconds (median of the slowest peer, without the first round)"], {}
    for size in sizes:
        for count in PEERS:
            cells = {codec: time_http(context, size, count, codec, repeats) for codec in CODECS}
            cells["gloo"] = pick_time(run_workers(context, sync_gloo, count, size, find_ports(1)[0], repeats))
            if importlib.util.find_spec("torchft") is not None:
                cells["torchft"] = time_torchft(context, size, count, repeats)
            if hivemind:
                cells["hivemind"] = time_hivemind(hivemind, size, count, "fp32", repeats)
            shown = ", ".join(f"{name} {seconds:.3f}" for name, seconds in cells.items())
            lines.append(f"  {size / 1e6:g}M floats, {count} peers: {shown}")
            print(lines[-1], file=sys.stderr, flush=True)
            figures |= {f"sync_{name}_{size // 100_000}e5_{count}": seconds for name, seconds in cells.items()}
    if importlib.util.find_spec("torchft") is None:
        lines.append("  torchft: not measured, not installed (pip install torchft==0.2.0)")
    if not hivemind:
        lines.append("  hivemind: not measured (--hivemind PYTHON)")
    return lines, figures


def time_http(context: Any, size: int, count: int, codec: str, repeats: int) -> float:
    """Seconds per round of this package's engine."""
    plan = make_plan(size, codec)
    with serve_reducer(context, plan, count) as (port, reducer):
        return pick_time(run_workers(context, sync_http, count, plan, port, reducer, repeats))


def time_torchft(context: Any, size: int, count: int, repeats: int) -> float:
    """Seconds per sync of torchft's manager over gloo."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=count, join_timeout_ms=10_000)
    try:
        return pick_time(run_workers(context, sync_torchft, count, size, lighthouse.address(), repeats))
    finally:
        lighthouse.shutdown()


def pick_time(times: list[list[float]]) -> float:
    """The median over rounds of the slowest peer, without the first round, which sets up connections and buffers."""
    return median([max(row) for row in zip(*times, strict=True)][1:])


def measure_costs(size: int) -> Costs:
    """CPU seconds per element on one core, for four updates into a round and out of it."""
    plan, state = make_plan(size, "int4"), start_state((np.zeros(size, dtype=np.float32),))
    key, codec, random = plan.name_round(state, 0), find_codec("int4"), np.random.default_rng(0)
    vectors = [random.standard_normal(size, dtype=np.float32) for _ in range(4)]
    start = time.process_time()
    payloads = [encode_feedback(codec, vector, vector)[0] for vector in vectors]
    encoded = time.process_time()
    updates = [Update(key, f"{n:064x}", 1, 1, payload, "int4") for n, payload in enumerate(payloads)]
    closed = close_round(plan, state, key, updates)
    reduced = time.process_time()
    assert isinstance(closed, FinishedRound), "the updates were not averaged"
    apply_outcome(plan, start_state((np.zeros(size, dtype=np.float32),)), closed.outcome)
    applied = time.process_time()
    return Costs((encoded - start) / 4 / size, (reduced - encoded) / 4 / size, (applied - reduced) / size)


def measure_utilisation(context: Any, rounds: int) -> tuple[float, float]:
    """Mean share of time spent computing, without and with overlap."""
    shares = []
    for delay in (0, WORK_INTERVAL * 3 // 5):
        plan = make_plan(WORK_PARAMETERS, "int4", WORK_INTERVAL)
        work = Work(rounds, WORK_STEP_S, delay)
        with (
            serve_reducer(context, plan, 4) as (port, reducer),
            serve_slow(context, port, 4, RATE, DELAY_S) as ports,
        ):
            found = run_workers(context, train_peer, 4, plan, ports, reducer, work)
        shares.append(sum(share for share, _ in found) / len(found))
    return shares[0], shares[1]


def make_table(costs: Costs) -> list[Row]:
    """1B and 10B parameters on 4 and 14 sites, from 100 Mbit/s to 1 Gbit/s."""
    return [
        make_row(costs, parameters, sites, rate)
        for parameters in (1e9, 1e10)
        for sites in (4, 14)
        for rate in (100e6 / 8, 300e6 / 8, 1e9 / 8)
    ]


def make_row(costs: Costs, parameters: float, sites: int, rate: float) -> Row:
    """The formula of docs/diloco_engine.md."""
    payload = float(find_codec("int4").count_bytes(int(parameters)))
    # The reducer's link carries every site's payload, up and down, one after the other.
    way_s = 2 * max(payload / rate, sites * payload / REDUCER_RATE)
    reduce_s = costs.reduce * sites * parameters / REDUCER_CORES
    own_s = (costs.encode + costs.apply) * parameters
    return Row(parameters, sites, rate, way_s + reduce_s + own_s + 8 * DELAY_S, 6 * parameters * STEP_TOKENS / FLOPS)


def format_paper(rows: list[Row]) -> list[str]:
    """The table, in Markdown."""
    heads = ("parameters", "sites", "link", "sync", "100 steps", "waiting", "overlapped", "H for 95 %", "H overlapped")
    lines = [
        f"| {' | '.join(heads)} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        overlapped = min(1.0, 100 * row.step_s / row.sync_s)
        cells = [
            f"{row.parameters / 1e9:g}B",
            str(row.sites),
            f"{row.rate * 8 / 1e6:g} Mbit/s",
            f"{row.sync_s:.0f} s",
            f"{100 * row.step_s:.0f} s",
            f"{row.find_share(100):.0%}",
            f"{overlapped:.0%}",
            str(row.waiting_steps),
            str(row.overlapped_steps),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
