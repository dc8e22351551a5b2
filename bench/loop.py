"""Cost of the loop: a swarm from prompts to trained gradients, and where its CPU time goes.

    python bench/loop.py [--quick] [--json] [--only ROW ...] [--steps N] [--set key=value ...]

`shoal run examples/demo.toml` is started as a user would start it, with fewer steps; the result of `shoal prepare` is
reused. From the end of the warm-up steps to the last step, the CPU time of every process is read from /proc, including
the file readers, and inside each role that of its stages (bench/loop_probe, thread CPU time around the calls). Model
compute is the engine's steps, the validators' prefill, the learner's passes and update, and the evaluator's engine.
Everything else is overhead. Rows:
    demo    the demo as it is: answers of 8 to 11 digits and a model of 0.6 million parameters
    long    the same model with answers of 20 to 22 digits
    large   these answers, and a model of 3 million parameters
Figures, prefixed with the name of the row except for the demo:
    tokens_per_s                  of completions, from prompt to trained gradient; generated_per_s: all generated tokens
    overhead_cpu_share            CPU time other than model compute, of all CPU time; the goal is below 0.10
    start_cpu_s                   CPU time before that: imports, first weights, first steps
    control_bytes_per_rollout     to and from the coordinator, including files; file_bytes_per_rollout: each file once
    cast_bytes_per_rollout        sent by origin and relay
    control_cpu_ms_per_rollout    of the coordinator, and of all roles for communicating with it
    overhead_ms_ROLE              CPU time other than model compute per rollout, by role
    share_STAGE                   of all CPU
A rollout is one that a worker submitted; most are not trained, because the filter only takes groups with a signal.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import OUT, ROOT, finish
from loop_probe.loop_stages import FOLDER, STAGES
from loop_watch import Part, Snapshot, Watch
from shoal.train.report import read_metrics

PROBE = Path(__file__).resolve().parent / "loop_probe"
LOOK_S, LIMIT_S = 0.1, 900.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LONG = (
    "tasks.options.min_length=20",
    "tasks.options.max_length=22",
    "sft.options.min_length=12",
    "sft.options.max_length=20",
    "engine.max_tokens=24",
)
ROWS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "long": LONG,
    "large": (*LONG, "policy.tiny.width=256", "policy.tiny.layers=4", "sft.batch=64", "sft.lr=1.5e-3"),
}
CONTROL = ("lease", "commit", "upload", "heartbeat", "claim", "fetch", "verdict")
"""stages of a role in which it communicates with the coordinator"""
ENGINE = ("evaluator", "generate")
"""the stage of a role that has its own name in the table"""
MODEL = tuple(stage.name for stage in STAGES if stage.is_model)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One swarm between two of its steps."""

    start: Snapshot
    parts: Snapshot
    """what was added after the start"""
    seconds: float
    trained: float
    """tokens"""

    def sum(self, of: str, *names: str) -> float:
        """A counter over all parts, or over those whose names begin with one of `names`."""
        return sum(part.counts[of] for name, part in self.parts.items() if not names or name.startswith(names))

    @property
    def cpu_s(self) -> float:
        return sum(part.cpu_s for part in self.parts.values())

    @property
    def model_s(self) -> float:
        return sum(count_model(part) for part in self.parts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller size that still shows the effect")
    parser.add_argument("--json", action="store_true", help="print only one line: a JSON object of named figures")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="rows to run (all)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="override settings of every row")
    parser.add_argument("--steps", type=int, help="steps of each row; the first few are not measured (16; quick: 8)")
    flags = parser.parse_args()
    steps, warm = flags.steps or (8 if flags.quick else 16), 3
    figures: Figures = {}
    tables = []
    for row in flags.only:
        found = measure_swarm(row, [f"steps={steps}", *ROWS[row], *flags.set], warm=warm, steps=steps)
        figures |= {name if row == "demo" else f"{row}_{name}": value for name, value in rate_swarm(found).items()}
        tables.append(draw_table(f"{row}: steps {warm + 1} to {steps}", found))
    finish(flags, "\n\n".join(tables), figures)


def measure_swarm(row: str, overrides: Sequence[str], *, warm: int, steps: int) -> Measured:
    """Run a swarm to its end; returns what it cost after step `warm`."""
    root = OUT / f"loop-{row}-seed0"
    prepare_swarm(root, overrides)
    with tempfile.TemporaryDirectory(prefix="shoal-loop-") as probes, start_swarm(root, overrides, probes) as process:
        watch, metrics = Watch(process.pid, Path(probes)), root / "metrics.jsonl"
        start, begun_s = await_step(process, watch, metrics, warm)
        end, ended_s = await_step(process, watch, metrics, steps)
        if process.wait(LIMIT_S):
            raise SystemExit(f"the swarm ended with {process.returncode}; see {root / 'logs'}")
    if idle := list_idle(end):
        raise SystemExit(f"stages that were never entered, whose time would count as overhead: {', '.join(idle)}")
    lines = [line for line in read_metrics(metrics) if warm < line["step"] <= steps]
    return Measured(
        start=start,
        parts={name: part.subtract(start.get(name, Part())) for name, part in end.items()},
        seconds=ended_s - begun_s,
        trained=sum(line["train/generated_tokens"] for line in lines),
    )


def prepare_swarm(root: Path, overrides: Sequence[str]) -> None:
    """A swarm that was never started, in its folder; the expensive parts are copied from an earlier one if possible."""
    ready = root.with_suffix(".ready")
    shutil.rmtree(root, ignore_errors=True)
    if ready.exists():
        shutil.copytree(ready, root)
    command = list_command("prepare", root, overrides)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ONE_THREAD)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    shutil.rmtree(ready, ignore_errors=True)
    shutil.copytree(root, ready)


def list_command(name: str, root: Path, overrides: Sequence[str]) -> list[str]:
    settings = (f"name={root.name.removesuffix('-seed0')}", f"out={root.parent}", *overrides)
    return [sys.executable, "-m", "shoal", name, str(ROOT / "examples" / "demo.toml"), *settings]


@contextmanager
def start_swarm(root: Path, overrides: Sequence[str], probes: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a prepared swarm with probes inside; it is stopped at the end of the block, whatever happens."""
    paths = os.pathsep.join([str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | ONE_THREAD | {FOLDER: probes, "PYTHONPATH": paths}
    with root.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(list_command("run", root, overrides), stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def await_step(process: subprocess.Popen[bytes], watch: Watch, metrics: Path, step: int) -> tuple[Snapshot, float]:
    """Cost of all processes when a step is recorded, and the time of that."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = watch.look()
        if metrics.exists() and any(line["step"] >= step for line in read_metrics(metrics)):
            return found, time.monotonic()
        if process.poll() is not None:
            raise SystemExit(f"the swarm ended with {process.returncode} before step {step}: {' '.join(process.args)}")  # type: ignore[arg-type]
        time.sleep(LOOK_S)
    raise SystemExit(f"no step {step} after {LIMIT_S:g} s")


def list_idle(found: Snapshot) -> list[str]:
    """Stages that no part has entered: the code has changed."""
    return [stage.name for stage in STAGES if not any(part.calls[stage.name] for part in found.values())]


def rate_swarm(found: Measured) -> Figures:
    """The named figures."""
    rollouts = found.sum("rollouts")
    control = found.sum("received_bytes", "coordinator") + found.sum("sent_bytes", "coordinator")
    figures = {
        "tokens_per_s": found.trained / found.seconds,
        "generated_per_s": found.sum("tokens") / found.seconds,
        "rollouts": rollouts,
        "tokens_per_rollout": found.sum("tokens") / rollouts,
        "seconds": found.seconds,
        "cpu_s": found.cpu_s,
        "overhead_cpu_share": 1 - found.model_s / found.cpu_s,
        "start_cpu_s": sum(part.cpu_s for part in found.start.values()),
        "control_bytes_per_rollout": control / rollouts,
        "file_bytes_per_rollout": found.sum("file_bytes") / rollouts,
        "cast_bytes_per_rollout": found.sum("sent_bytes", "origin", "relay") / rollouts,
        "control_cpu_ms_per_rollout": 1000 * count_control(found) / rollouts,
    }
    roles = group_roles(found.parts)
    figures |= {f"overhead_ms_{role}": 1000 * (part.cpu_s - count_model(part)) / rollouts for role, part in roles}
    shares = share_stages(found)
    return figures | {f"share_{name.replace(' ', '_').replace('-', '_')}": share for name, share in shares.items()}


def count_model(part: Part) -> float:
    return sum(part.stages[name] for name in MODEL)


def count_control(found: Measured) -> float:
    own = sum(part.cpu_s for name, part in found.parts.items() if name == "coordinator")
    return own + sum(part.stages[name] for part in found.parts.values() for name in CONTROL)


def group_roles(parts: Snapshot) -> list[tuple[str, Part]]:
    """Parts of the same kind together; a cheating worker counts as a worker."""
    roles: dict[str, Part] = {}
    for name, part in parts.items():
        role = name.rstrip("-0123456789").replace("cheat", "worker")
        roles[role] = roles.get(role, Part()).subtract(Part().subtract(part))
    return list(roles.items())


def share_stages(found: Measured) -> dict[str, float]:
    """The share of each stage in all CPU time; time outside of stages by role."""
    shares: Counter[str] = Counter()
    for role, part in group_roles(found.parts):
        own = Counter({"evaluate" if (role, name) == ENGINE else name: part.stages[name] for name in part.stages})
        own["reader"] = part.child_s
        own[f"rest of {role}"] = part.cpu_s - sum(own.values())
        shares.update(own)
    return {name: cpu_s / found.cpu_s for name, cpu_s in shares.most_common() if cpu_s > 0}


def draw_table(title: str, found: Measured) -> str:
    figures, rollouts = rate_swarm(found), found.sum("rollouts")
    lines = [
        f"{title}, {found.seconds:.1f} s, {rollouts:,.0f} rollouts of {figures['tokens_per_rollout']:.1f} tokens",
        "",
        f"{'tokens/s, prompt to gradient':<34}{figures['tokens_per_s']:>10,.0f}",
        f"{'tokens/s written':<34}{figures['generated_per_s']:>10,.0f}",
        f"{'CPU s, and before that':<34}{found.cpu_s:>10.1f}{figures['start_cpu_s']:>10.1f}",
        f"{'CPU that is not model compute':<34}{figures['overhead_cpu_share']:>10.1%}",
        f"{'control plane: bytes/rollout':<34}{figures['control_bytes_per_rollout']:>10,.0f}",
        f"{'    of which a file, once':<34}{figures['file_bytes_per_rollout']:>10,.0f}",
        f"{'    CPU ms/rollout':<34}{figures['control_cpu_ms_per_rollout']:>10.3f}",
        f"{'SHARDCAST: bytes/rollout':<34}{figures['cast_bytes_per_rollout']:>10,.0f}",
        "",
        f"{'role':<24}{'CPU s':>10}{'model':>10}{'readers':>10}{'overhead ms/rollout':>22}",
    ]
    for role, part in group_roles(found.parts):
        model_s = count_model(part)
        per_rollout = 1000 * (part.cpu_s - model_s) / rollouts
        lines.append(f"{role:<24}{part.cpu_s:>10.2f}{model_s:>10.2f}{part.child_s:>10.2f}{per_rollout:>22.3f}")
    lines += ["", f"{'stage':<24}{'of all CPU':>10}{'CPU ms/rollout':>18}"]
    for name, share in share_stages(found).items():
        lines.append(f"{name:<24}{share:>10.1%}{1000 * share * found.cpu_s / rollouts:>18.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
