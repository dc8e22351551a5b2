"""Weights from publisher to client: shoal's shardcast compared with the published package, nginx with curl, and a copy.

    python bench/shardcast.py [--quick] [--json] [--reference PYTHON] [--only PART ...]

Everything runs as real processes on this machine and ends with the right hash on disk. Ratios are peer / shoal of the
same round, medians over rounds, above 1 where shoal is faster. Parts and their figures:
    path    one file of random bytes, nodes running, from the call of `publish` to the verified folder at the client,
            through one relay: seconds, cpu_seconds (all processes), anon_mb (largest anonymous memory of a process),
              vs_shardcast       origin, middle and client of the published package, polling every second
              vs_nginx           nginx and curl, without a relay, then BLAKE3 of the file
              vs_nginx_relayed   the same with a second, caching nginx in between
              vs_copy            `cp` on the same disk, then SHA-256; vs_copy_blake3: then BLAKE3
              direct_vs_nginx    shoal without the relay, compared with the same nginx
    fan     1 origin, 2 relays, 4 clients: fan_seconds to the last client; fan_vs_nginx: nginx and 4 curls, no relays
    chain   1 to 4 links in series, each 200 Mbit/s and 20 ms one way: depth_growth is the mean growth of the
            time to the leaf per link, chain_share the leaf's rate behind 4 links as a share of a link's
    mixed   three relays behind links: 400 Mbit/s, a quarter of it, 400 Mbit/s with half of all requests failing.
            vs_best: rate of a client with all three over that with the first alone; vs_even: over that of a client that
            draws them evenly

The published package runs in another Python that has it (`pip install shardcast==0.3.2`, and wget): `--reference`, or
the variable SHARDCAST_PYTHON. Missing peers are skipped with a message. Links are bench/shardcast_link.py.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from common import build_parser, finish, mean
from shardcast_chart import draw_picture
from shardcast_peers import find_missing, run_copy, run_nginx, run_reference
from shardcast_processes import Reading, end_on_signal
from shardcast_sample import Job, Runs, Sample, interleave, make_sample
from shardcast_trees import ALONE, EVEN, WEIGHED, run_chain, run_mixed, run_tree

FULL = {"path": (1 << 30, 3), "fan": (1 << 29, 3), "chain": (1 << 28, 3), "mixed": (1 << 29, 3)}
"""bytes and rounds of each part"""
QUICK = {"path": (1 << 28, 2), "fan": (1 << 27, 1), "chain": (3 << 25, 1), "mixed": (1 << 27, 2)}
DEPTHS = (1, 2, 3, 4)
LINK_RATE, LINK_DELAY_S = 25e6, 0.02
MIXED_RATE = 50e6
RELAYED, DIRECT, NGINX = "shoal, 1 relay", "shoal", "nginx, curl, blake3"
PEERS = {
    "shardcast 0.3.2, 1 relay": "vs_shardcast",
    NGINX: "vs_nginx",
    "nginx, nginx, curl, blake3": "vs_nginx_relayed",
    "cp, sha256": "vs_copy",
    "cp, blake3": "vs_copy_blake3",
}

Figures = dict[str, float]
Measure = Callable[[Sample, int, str | None, Figures], Runs]


def main() -> None:
    flags = parse_flags()
    end_on_signal()
    measures: dict[str, Measure] = {
        "path": measure_path,
        "fan": measure_fan,
        "chain": measure_chain,
        "mixed": measure_mixed,
    }
    tables: list[str] = []
    figures: Figures = {}
    results: dict[str, Runs] = {}
    sizes = QUICK if flags.quick else FULL
    for part in flags.only:
        num_bytes, rounds = sizes[part]
        with make_sample(num_bytes) as sample:
            results[part] = measures[part](sample, rounds, flags.reference, figures)
        tables.append(f"{part}, {num_bytes >> 20} MiB, {rounds} rounds\n\n{format_table(results[part], num_bytes)}")
    tables += [f"skipped: {name}: {reason}" for name, reason in find_missing(flags.reference).items()]
    if not flags.quick and set(results) == set(FULL):
        draw_picture(results, link_s=FULL["chain"][0] / LINK_RATE, mixed_bytes=FULL["mixed"][0])
    finish(flags, "\n\n".join(tables), figures)


def parse_flags() -> argparse.Namespace:
    """The flags of every benchmark, and those of this one."""
    parser = build_parser(__doc__.splitlines()[0])
    python = os.environ.get("SHARDCAST_PYTHON")
    parser.add_argument("--reference", metavar="PYTHON", default=python, help="a Python that has shardcast 0.3.2")
    parser.add_argument("--only", nargs="+", choices=tuple(FULL), default=tuple(FULL), help="parts to run (all)")
    return parser.parse_args()


def measure_path(sample: Sample, rounds: int, reference: str | None, figures: Figures) -> Runs:
    """One relay, one client, compared with all peers."""
    missing = find_missing(reference)
    jobs: dict[str, Job] = {
        RELAYED: lambda folder: run_tree(sample, folder, relays=1, clients=1),
        DIRECT: lambda folder: run_tree(sample, folder, relays=0, clients=1),
        "cp, blake3": lambda folder: run_copy(sample, folder),
        "cp, sha256": lambda folder: run_copy(sample, folder, sha256=True),
    }
    if "nginx" not in missing:
        jobs[NGINX] = lambda folder: run_nginx(sample, folder)
        jobs["nginx, nginx, curl, blake3"] = lambda folder: run_nginx(sample, folder, hops=2)
    if reference is not None and "shardcast" not in missing:
        jobs["shardcast 0.3.2, 1 relay"] = lambda folder: run_reference(reference, sample, folder)
    runs = interleave(jobs, sample, rounds)
    ours = runs[RELAYED]
    figures |= {key: compare_runs(runs[name], ours) for name, key in PEERS.items() if name in runs}
    if NGINX in runs:
        figures["direct_vs_nginx"] = compare_runs(runs[NGINX], runs[DIRECT])
    figures["seconds"] = median(run.seconds for run in ours)
    figures["cpu_seconds"] = median(sum(run.cpu_s.values()) for run in ours)
    figures["anon_mb"] = max(run.anon_mb for run in ours)
    return runs


def measure_fan(sample: Sample, rounds: int, _: str | None, figures: Figures) -> Runs:
    """Four clients that know two relays."""
    ours, nginx = "shoal, 2 relays, 4 clients", "nginx, 4 x (curl, blake3)"
    jobs: dict[str, Job] = {ours: lambda folder: run_tree(sample, folder, relays=2, clients=4)}
    if "nginx" not in find_missing(None):
        jobs[nginx] = lambda folder: run_nginx(sample, folder, clients=4)
    runs = interleave(jobs, sample, rounds)
    figures["fan_seconds"] = median(run.seconds for run in runs[ours])
    if nginx in runs:
        figures["fan_vs_nginx"] = compare_runs(runs[nginx], runs[ours])
    return runs


def measure_chain(sample: Sample, rounds: int, _: str | None, figures: Figures) -> Runs:
    """Links in series."""

    def run_depth(depth: int) -> Job:
        return lambda folder: run_chain(sample, folder, depth=depth, rate=LINK_RATE, delay_s=LINK_DELAY_S)

    runs = interleave({f"depth {depth}": run_depth(depth) for depth in DEPTHS}, sample, rounds)
    times = [median(run.seconds for run in readings) for readings in runs.values()]
    figures["depth_growth"] = grow_rate(times)
    figures["chain_share"] = sample.num_bytes / LINK_RATE / times[-1]
    return runs


def measure_mixed(sample: Sample, rounds: int, _: str | None, figures: Figures) -> Runs:
    """Unequal relays."""
    runs = run_mixed(sample, rounds=rounds, rate=MIXED_RATE)
    figures["vs_best"] = compare_runs(runs[ALONE], runs[WEIGHED])
    figures["vs_even"] = compare_runs(runs[EVEN], runs[WEIGHED])
    return runs


def compare_runs(theirs: Sequence[Reading], ours: Sequence[Reading]) -> float:
    """Median over rounds of their time over ours."""
    return median(their.seconds / our.seconds for their, our in zip(theirs, ours, strict=True))


def grow_rate(times: Sequence[float]) -> float:
    """Mean relative growth from each value to the next."""
    return mean([after / before - 1 for before, after in pairwise(times)])


def format_table(runs: Runs, num_bytes: int) -> str:
    """Medians, with the CPU time of each process."""
    rows = ["| run | seconds | least - most | MiB/s | CPU s | of these | anon MB |", "|---|---|---|---|---|---|---|"]
    for name, readings in runs.items():
        times = sorted(run.seconds for run in readings)
        rate = num_bytes / 2**20 / median(times)
        cpu = {part: median(run.cpu_s[part] for run in readings) for part in readings[0].cpu_s}
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in cpu.items())
        rows.append(
            f"| {name} | {median(times):.2f} | {times[0]:.2f} - {times[-1]:.2f} | {rate:.0f} "
            f"| {sum(cpu.values()):.2f} | {parts} | {max(run.anon_mb for run in readings):.0f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
