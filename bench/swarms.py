"""Whole swarms for benchmarks: prepared and supervised by the code of `shoal run`, read back from what they wrote.

    settings -> prepare -> all parts but the evaluator -> the last step -> evaluator -> a summary, stored as JSON

- The evaluator runs after the swarm has ended, so it takes no time from other roles. A version's time is when it was
  written.
- Workers and validators are niced: in practice they have their own machines, and would not slow the trainer down.
- A summary is stored under the hash of its settings; a run that has one is not repeated.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config.run import flatten_config
from shoal.launch.cpu_usage import CpuMeter
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import list_parts
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.process import Part, Process, read_last_line
from shoal.launch.report import collect_evidence, find_folders
from shoal.launch.run import hold_swarm, make_environment, open_supervisor
from shoal.launch.settings import LaunchConfig, load_launch
from shoal.launch.supervisor import Supervisor
from shoal.launch.timeline import Interval, PartTrack, find_broadcasts, read_tracks
from shoal.launch.view import EVALS, METRICS
from shoal.train.report import read_metrics
from shoal.util.aio import run_together
from shoal.util.files import remove_dir, write_atomic

NICE = 10
LIMIT_S = 1800.0
"""time limit for a swarm"""
_LOOK_S = 0.5
_NICED = ("worker-", "validator-")

Drive = Callable[[PreparedSwarm, Supervisor], Awaitable[None]]
"""what is done to a swarm while it runs; it need not return"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run. Times are seconds since its v0 was published."""

    level: int
    seed: int
    written: list[float]
    """when v1, v2, ... were written"""
    train_s: list[float]
    """duration of each step, including writing its version"""
    ages: list[float]
    """mean age of each step's rollouts, in versions"""
    age_max: float
    rewards: list[float]
    evals: list[tuple[int, float, float]]
    """version, pass rate sampled, greedy"""
    broadcasts: list[float]
    """for v1, v2, ..., until all workers that fetched it had it"""
    busy: dict[str, list[Interval]]
    waits: dict[str, list[Interval]]
    window: Interval
    """from the start of the first step's training to the end of the last one's"""
    cpu_s: dict[str, float]
    """CPU seconds of each part and its children"""
    version_bytes: int
    """bytes of one version's weights"""
    ledger: str

    def share_of(self, part: str) -> float:
        """Share of the window in which a part was busy."""
        begin, end = self.window
        inside = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in self.busy[part])
        return inside / (end - begin)


def load_swarm(name: str, seed: int, out: Path, overrides: Sequence[str], *, base: Path | None = None) -> LaunchConfig:
    """The settings of a file (None: the demo's) with overrides."""
    return load_launch(base, [*overrides, f"name={name}", f"seed={seed}", f"out={out}"])


def find_summary(config: LaunchConfig, out: Path, *, fresh: bool = False) -> Summary:
    """The outcome of a run with these settings, from its file, or by running it now."""
    path = out / f"{config.name}-{hash_settings(config)}.json"
    if path.exists() and not fresh:
        return Summary(**json.loads(path.read_bytes()))
    prepared, cpu_s = run_swarm(config)
    evaluate_versions(prepared)
    summary = summarise_run(prepared, cpu_s)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(summary)).encode())
    if silent := list_silent(summary):
        print(f"{prepared.layout.root} is kept: {', '.join(silent)} did nothing in its last third", file=sys.stderr)
    else:
        remove_dir(prepared.layout.root)
    return summary


def list_silent(summary: Summary) -> list[str]:
    """Workers and validators that did nothing in the last third of a run; the reason is in its folder."""
    begin, end = summary.window
    late = end - (end - begin) / 3
    return [part for part, busy in summary.busy.items() if part.startswith(_NICED) and max(busy)[1] < late]


def hash_settings(config: LaunchConfig) -> str:
    """Hash of everything that determines a run, except the code."""
    values = {key: value for key, value in flatten_config(config).items() if key not in ("name", "out")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def run_swarm(
    config: LaunchConfig, *, apart: Collection[str] = (), drive: Drive | None = None
) -> tuple[PreparedSwarm, dict[str, float]]:
    """Run a swarm to its last step; also returns the CPU seconds of its parts. The driver starts those in `apart`."""
    layout = SwarmPaths.of(config)
    if layout.root.exists():
        remove_dir(layout.root)  # from an interrupted benchmark
    with hold_swarm(layout):
        prepared = prepare_swarm(config, layout)
        cpu_s = asyncio.run(_supervise(prepared, apart, drive))
    return prepared, cpu_s


async def find_part(supervisor: Supervisor, name: str) -> Process:
    """The process of a part, as soon as it runs."""
    while (process := supervisor.states[name].process) is None:
        await asyncio.sleep(_LOOK_S)
    return process


def pick_parts(prepared: PreparedSwarm, names: Collection[str]) -> list[Part]:
    """Parts of a swarm by their names."""
    return [part for part in list_parts(prepared) if part.name in names]


async def _supervise(prepared: PreparedSwarm, apart: Collection[str], drive: Drive | None) -> dict[str, float]:
    parts = [part for part in list_parts(prepared) if part.name not in ("evaluator", *apart)]
    supervisor = open_supervisor(prepared, parts)
    meter = CpuMeter(supervisor, _nice)
    beside = [drive(prepared, supervisor)] if drive else []
    async with asyncio.timeout(LIMIT_S):
        running = supervisor.run(lambda: True, asyncio.Event())
        finished = await run_together(running, meter.run(), *(_wrap(other) for other in beside))
    if not finished:
        raise SystemExit(f"{prepared.config.run}: {read_last_line(prepared.layout.logs, 'trainer')}")
    return meter.cpu_s


async def _wrap(work: Awaitable[None]) -> None:
    await work


def _nice(name: str, session: int) -> None:
    """Workers and validators yield to the trainer."""
    if name.startswith(_NICED):
        lower_priority(session)


def lower_priority(session: int) -> None:
    """Nice all processes of a session. If the kernel groups processes by session, the group's niceness counts."""
    os.setpriority(os.PRIO_PGRP, session, NICE)
    group = Path(f"/proc/{session}/autogroup")
    if group.exists():
        group.write_text(str(NICE))


def evaluate_versions(prepared: PreparedSwarm) -> None:
    """Evaluate all versions of a finished swarm that are due."""
    command = [sys.executable, "-m", "shoal", "evaluator", str(prepared.layout.run_settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=make_environment(1))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def summarise_run(prepared: PreparedSwarm, cpu_s: Mapping[str, float]) -> Summary:
    """Read what a swarm wrote. Also checks that no rollout was too old and that its ledger holds."""
    config, root = prepared.config, prepared.layout.root
    lines = read_metrics(root / METRICS)
    tracks = {track.name: track for track in read_tracks(find_folders(prepared))}
    origin_s = min(span.start_s for span in tracks["origin"].spans if span.name == "publish")
    trains = [span for span in tracks["trainer"].spans if span.name in ("train", "write")]
    evidence = collect_evidence(prepared.layout.ledger)
    age_max = max(line["off_policy/lag_max"] for line in lines)
    if age_max > config.async_level or not evidence.holds:
        raise SystemExit(f"{config.run}: a rollout was {age_max:.0f} versions old; {evidence.summary}")
    return Summary(
        level=config.async_level,
        seed=config.seed,
        written=[line["time"] - origin_s for line in lines],
        train_s=[line["perf/train_s"] + line["perf/write_s"] for line in lines],
        ages=[line["off_policy/lag"] for line in lines],
        age_max=age_max,
        rewards=[line["reward/mean"] for line in lines],
        evals=[(line["step"], line["eval/pass_at_1"], line["eval/greedy"]) for line in read_metrics(root / EVALS)],
        broadcasts=_measure_broadcasts(list(tracks.values())),
        busy={name: _shift(track.busy, origin_s) for name, track in tracks.items()},
        waits={name: _shift(track.wait, origin_s) for name, track in tracks.items()},
        window=(min(span.start_s for span in trains) - origin_s, max(span.end_s for span in trains) - origin_s),
        cpu_s=dict(cpu_s),
        version_bytes=(prepared.layout.start / "model.safetensors").stat().st_size,
        ledger=evidence.summary,
    )


def _measure_broadcasts(tracks: Sequence[PartTrack]) -> list[float]:
    """For each version but v0; one that no worker fetched, because there was a newer one, is left out."""
    found = [item for item in find_broadcasts(tracks) if item.version > 0 and item.reached_s]
    return [max(item.reached_s.values()) for item in found]


def _shift(intervals: Sequence[Interval], origin_s: float) -> list[Interval]:
    return [(start - origin_s, end - origin_s) for start, end in intervals]
