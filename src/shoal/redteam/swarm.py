"""The swarm of a red-team run: different honest workers, validators, and campaigns of attacks.

    plan -> prepare -> all parts of `shoal run` but the evaluator, and campaigns -> all attempts done -> stop -> ledger

Invariants:
- everything is started and supervised by the code of `shoal run`; training continues until the campaigns are done;
- all measurements are read from the ledger afterwards (`shoal.redteam.matrix`), never taken from a node's statement;
- the same command resumes a stopped run, and starts a new one if the last one is done or had a different plan.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.run import build_config
from shoal.config.toml import read_toml
from shoal.launch.cpu_usage import CpuMeter
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import LAST, list_parts
from shoal.launch.prepare import PreparedSwarm, log_checks, prepare_swarm
from shoal.launch.process import Part
from shoal.launch.run import hold_swarm, open_supervisor, run_parts
from shoal.launch.settings import LaunchConfig, check_launch
from shoal.launch.view import METRICS
from shoal.redteam.campaign import ATTEMPTS, AttackAttempt, parse_attempts, read_attempts
from shoal.redteam.ledger_summary import count_rollouts
from shoal.redteam.registry import list_attacks
from shoal.util.console import format_time
from shoal.util.files import write_atomic

logger = logging.getLogger(__name__)
SETTINGS = Path(__file__).with_name("swarm.toml")
QUICK = (
    *("int8", "stale", "greedy", "edited_tokens", "constant_proof", "truncation", "copy_all", "noise"),
    *("claimed_reward", "padding", "bomb_pages", "garbage", "half_group"),
    *("cherry_leases", "two_manifests", "signatures"),
)
"""some attacks of each expectation and family"""
SLEEPERS = ("edited_tokens@0.25", "greedy@0.25")
WORKERS = ((1, 16), (2, 64), (1, 256), (2, 16), (1, 64))
"""torch threads and slots of the honest workers; the quick form uses the first two"""
LIES = ("accept", "abstain")
"""lies of the last validators in the full form"""
_CHOSEN_SIZE: dict[str, Any] = {"sleepers": (), "rollouts": 0}
"""for a plan with selected attacks; the defaults of `RedTeamPlan` are those of the full form"""
_QUICK_SIZE = dict(_CHOSEN_SIZE, repeat=1, workers=2, validators=2, lies=(), campaigns=1, submissions=6, seconds=45)
PLAN = "redteam.json"
POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedTeamPlan:
    """The attacks to run, and the swarm to run them on."""

    attacks: tuple[str, ...]
    quick: bool
    seed: int
    out: str
    repeat: int = 3
    """number of attempts per attack"""
    sleepers: tuple[str, ...] = SLEEPERS
    workers: int = len(WORKERS)
    validators: int = 2 + len(LIES)
    lies: tuple[str, ...] = LIES
    """lies of the last validators, one each"""
    campaigns: int = 2
    parallel: int = 3
    """concurrent attempts in each campaign"""
    submissions: int = 12
    """maximum judged submissions per attempt"""
    seconds: int = 120
    """maximum seconds per attempt"""
    rollouts: int = 10_000
    """minimum number of honest rollouts"""

    @property
    def liars(self) -> dict[str, str]:
        """The lie of each lying validator, by its name."""
        first = 1 + self.validators - len(self.lies)
        return {f"validator-{number}": lie for number, lie in enumerate(self.lies, first)}

    @property
    def attempts(self) -> list[AttackAttempt]:
        """All planned attempts."""
        return [*parse_attempts(self.attacks, self.repeat), *parse_attempts(self.sleepers, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedTeamSwarm:
    """A stopped red-team swarm: what is known about it besides its ledger."""

    plan: RedTeamPlan
    prepared: PreparedSwarm
    attempts: tuple[AttackAttempt, ...]
    cpu_s: dict[str, float]
    """CPU seconds of each part since the first step was trained"""
    seconds: float
    """duration of this start"""
    code: int
    """0 if all attempts were made"""

    @property
    def honest(self) -> dict[str, str]:
        """Owners of honest workers, with their names."""
        return find_honest(self.prepared)

    @property
    def liars(self) -> dict[str, str]:
        """Nodes of the lying validators, with their names."""
        return {self.prepared.identities[name].key.public: name for name in self.plan.liars}


def find_honest(prepared: PreparedSwarm) -> dict[str, str]:
    """Owners of honest workers, with their names."""
    return {one.owner: name for name, one in prepared.identities.items() if name.startswith("worker-")}


def make_plan(attacks: Sequence[str] | None, *, quick: bool, seed: int, out: Path) -> RedTeamPlan:
    """The plan for named attacks, for all, or for some of each kind; ConfigError for an unknown name."""
    names = tuple(dict.fromkeys(attacks or (QUICK if quick else list_attacks())))
    parse_attempts(names, 1)
    size = _QUICK_SIZE if quick else _CHOSEN_SIZE if attacks else {}
    return RedTeamPlan(attacks=names, quick=quick, seed=seed, out=str(out), **size)


def load_settings(plan: RedTeamPlan) -> LaunchConfig:
    """The settings of the swarm."""
    name = "redteam-quick" if plan.quick else "redteam"
    own = [f"name={name}", f"seed={plan.seed}", f"out={plan.out}", f"swarm.calibration={256 if plan.quick else 1024}"]
    own += [f"swarm.workers={plan.workers}", f"swarm.validators={plan.validators}"]
    return check_launch(build_config(LaunchConfig, read_toml(SETTINGS), own))


def run_red_team(plan: RedTeamPlan) -> RedTeamSwarm:
    """Run a swarm until all attempts are done, or until it is stopped."""
    config = load_settings(plan)
    layout = SwarmPaths.of(config)
    with hold_swarm(layout, fresh=not _can_resume(plan, layout)):
        prepared = prepare_swarm(config, layout)
        log_checks(prepared)
        write_atomic(layout.launch / PLAN, json.dumps(asdict(plan)).encode())
        logger.info(f"{len(plan.attempts)} attack attempts in {layout.root}, coordinator at {prepared.url}")
        return asyncio.run(_supervise(plan, prepared))


def _can_resume(plan: RedTeamPlan, layout: SwarmPaths) -> bool:
    """Whether the folder has this plan, started and not done."""
    path = layout.launch / PLAN
    if not path.exists() or json.loads(path.read_bytes()) != json.loads(json.dumps(asdict(plan))):
        return False
    return len(list_attempts(layout)) < len(plan.attempts)


def list_attempts(layout: SwarmPaths) -> list[AttackAttempt]:
    """The finished attempts of all campaigns."""
    paths = sorted(layout.root.glob(f"campaign-*/{ATTEMPTS}"))
    return [attempt for path in paths for attempt in read_attempts(path.parent)]


def list_swarm_parts(plan: RedTeamPlan, prepared: PreparedSwarm) -> list[Part]:
    """The parts of the swarm and the campaigns. The run ends with the campaigns, however many steps are left."""
    parts = [_change_part(part, plan.liars) for part in list_parts(prepared) if part.name != "evaluator"]
    return [*parts, *_list_campaigns(plan, prepared)]


def _change_part(part: Part, lies: Mapping[str, str]) -> Part:
    """Give each honest worker its own settings, make some validators lie, and do not wait for the trainer."""
    kind, _, number = part.name.partition("-")
    if kind == "trainer":
        return replace(part, ends=False, last=LAST)
    if kind == "worker":
        threads, slots = WORKERS[(int(number) - 1) % len(WORKERS)]
        command = part.arguments[: part.arguments.index("--threads")]
        return replace(part, arguments=(*command, "--threads", str(threads), "--slots", str(slots)))
    if lie := lies.get(part.name):
        return replace(part, arguments=("redteam", "judge", *part.arguments[1:], "--lie", lie))
    return part


def _list_campaigns(plan: RedTeamPlan, prepared: PreparedSwarm) -> list[Part]:
    shares = [plan.attacks[number :: plan.campaigns] for number in range(plan.campaigns)]
    flags = ("--submissions", str(plan.submissions), "--seconds", str(plan.seconds), "--repeat", str(plan.repeat))
    argument_lists = [(*share, *flags) for share in shares if share]
    if plan.sleepers:
        argument_lists.append((*plan.sleepers, "--submissions", "200", "--seconds", str(8 * plan.seconds)))
    rank = min(part.rank for part in list_parts(prepared))
    return [
        Part(
            name=f"campaign-{number}",
            arguments=(
                *("redteam", "campaign", prepared.url, "--folder", str(prepared.layout.folder(f"campaign-{number}"))),
                *("--threads", "1", "--slots", "64", "--abreast", str(plan.parallel), "--attack", *words),
            ),
            rank=rank,
            ends=True,
            has_model=True,
        )
        for number, words in enumerate(argument_lists, start=1)
    ]


async def _supervise(plan: RedTeamPlan, prepared: PreparedSwarm) -> RedTeamSwarm:
    began = time.monotonic()
    supervisor = open_supervisor(prepared, list_swarm_parts(plan, prepared))
    meter = CpuMeter(supervisor)
    progress = ProgressReporter(plan, prepared, meter)
    code = await run_parts(supervisor, meter.run(), progress.run(), until=progress.is_enough)
    attempts, seconds = tuple(list_attempts(prepared.layout)), time.monotonic() - began
    return RedTeamSwarm(plan=plan, prepared=prepared, attempts=attempts, cpu_s=meter.cpu_s, seconds=seconds, code=code)


class ProgressReporter:
    """Logs progress periodically."""

    def __init__(self, plan: RedTeamPlan, prepared: PreparedSwarm, meter: CpuMeter) -> None:
        self._plan, self._prepared, self._meter = plan, prepared, meter
        self._began, self._rollouts, self._is_warm = time.monotonic(), 0, False

    def is_enough(self) -> bool:
        """Whether honest workers have done as much as planned."""
        return self._rollouts >= self._plan.rollouts

    async def run(self) -> None:
        """Report until cancelled."""
        layout, honest, planned = self._prepared.layout, find_honest(self._prepared), len(self._plan.attempts)
        while True:
            await asyncio.sleep(POLL_S)
            if not self._is_warm and (layout.root / METRICS).exists():
                self._is_warm = True
                self._meter.begin()  # exclude the cost of starting
            self._rollouts = await asyncio.to_thread(count_rollouts, layout.ledger, honest)
            tried, elapsed = len(list_attempts(layout)), format_time(time.monotonic() - self._began)
            logger.info(f"{elapsed}  {tried}/{planned} attempts done  {self._rollouts:,} honest rollouts accepted")
