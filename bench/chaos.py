"""A swarm whose processes are killed at random: each is restarted, and the run must end correctly.

    python bench/chaos.py [--quick] [--json] [--kills 50] [--seed N] [--async-level K] [--out DIR]

A tiny swarm (coordinator, trainer, evaluator, origin, relay, two workers, two validators) runs under the supervisor
of `shoal run`. Its parts get a SIGKILL in random order, each once before any gets a second one, after pauses drawn
from an exponential distribution, spread over the whole run: while the run is ahead of the kills its trainer is
suspended, so that no machine is too fast. Every other kill of the trainer comes in the middle of a step. The same
seed draws the same order and pauses; the rest depends on the machine. Then everything is compared with everything
else: see lineage.py. With async level 0 the weights must also equal those of an undisturbed `shoal train`.

Figures: kills, kills_mid_step (of the trainer, between a batch and its version), steps, run_s, flaws.
"""

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, finish
from lineage import compare_alone, find_flaws
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import list_parts
from shoal.launch.prepare import prepare_swarm
from shoal.launch.run import hold_swarm, make_environment
from shoal.launch.settings import LaunchConfig, load_launch
from shoal.launch.supervisor import PartState, Supervisor
from shoal.trainer.versions import list_versions
from shoal.util.aio import run_together

TINY = ROOT / "tests" / "tiny.toml"
MARK = "SHOAL_CHAOS"
"""environment variable that identifies a run's processes, whatever their parent is"""
DEADLINE_S = 3600.0
GAP_S, HURRY_S = 1.5, 0.2
"""mean pause before a kill; shorter if the run is ahead of the kills"""
AHEAD = 0.1
"""how far, as a share, the kills may be ahead of the run's progress, so that they hit it at work"""
LAST = 2
"""all kills are due this many steps before the end"""
LOOK_S, STEP_S = 0.002, 60.0
"""polling interval for births, versions and the middle of a step, and how long to wait for such a middle"""
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One killed process."""

    at_s: float
    """seconds since the start"""
    part: str
    age_s: float
    """how long it had run"""
    mid_step: bool
    """whether it was the trainer, with a batch whose version was not written yet"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run with kills."""

    kills: Sequence[Kill]
    run_s: float
    flaws: Sequence[str]


class Killer:
    """Kills the parts of a supervisor."""

    def __init__(self, supervisor: Supervisor, config: LaunchConfig, *, count: int, seed: int, note: Note) -> None:
        self._supervisor, self._count, self._draw, self._note = supervisor, count, random.Random(seed), note
        self._root, self._steps = SwarmPaths.of(config).root, config.steps
        self._queue: list[str] = []
        self._born: dict[int, float] = {}
        self._suspended: int | None = None
        self._free = False
        self._begun = time.monotonic()
        self._turn = 0
        self.kills: list[Kill] = []

    async def run(self) -> None:
        """Kill until the number is reached, then wait forever."""
        watch = asyncio.create_task(self._watch())
        try:
            while len(self.kills) < self._count:
                ahead = len(self.kills) / self._count - self._find_progress()
                await asyncio.sleep(self._draw.expovariate(1 / (GAP_S if ahead >= 0 else HURRY_S)))
                if ahead <= AHEAD and (state := self._pick()) is not None:
                    await self._kill(state)
            await asyncio.Event().wait()
        finally:
            watch.cancel()
            self._free = True
            self._pace_trainer()

    async def _watch(self) -> None:
        while True:
            for state in self._supervisor.states.values():
                if state.process is not None:
                    self._born.setdefault(state.process.pid, time.monotonic())
            self._pace_trainer()
            await asyncio.sleep(LOOK_S)

    def _pace_trainer(self) -> None:
        """Suspend the trainer while the run is ahead of the kills, and resume it otherwise."""
        process = self._supervisor.states["trainer"].process
        pid = None if process is None else process.pid
        if pid != self._suspended:
            self._suspended = None
        pending = len(self.kills) < self._count and not self._free
        ahead = pending and self._find_progress() >= (len(self.kills) + 1) / self._count
        if pid is not None and ahead != (self._suspended is not None):
            with contextlib.suppress(ProcessLookupError):  # it ended, and the supervisor has not noticed yet
                os.kill(pid, signal.SIGSTOP if ahead else signal.SIGCONT)
            self._suspended = pid if ahead else None

    def _find_progress(self) -> float:
        return max(0, self._find_newest()) / max(1, self._steps - LAST)

    def _pick(self) -> PartState | None:
        """The next part in a random order of all running ones; each gets a turn before any gets another."""
        if not self._queue:
            self._queue = sorted(name for name, state in self._supervisor.states.items() if not state.finished)
            self._draw.shuffle(self._queue)
            # The trainer ends first: if its turn came last, it might have ended already.
            if "trainer" in self._queue[3:]:
                self._queue.remove("trainer")
                self._queue.insert(self._draw.randrange(3), "trainer")
            self._turn += 1
        for name in self._queue:
            state = self._supervisor.states[name]
            if state.process is not None:
                self._queue.remove(name)
                return state
        self._queue = [name for name in self._queue if not self._supervisor.states[name].finished]
        return None

    async def _kill(self, state: PartState) -> None:
        if state.part.name == "trainer" and self._turn % 2:
            self._free = True
            await self._await_step(state)
            self._free = False
        process, now = state.process, time.monotonic()
        if process is None:
            return
        os.kill(process.pid, signal.SIGKILL)
        kill = Kill(
            at_s=now - self._begun,
            part=state.part.name,
            age_s=now - self._born.get(process.pid, now),
            mid_step=state.part.name == "trainer" and self._is_mid_step(),
        )
        self.kills.append(kill)
        middle = ", in the middle of a step" if kill.mid_step else ""
        self._note(f"{kill.at_s:7.1f} s  kill {len(self.kills)}: {kill.part}, {kill.age_s:.1f} s old{middle}")

    async def _await_step(self, state: PartState) -> None:
        """Wait until the trainer has a batch but not yet its version, or until that step has ended."""
        deadline, first = time.monotonic() + STEP_S, self._find_newest()
        while state.process is not None and time.monotonic() < deadline:
            if self._is_mid_step() or self._find_newest() > first:
                return
            await asyncio.sleep(LOOK_S)

    def _find_newest(self) -> int:
        return max(list_versions(self._root / "versions"), default=-1)

    def _is_mid_step(self) -> bool:
        return (self._root / "batches" / f"step-{self._find_newest() + 1:06d}.json").exists()


def load_settings(out: Path, *overrides: str) -> LaunchConfig:
    """A tiny swarm, with steps long enough to be interrupted in the middle."""
    few = ["swarm.calibration=128", "learner.updates=4", "learner.share=false", "eval.every=4", "swarm.heartbeat_s=1"]
    return load_launch(TINY, [f"out={out}", *few, *overrides])


def run_chaos(config: LaunchConfig, *, kills: int, seed: int, note: Note) -> Outcome:
    """Run a swarm to its end while its parts are killed, and check the result."""
    layout, mark = SwarmPaths.of(config), secrets.token_hex(8)
    begun = time.monotonic()
    with hold_swarm(layout):
        prepared = prepare_swarm(config, layout)
        environment = make_environment(config.swarm.threads) | {MARK: mark}
        supervisor = Supervisor(list_parts(prepared), layout.logs, environment)
        killer = Killer(supervisor, config, count=kills, seed=seed, note=note)
        finished = asyncio.run(_supervise(supervisor, killer))
    run_s = time.monotonic() - begun
    flaws = [] if finished else [f"the run did not end in {DEADLINE_S:g} s, or a part gave up: {_describe(supervisor)}"]
    flaws += [f"process {pid} is still running" for pid in find_left(mark)]
    if len(killer.kills) < kills:
        flaws.append(f"the run ended after {len(killer.kills)} kills")
    flaws += find_flaws(config) if finished else []
    return Outcome(kills=tuple(killer.kills), run_s=run_s, flaws=tuple(flaws))


async def _supervise(supervisor: Supervisor, killer: Killer) -> bool:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(DEADLINE_S, stop.set)
    return await run_together(supervisor.run(lambda: True, stop), killer.run())


def find_left(mark: str) -> list[int]:
    """Processes of a run that are still running, after a short grace period."""
    deadline = time.monotonic() + 10.0
    while (found := _list_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _list_marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:  # ended, or not ours
            continue
    return found


def _describe(supervisor: Supervisor) -> str:
    now = time.monotonic()
    return "; ".join(f"{name} {state.describe(now)}" for name, state in supervisor.states.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller size that still shows the effect")
    parser.add_argument("--json", action="store_true", help="print only one line: a JSON object of named figures")
    parser.add_argument("--kills", type=int, metavar="N", help="processes to kill (50; quick: 12)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of order and pauses (default: a new one)")
    parser.add_argument("--async-level", type=int, default=2, metavar="K", help="async level of the run (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run in this folder (default: not kept)")
    flags = parser.parse_args()
    seed = flags.seed if flags.seed is not None else secrets.randbelow(10**6)
    kills = flags.kills or (12 if flags.quick else 50)
    note = (lambda _: None) if flags.json else (lambda text: print(text, flush=True))
    note(f"seed {seed}, {kills} kills, async level {flags.async_level}")
    with tempfile.TemporaryDirectory() as folder:
        out = flags.out or Path(folder)
        steps = max(4, round(0.6 * kills))
        config = load_settings(out, f"steps={steps}", f"async_level={flags.async_level}")
        outcome = run_chaos(config, kills=kills, seed=seed, note=note)
        flaws = list(outcome.flaws)
        if not flaws and flags.async_level == 0:
            flaws += compare_alone(config, out / "alone")
    figures = {
        "kills": len(outcome.kills),
        "kills_mid_step": sum(kill.mid_step for kill in outcome.kills),
        "steps": steps,
        "run_s": outcome.run_s,
        "seed": seed,
        "flaws": len(flaws),
    }
    finish(flags, format_table(outcome, flaws), figures)
    sys.exit(1 if flaws else 0)


def format_table(outcome: Outcome, flaws: Sequence[str]) -> str:
    counts = Counter(kill.part for kill in outcome.kills)
    rows = ["| part | kills |", "|---|---|", *(f"| {part} | {count} |" for part, count in sorted(counts.items()))]
    return "\n".join([*rows, "", *(flaws or ["no flaws"])])


if __name__ == "__main__":
    main()
