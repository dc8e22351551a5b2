"""This tree compared with an earlier checkout, alternating on one machine: heartbeats, a 1 GiB broadcast, the demo.

    python bench/regression.py --base DIR [--quick] [--json] [--only PART ...] [--rounds N]

`DIR` is a checkout of the earlier commit with its own `.venv` (`git worktree add DIR COMMIT && make -C DIR
.venv/.dev`). Each round runs every part in both trees, in alternating order. Figures are ratios, medians over rounds,
above 1 where this tree is better:
    beats    signed heartbeats per CPU second of the coordinator (bench/coordinator.py --only beats)
    path     seconds for 1 GiB, origin, relay, client, verified (bench/shardcast.py --only path; --quick: 256 MiB)
    demo     seconds of `shoal demo`, SFT included (--quick: not run)
    verify   CPU seconds of `shoal ledger verify` on the recorded ledger in tests/recorded (only by --only: `DIR` must
             have the same rules edition)
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import ROOT, build_parser, finish

PARTS = ("beats", "path", "demo", "verify")
TIMEOUT_S = 1800

Measure = Callable[[Path, bool], float]


def main() -> None:
    flags = parse_flags()
    trees = {"base": flags.base.resolve(), "this": ROOT}
    parts = [part for part in flags.only if not (flags.quick and part == "demo")]
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in parts}
    for number in range(flags.rounds):
        for part in parts:
            order = ("base", "this") if number % 2 == 0 else ("this", "base")
            values = {name: MEASURES[part](trees[name], flags.quick) for name in order}
            found[part].append((values["base"], values["this"]))
            print(f"round {number + 1}: {part}: base {values['base']:.4g}, this {values['this']:.4g}", file=sys.stderr)
    figures, rows = {}, []
    for part, pairs in found.items():
        ratio = median(this / base if part == "beats" else base / this for base, this in pairs)
        figures[f"{part}_ratio"] = ratio
        rows.append(f"{part:8} {ratio:.3f}  " + "  ".join(f"{base:.4g} -> {this:.4g}" for base, this in pairs))
    finish(flags, "\n".join(["part     ratio  base -> this, by round", *rows]), figures)


def parse_flags() -> argparse.Namespace:
    """The flags of every benchmark, and those of this one."""
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="a checkout of the earlier commit")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:-1], help="parts to run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both trees (3)")
    flags = parser.parse_args()
    if not (flags.base / ".venv" / "bin" / "python").exists():
        parser.error(f"--base: {flags.base} has no .venv; run `make -C {flags.base} .venv/.dev` first")
    return flags


def measure_beats(tree: Path, quick: bool) -> float:
    """Heartbeats per CPU second."""
    return run_bench(tree, "coordinator", quick, "--only", "beats")["beats_per_cpu_s"]


def measure_path(tree: Path, quick: bool) -> float:
    """Seconds of a broadcast."""
    return run_bench(tree, "shardcast", quick, "--only", "path")["seconds"]


def measure_demo(tree: Path, _: bool) -> float:
    """Seconds of the demo in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        start = time.monotonic()
        run(tree, [str(tree / ".venv/bin/shoal"), "demo"], cwd=Path(folder))
        return time.monotonic() - start


def measure_verify(tree: Path, quick: bool) -> float:
    """CPU seconds of an audit, without the start of the interpreter."""
    recorded = ROOT / "tests/recorded/data/run/ledger.db.gz"
    shoal = str(tree / ".venv/bin/shoal")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        ledger = Path(folder) / "ledger.db"
        ledger.write_bytes(gzip.decompress(recorded.read_bytes()))
        idle = [time_cpu(tree, [shoal, "ledger", "verify", "--help"]) for _ in range(2 if quick else 5)]
        busy = [time_cpu(tree, [shoal, "ledger", "verify", str(ledger)]) for _ in range(2 if quick else 5)]
    return median(busy) - median(idle)


MEASURES: dict[str, Measure] = {
    "beats": measure_beats,
    "path": measure_path,
    "demo": measure_demo,
    "verify": measure_verify,
}


def run_bench(tree: Path, name: str, quick: bool, *words: str) -> dict[str, float]:
    """The figures that a benchmark of a tree prints."""
    command = [str(tree / ".venv/bin/python"), str(tree / f"bench/{name}.py"), "--json", *words]
    printed = run(tree, [*command, "--quick"] if quick else command, cwd=tree)
    return json.loads(printed.splitlines()[-1])


def time_cpu(tree: Path, command: list[str]) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(tree, command, cwd=tree)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(tree: Path, command: list[str], *, cwd: Path) -> str:
    """The output of a command; if it fails, the benchmark ends with the end of its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} in {tree} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
