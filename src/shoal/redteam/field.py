"""The field: a swarm on this machine with honest workers of several kinds, validators, and crews that cheat.

    plan -> prepare -> all parts of `shoal run` but the evaluator, and the crews -> all was tried -> stop -> ledger

Invariants:
- everything is started and looked after by the code of `shoal run`; training goes on until the crews are done;
- what is measured is read from the ledger afterwards (`shoal.redteam.matrix`): nobody's own word counts;
- the same command goes on with a field that was stopped, and begins a new one when the last one is done or was another.
"""

import asyncio
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal.config import build_config
from shoal.console import format_time
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.launch.glance import METRICS
from shoal.launch.layout import Layout, name_validators
from shoal.launch.meter import Meter
from shoal.launch.part import Part, read_last_line
from shoal.launch.prepare import Note, Prepared, prepare_swarm, tell_dial
from shoal.launch.roster import LAST, list_parts
from shoal.launch.run import EXIT_FAILED, EXIT_INTERRUPTED, catch_signals, hold_swarm, make_environment
from shoal.launch.settings import LaunchConfig, check_launch
from shoal.launch.supervise import Supervisor
from shoal.node.tasks import run_together
from shoal.redteam.crew import ATTEMPTS, Attempt, Trial, parse_trials, read_attempts
from shoal.redteam.registry import ATTACKS
from shoal.redteam.tally import count_rollouts

SETTINGS = """
# Small steps, many of them: versions change every second or two, and leases are handed out all the time.
steps = 20_000
async_level = 2
threads = 1

[policy.tiny]
layers = 2
width = 64
heads = 4
kv_heads = 2
context = 128

[tasks]
name = "sort"
options = { min_length = 6, max_length = 9 }

[warmup]
steps = 120  # a policy that is sure of its answers draws them whatever the temperature, and nothing is cheated
batch = 64
lr = 3e-3
options = { min_length = 3, max_length = 6 }

[engine]
max_tokens = 20  # twice as many as an answer needs: who pads or loops has room for it

[batch]
groups = 16
group_size = 8

[learner]
advantage = "centred"
lr = 1e-5

[eval]
every = 0

[checkpoint]
every = 50

[swarm]
groups_per_lease = 4
heartbeat_s = 1
lease_s = 20
"""
QUICK = (
    *("int8", "stale", "greedy", "edited_tokens", "constant_proof", "truncation", "copy_all", "noise"),
    *("claimed_reward", "padding", "bomb_pages", "garbage", "half_group"),
    *("cherry_leases", "two_manifests", "signatures"),
)
"""some of each fate and of each way to cheat"""
SLEEPERS = ("edited_tokens@0.25", "greedy@0.25")
CAREERS = ("edited_tokens", "greedy", "temperature", "truncation", "best_of_n")
WORKERS = ((1, 16), (2, 64), (1, 256), (2, 16), (1, 64))
"""torch threads and slots of the honest workers; the first two of them in the quick form"""
LIES = ("accept", "abstain")
"""of the validators that lie in the full form, the last ones"""
PLAN = "redteam.json"
LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is tried, on whom."""

    attacks: tuple[str, ...]
    quick: bool
    seed: int
    out: str
    repeat: int
    """times that each attack is tried"""
    sleepers: tuple[str, ...]
    workers: int
    validators: int
    lies: tuple[str, ...]
    """of the validators, the last ones; each its own"""
    crews: int
    abreast: int
    """attempts at a time in each crew"""
    submissions: int
    """judged of each attempt at most"""
    seconds: int
    """for each attempt at most"""
    rollouts: int
    """of honest workers, at least"""

    @property
    def lying(self) -> dict[int, str]:
        """The lie of each validator that has one, by its place among them."""
        return dict(enumerate(self.lies, self.validators - len(self.lies)))

    @property
    def offline(self) -> tuple[str, ...]:
        """Attacks that are measured without a swarm too."""
        return () if self.quick else self.attacks

    @property
    def careers(self) -> tuple[str, ...]:
        """The same of sleepers: attacks by those who have the true weights."""
        return CAREERS[:1] if self.quick else CAREERS

    @property
    def trials(self) -> list[Trial]:
        """All that is to be tried."""
        return [*parse_trials(self.attacks, self.repeat), *parse_trials(self.sleepers, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field that stands still: what is known of it beside its ledger."""

    plan: Plan
    prepared: Prepared
    attempts: tuple[Attempt, ...]
    cpu_s: dict[str, float]
    """of each part since the first step was trained"""
    seconds: float
    """of this start"""
    code: int
    """0 if all was tried"""

    @property
    def honest(self) -> dict[str, str]:
        """Owners of honest workers, with their names."""
        named = self.prepared.identities.items()
        return {identity.owner: name for name, identity in named if name.startswith("worker-")}

    @property
    def liars(self) -> dict[str, str]:
        """Nodes of the validators that lie, with their names."""
        names = name_validators(self.prepared.config.swarm)
        return {self.prepared.identities[names[place]].key.public: names[place] for place in self.plan.lying}

    @property
    def lies(self) -> dict[str, str]:
        """What these validators do, by name."""
        names = name_validators(self.prepared.config.swarm)
        return {names[place]: lie for place, lie in self.plan.lying.items()}


def make_plan(attacks: Sequence[str] | None, *, quick: bool, seed: int, out: Path) -> Plan:
    """The plan for attacks by name, or for all, or for some of each kind; ConfigError for a name that is none."""
    if seed < 0:
        raise ConfigError("--seed: must be 0 or more")
    names = tuple(dict.fromkeys(attacks or (QUICK if quick else ATTACKS)))
    parse_trials(names, 1)
    return Plan(
        attacks=names,
        quick=quick,
        seed=seed,
        out=str(out),
        repeat=1 if quick else 3,
        sleepers=() if quick or attacks else SLEEPERS,
        workers=2 if quick else len(WORKERS),
        validators=2 if quick else 2 + len(LIES),
        lies=() if quick else LIES,
        crews=1 if quick else 2,
        abreast=3,
        submissions=6 if quick else 12,
        seconds=45 if quick else 120,
        rollouts=0 if quick or attacks else 10_000,
    )


def load_field(plan: Plan) -> LaunchConfig:
    """The settings of the swarm."""
    name = "redteam-quick" if plan.quick else "redteam"
    own = [f"name={name}", f"seed={plan.seed}", f"out={plan.out}", f"swarm.calibration={256 if plan.quick else 1024}"]
    own += [f"swarm.workers={plan.workers}", f"swarm.validators={plan.validators}"]
    return check_launch(build_config(LaunchConfig, tomllib.loads(SETTINGS), own))


def run_field(plan: Plan, note: Note) -> Field:
    """Run a field until all was tried, or until it is stopped."""
    config = load_field(plan)
    layout = Layout.of(config)
    with hold_swarm(layout, fresh=not _goes_on(plan, layout)):
        prepared = prepare_swarm(config, layout, note)
        tell_dial(prepared, note)
        write_atomic(layout.launch / PLAN, json.dumps(asdict(plan)).encode())
        note(f"{len(plan.trials)} attempts at cheating in {layout.root}, coordinator at {prepared.url}")
        return asyncio.run(_supervise(plan, prepared, note))


def _goes_on(plan: Plan, layout: Layout) -> bool:
    """Whether what is in the folder is this plan, begun and not done."""
    path = layout.launch / PLAN
    if not path.exists() or json.loads(path.read_bytes()) != json.loads(json.dumps(asdict(plan))):
        return False
    return len(list_attempts(layout)) < len(plan.trials)


def list_attempts(layout: Layout) -> list[Attempt]:
    """What all crews have tried so far."""
    return [
        attempt for path in sorted(layout.root.glob(f"crew-*/{ATTEMPTS}")) for attempt in read_attempts(path.parent)
    ]


def list_field(plan: Plan, prepared: Prepared) -> list[Part]:
    """The parts of the swarm and the crews. The run is over when the crews are, however many steps are left."""
    parts = [part for part in list_parts(prepared) if part.name != "evaluator"]
    others = {"trainer": lambda part: replace(part, ends=False, last=LAST)}
    lies = {f"validator-{place + 1}": lie for place, lie in plan.lying.items()}
    return [
        *(others.get(part.name, lambda part: part)(_arm(part, lies)) for part in parts),
        *_list_crews(plan, prepared),
    ]


def _arm(part: Part, lies: Mapping[str, str]) -> Part:
    """Honest workers each in a way of their own, and validators that lie."""
    kind, _, number = part.name.partition("-")
    if kind == "worker":
        threads, slots = WORKERS[(int(number) - 1) % len(WORKERS)]
        command = part.arguments[: part.arguments.index("--threads")]
        return replace(part, arguments=(*command, "--threads", str(threads), "--slots", str(slots)))
    if lie := lies.get(part.name):
        return replace(part, arguments=("redteam", "judge", *part.arguments[1:], "--lie", lie))
    return part


def _list_crews(plan: Plan, prepared: Prepared) -> list[Part]:
    shares = [plan.attacks[number :: plan.crews] for number in range(plan.crews)]
    flags = ("--submissions", str(plan.submissions), "--seconds", str(plan.seconds), "--repeat", str(plan.repeat))
    crews = [(*share, *flags) for share in shares if share]
    if plan.sleepers:
        crews.append((*plan.sleepers, "--submissions", "200", "--seconds", str(8 * plan.seconds)))
    rank = min(part.rank for part in list_parts(prepared))
    return [
        Part(
            name=f"crew-{number}",
            arguments=(
                *("redteam", "crew", prepared.url, "--folder", str(prepared.layout.folder(f"crew-{number}"))),
                *("--threads", "1", "--slots", "64", "--abreast", str(plan.abreast), "--attack", *words),
            ),
            rank=rank,
            ends=True,
            has_model=True,
        )
        for number, words in enumerate(crews, start=1)
    ]


async def _supervise(plan: Plan, prepared: Prepared, note: Note) -> Field:
    layout, stop, began = prepared.layout, asyncio.Event(), time.monotonic()
    environment = make_environment(prepared.config.swarm.threads)
    supervisor = Supervisor(list_field(plan, prepared), layout.logs, environment, note=note)
    meter = Meter(supervisor)
    field = Field(plan=plan, prepared=prepared, attempts=(), cpu_s={}, seconds=0.0, code=0)
    scout = _Scout(field, meter, note)
    with catch_signals(stop, supervisor.kill_all, note):
        is_done = await run_together(supervisor.run(scout.has_enough, stop), meter.run(), scout.run())
    for name, state in supervisor.states.items():
        if state.failed:
            note(f"{name} cannot go on: {read_last_line(layout.logs, name)}")
    code = 0 if is_done else EXIT_INTERRUPTED if stop.is_set() else EXIT_FAILED
    attempts, seconds = tuple(list_attempts(layout)), time.monotonic() - began
    return replace(field, attempts=attempts, cpu_s=meter.cpu_s, seconds=seconds, code=code)


class _Scout:
    """Looks how far things are, and says so."""

    def __init__(self, field: Field, meter: Meter, note: Note) -> None:
        self._field, self._meter, self._note = field, meter, note
        self._began, self._rollouts, self._is_warm = time.monotonic(), 0, False

    def has_enough(self) -> bool:
        """Whether honest workers have done as much as was asked for."""
        return self._rollouts >= self._field.plan.rollouts

    async def run(self) -> None:
        """Look for ever."""
        layout, plan = self._field.prepared.layout, self._field.plan
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._is_warm and (layout.root / METRICS).exists():
                self._is_warm = True
                self._meter.begin()  # what it takes to start is not what checking costs
            self._rollouts = await asyncio.to_thread(count_rollouts, layout.ledger, self._field.honest)
            tried, elapsed = len(list_attempts(layout)), format_time(time.monotonic() - self._began)
            self._note(f"{elapsed}  {tried}/{len(plan.trials)} tried  {self._rollouts:,} honest rollouts accepted")
