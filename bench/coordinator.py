"""The coordinator under load: signed heartbeats, cycles from lease to verdict, many nodes, slow sockets.

    python bench/coordinator.py [--quick] [--json] [--only PART ...]

The server has one core; the load, PostgreSQL and everything else share another. Requests are signed beforehand, except
those of a cycle, which depend on each other. Parts and their figures:
    beats   heartbeats as fast as they are answered, 64 connections, in turn with a bare FastAPI (uvicorn, h11, the same
            messages, nothing checked) and with Ed25519 alone on the same core. beats_per_s, beats_per_cpu_s, p50, p99;
            vs_fastapi, vs_ed25519: ours over theirs, per CPU second, medians over rounds
    cycles  lease, commit, upload of 20 kB, claim, verdict, each of them durable before it is answered, 32 pairs of
            a node and a validator at once, on SQLite and PostgreSQL: cycles_per_s, cycles_per_cpu_s, p50 and p99 of the
            lease
    nodes   nodes that send a heartbeat every 10 s, each on its own connection, and do a cycle every 10 minutes:
            the largest number, in steps, for which all heartbeats are answered with p99 below 0.25 s: nodes_per_core.
            nodes_by_cpu: the number that would use up the core, from the CPU time at the largest number that was
            sustained (or at the first, if none was); unlike the other figure it hardly depends on the machine's load
    slow    heartbeats of 5,000 nodes next to 2,000 sockets that send one byte per second: slow_p99_s
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import build_parser, finish
from coordinator_processes import Process, find_postgres, run_load, start_postgres, start_server

PARTS = ("beats", "cycles", "nodes", "slow")
HEARTBEAT_S = 10
CYCLE_EVERY_S = 600
NODES_P99_S = 0.25
BEAT_NODES, CYCLE_NODES = 256, 32
LADDER = (2500, 5000, 7500, 10_000, 12_500, 15_000)
QUICK_LADDER = (2500, 5000, 10_000)
SLOW_NODES, SLOW_SOCKETS = 5000, 2000

Figures = dict[str, float]


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    flags = parser.parse_args()
    if "beats" in flags.only and importlib.util.find_spec("fastapi") is None:
        raise SystemExit("`beats` is compared with FastAPI, which is not installed; `make bench` installs it")
    figures: Figures = {}
    tables = []
    measures = {"beats": measure_beats, "cycles": measure_cycles, "nodes": measure_nodes, "slow": measure_slow}
    for part in flags.only:
        tables.append(measures[part](flags.quick, figures))
    finish(flags, "\n\n".join(tables), figures)


def measure_beats(quick: bool, figures: Figures) -> str:
    """Closed-loop heartbeats, compared with a server that checks nothing and with the signature check alone."""
    rounds, count = (2, 3000) if quick else (5, 8000)
    lines: dict[str, list[Figures]] = {"shoal": [], "FastAPI, bare": []}
    verifies = []
    with (
        open_run(BEAT_NODES) as (ours, port),
        start_server("fastapi") as (peer, peer_port),
        start_server("verify") as (verify, _),
    ):
        for _ in range(rounds):
            verifies.append(verify.ask()["per_s"])
            lines["FastAPI, bare"].append(flood_server(peer, peer_port, count))
            lines["shoal"].append(flood_server(ours, port, count))
    own = lines["shoal"]
    figures |= {
        "beats_per_s": median(line["per_s"] for line in own),
        "beats_per_cpu_s": median(line["per_cpu_s"] for line in own),
        "beat_p50_ms": median(line["p50_ms"] for line in own),
        "beat_p99_ms": median(line["p99_ms"] for line in own),
        "vs_fastapi": median(
            mine["per_cpu_s"] / other["per_cpu_s"] for mine, other in zip(own, lines["FastAPI, bare"], strict=True)
        ),
        "vs_ed25519": median(mine["per_cpu_s"] / limit for mine, limit in zip(own, verifies, strict=True)),
        "ed25519_per_s": median(verifies),
    }
    table = [f"heartbeats, {rounds} rounds of {count}, 64 connections", "", row_head("")]
    table += [row_rates(name, found) for name, found in lines.items()]
    return "\n".join([*table, f"{'Ed25519 alone':<24}{'':>10}{median(verifies):>12,.0f}"])


def flood_server(server: Process, port: int, count: int) -> Figures:
    """Heartbeats from two processes as fast as they are answered."""
    half = BEAT_NODES // 2
    tasks = [
        {"kind": "flood", "port": port, "first": first, "nodes": half, "count": count // 2, "connections": 32}
        for first in (0, half)
    ]
    found, cpu_s = run_load(*tasks, server=server)
    return rate_load(found, cpu_s)


def rate_load(found: list[dict[str, Any]], cpu_s: float) -> Figures:
    waits = sorted(wait for one in found for wait in one["waits"])
    bad = {status: count for one in found for status, count in one["statuses"].items() if status != "200"}
    assert not bad, f"refused: {bad}"
    seconds = max(one["seconds"] for one in found)
    return {
        "per_s": len(waits) / seconds,
        "per_cpu_s": len(waits) / cpu_s,
        "busy": cpu_s / seconds,
        "cpu_s": cpu_s,
        "p50_ms": 1000 * pick_share(waits, 0.5),
        "p99_ms": 1000 * pick_share(waits, 0.99),
    }


def measure_cycles(quick: bool, figures: Figures) -> str:
    """From lease to verdict, on both databases."""
    seconds, rounds = (4, 1) if quick else (8, 3)
    table = [f"cycles, {rounds} rounds of {seconds} s, {CYCLE_NODES} nodes, as many validators", "", row_head("lease")]
    tools = find_postgres()
    results: dict[str, list[Figures]] = {"SQLite": []}
    if tools is None:
        table.append("PostgreSQL: skipped, not installed")
    else:
        results["PostgreSQL"] = []
    for _ in range(rounds):
        results["SQLite"].append(run_cycles("", seconds))
        if tools is not None:
            with start_postgres(tools) as url:
                results["PostgreSQL"].append(run_cycles(url, seconds))
    for name, found in results.items():
        table.append(row_rates(name, found))
        prefix = "cycle" if name == "SQLite" else "pg_cycle"
        figures[f"{prefix}s_per_s"] = median(one["per_s"] for one in found)
        figures[f"{prefix}s_per_cpu_s"] = median(one["per_cpu_s"] for one in found)
        figures[f"{prefix}_lease_p50_ms"] = median(one["p50_ms"] for one in found)
        figures[f"{prefix}_lease_p99_ms"] = median(one["p99_ms"] for one in found)
    return "\n".join(table)


def run_cycles(database: str, seconds: float) -> Figures:
    with open_run(CYCLE_NODES, database) as (server, port):
        half = CYCLE_NODES // 2
        tasks = [
            {"kind": "cycle", "port": port, "first": first, "nodes": half, "seconds": seconds, "rate": 0}
            for first in (0, half)
        ]
        found, cpu_s = run_load(*tasks, server=server)
    cycles = sum(len(one["spans"]) for one in found)
    spent = max(one["seconds"] for one in found)
    return {**rate_load(found, cpu_s), "per_s": cycles / spent, "per_cpu_s": cycles / cpu_s}


def measure_nodes(quick: bool, figures: Figures) -> str:
    """More and more nodes, until heartbeats are late."""
    seconds, rounds = (6, 1) if quick else (12, 2)
    table = [
        f"nodes, {seconds} s each, best of {rounds}; heartbeat every {HEARTBEAT_S} s, cycle every {CYCLE_EVERY_S} s",
        "",
        f"{'nodes':<24}{'beats/s':>10}{'core busy':>12}{'p50 ms':>10}{'p99 ms':>10}",
    ]
    ladder = QUICK_LADDER if quick else LADDER
    held, by_cpu = 0, 0.0
    with open_run(max(ladder)) as (server, port):
        for nodes in ladder:
            found = min(
                (pace_nodes(server, port, nodes, seconds) for _ in range(rounds)), key=lambda one: one["p99_ms"]
            )
            table.append(row_paced(f"{nodes:,}", found))
            figures |= {f"busy_{nodes}": found["busy"], f"p99_ms_{nodes}": found["p99_ms"]}
            by_cpu = nodes * seconds / found["cpu_s"] if nodes == ladder[0] or not is_late(found) else by_cpu
            if is_late(found):
                break
            held = nodes
    figures |= {"nodes_per_core": held, "nodes_by_cpu": by_cpu}
    return "\n".join([*table, f"by CPU time{'':<13}{by_cpu:>10,.0f}"])


def is_late(found: Figures) -> bool:
    """Whether heartbeats waited too long, or were never answered."""
    return found["p99_ms"] > 1000 * NODES_P99_S or found["unanswered"] > 0


def pace_nodes(server: Process, port: int, nodes: int, seconds: float, *more: dict[str, Any]) -> Figures:
    """Heartbeats of that many nodes, and their cycles."""
    half = nodes // 2
    pace = {"kind": "pace", "port": port, "nodes": half, "rate": half / HEARTBEAT_S, "seconds": seconds}
    cycles = {"kind": "cycle", "port": port, "first": 0, "nodes": 16, "seconds": seconds}
    cycles["rate"] = nodes / CYCLE_EVERY_S
    tasks = [{**pace, "first": 0}, {**pace, "first": half}, cycles, *more]
    found, cpu_s = run_load(*tasks, server=server)
    beats = found[:2]
    return {**rate_load(beats, cpu_s), "unanswered": sum(one["unanswered"] for one in beats)}


def measure_slow(quick: bool, figures: Figures) -> str:
    """Heartbeats next to sockets that never finish a request head."""
    seconds = 10 if quick else 25
    with open_run(SLOW_NODES) as (server, port):
        calm = pace_nodes(server, port, SLOW_NODES, seconds)
        slow = {"kind": "dribble", "port": port, "sockets": SLOW_SOCKETS, "seconds": seconds}
        found = pace_nodes(server, port, SLOW_NODES, seconds, slow)
    figures |= {"slow_p99_s": found["p99_ms"] / 1000, "calm_p99_s": calm["p99_ms"] / 1000}
    return "\n".join(
        [
            f"{SLOW_NODES:,} nodes, {seconds} s, with {SLOW_SOCKETS:,} sockets that send one byte per second",
            "",
            f"{'':<24}{'beats/s':>10}{'core busy':>12}{'p50 ms':>10}{'p99 ms':>10}",
            row_paced("without", calm),
            row_paced("with", found),
        ]
    )


@contextmanager
def open_run(nodes: int, database: str = "") -> Iterator[tuple[Process, int]]:
    """A coordinator with that many nodes, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        flags = ["--data", str(Path(folder) / "data"), "--nodes", str(nodes), "--database", database]
        with start_server("shoal", *flags) as pair:
            yield pair


def row_head(what: str) -> str:
    return f"{'':<24}{'per s':>10}{'per CPU s':>12}{f'{what} p50 ms':>16}{f'{what} p99 ms':>16}"


def row_paced(name: str, found: Figures) -> str:
    per_s, busy = f"{found['per_s']:,.0f}", f"{found['busy']:.0%}"
    return f"{name:<24}{per_s:>10}{busy:>12}{found['p50_ms']:>10.1f}{found['p99_ms']:>10.1f}"


def row_rates(name: str, found: list[Figures]) -> str:
    per_s, per_cpu_s, p50, p99 = (
        median(one[key] for one in found) for key in ("per_s", "per_cpu_s", "p50_ms", "p99_ms")
    )
    return f"{name:<24}{per_s:>10,.0f}{per_cpu_s:>12,.0f}{p50:>16.1f}{p99:>16.1f}"


def pick_share(ordered: list[float], share: float) -> float:
    """The quantile of a sorted list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
