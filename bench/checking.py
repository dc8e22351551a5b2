"""Cost of checking: CPU time of a validator as a share of the CPU time for generating the checked work.

    python bench/checking.py             # five minutes on one core; nothing else should run on the machine
    python bench/checking.py --quick     # half a minute: one model, shorter answers

Both sides use the code that runs in a swarm, in one process with one thread, alternating: the engine with its proofs,
the verifier and the file on one side; reader, consistency checks and replay on the other. A submission is a group of
eight rollouts, which is the default, and in the demo 16 groups of 16. The cost of generating depends on how many
rollouts are generated concurrently; checking always reads them as a whole. Models have random weights, made such that
answers have maximum length. Every submission is honest, and must be accepted.

The bound is the cost of a check that does only the model's own arithmetic, at this core's speed for products with as
many rows as a prefill has:

    FLOPs of a token = 2 x weights of the layers + 4 x layers x width x (prompt + half of the answer)
    bound = FLOPs of all tokens / speed of long products / CPU seconds that it took to write them

It is also the speed of generation relative to that of long products (bench/products.py has it by rows and width). No
check that computes every state can cost less.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common import finish, parse_flags
from offline_work import OfflineGenerator
from products import LONG, count_weights, measure_speed
from shoal.calibrate.calibrate import CalibrationPlan, calibrate_policy
from shoal.calibrate.prompts import PromptSource
from shoal.calibrate.variants import VariantSetup
from shoal.config.run import PolicyConfig, TinyConfig
from shoal.policy.decoder import fuse_layers
from shoal.policy.model import Policy, load_policy, save_policy
from shoal.protocol.beacon import derive_group, show_seeds
from shoal.protocol.messages import Job, Manifest, Standing, Verdict
from shoal.protocol.params import MILLION, RunParams
from shoal.recipe import Recipe
from shoal.redteam.validators import LazyJudge
from shoal.rollout import Group
from shoal.seeds import GroupSeeds
from shoal.submission.read import ParserPool
from shoal.submission.write import write_submission
from shoal.tasks.families.sort import Sort
from shoal.toploc.calibration import Calibration, hash_model
from shoal.util.process import tune_process
from shoal.validator.judge import Judge
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import LeaseOrder

DEMO = "demo, 256 at a time"
GROUP, WIDE = "8 at a time", "leases of 32"
"""suffixes of the names of sizes that are generated one group at a time, and of those with large leases"""
ALL, TOGETHER, READ = "all", "all, together", "read"
DIALS = {"good": Standing.GOOD, "trusted": Standing.TRUSTED}
SAMPLES, CALIBRATED = 400, 96
"""number of chunks, and tokens per answer, to calibrate thresholds with; honest work must pass, no more is needed"""
SLOTS = 256
"""default of a worker"""
BEACON, SEED = "5a" * 32, "cd" * 32
PROMPT = 30
"""approximate number of tokens of a prompt"""
SHARPEN = 6.0
"""factor by which random weights are scaled up, so that tokens differ in probability"""
BIAS = 12.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, the length of its answers, and how often it is measured."""

    name: str
    tiny: TinyConfig
    tokens: int
    leases: int
    """submissions that are generated concurrently, and checked together"""
    turns: int
    group_size: int = 8
    groups: int = 1
    """groups of a submission"""

    @property
    def rollouts(self) -> int:
        """Rollouts of a submission."""
        return self.group_size * self.groups


@dataclass(slots=True)
class Costs:
    """CPU seconds of both sides, over all turns."""

    size: str
    spent: dict[str, float] = field(default_factory=dict)
    """by way of checking"""
    written: float = 0.0
    """of generation"""
    tokens: int = 0
    rollouts: int = 0
    leases: int = 1
    """submissions that were checked together"""
    flops: float = 0.0
    """FLOPs of one token, with the actual prompts and answers"""
    speed: float = 0.0
    """FLOP/s in long products"""

    def add(self, name: str, seconds: float) -> None:
        """Add a measurement of a way of checking."""
        self.spent[name] = self.spent.get(name, 0.0) + seconds

    def share(self, name: str) -> float:
        """Cost of a way of checking as a share of generation."""
        return self.spent[name] / self.written

    @property
    def bound(self) -> float:
        """Minimum cost of a full check as a share of generation."""
        return self.flops * self.tokens / self.speed / self.written

    @property
    def batch_gain(self) -> float:
        """CPU time of replaying submissions one by one, relative to replaying them together."""
        return (self.spent[ALL] - self.spent[READ]) / (self.spent[TOGETHER] - self.spent[READ])

    @property
    def rollouts_per_s(self) -> float:
        """Fully checked rollouts per second of one core."""
        return self.rollouts / self.spent[TOGETHER]

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.rollouts


def list_sizes(quick: bool) -> list[Size]:
    """The sizes to measure."""
    demo = TinyConfig(layers=3, width=128, heads=4, kv_heads=2, context=1024)
    large = TinyConfig(layers=6, width=256, heads=8, kv_heads=4, context=1024)
    if quick:
        return [
            Size(name="small", tiny=demo, tokens=512, leases=2, turns=2),
            Size(name=DEMO, tiny=demo, tokens=12, leases=2, turns=2, group_size=16, groups=16),
        ]
    return [
        Size(name=f"small, {GROUP}", tiny=demo, tokens=512, leases=1, turns=8),
        Size(name="small, 64 at a time", tiny=demo, tokens=512, leases=8, turns=4),
        Size(name=f"small, 128 at a time, {WIDE}", tiny=demo, tokens=512, leases=4, turns=2, groups=4),
        Size(name=f"large, {GROUP}", tiny=large, tokens=512, leases=1, turns=4),
        Size(name="large, 64 at a time", tiny=large, tokens=512, leases=8, turns=2),
        Size(name=f"large, 64 at a time, {WIDE}", tiny=large, tokens=512, leases=2, turns=2, groups=4),
        Size(name=DEMO, tiny=demo, tokens=12, leases=4, turns=8, group_size=16, groups=16),
    ]


class CheckSetup:
    """Generates submissions of one model, and has them judged in several ways."""

    def __init__(self, size: Size, folder: Path, runner: asyncio.Runner, jail: ParserPool) -> None:
        self._size, self._folder, self._runner = size, folder, runner
        self.policy = make_policy(size.tiny)
        save_policy(self.policy, folder / "v0")
        recipe = Recipe(
            family="sort",
            options={"min_length": 8, "max_length": 11},
            group_size=size.group_size,
            max_tokens=size.tokens,
            model=hash_model(self.policy.model),
            weights="0" * 64,
            calibration="0" * 64,
        )
        calibration = self._calibrate()
        self._judge, self._reader = Judge(recipe, calibration, jail), LazyJudge(recipe, calibration, jail)
        self._generator = OfflineGenerator(WorkerBehaviour(recipe), slots=min(SLOTS, size.rollouts * size.leases))
        self._generator.load(0, folder / "v0")

    def measure(self, costs: Costs, turn: int, leases: int) -> None:
        """One turn: generate everything once, and check it in every way."""
        with count_cpu(lambda seconds: _add_written(costs, seconds)):
            files = self._write(turn * leases, leases)
        costs.rollouts += sum(len(job.manifest.rollouts) for job, _ in files)
        costs.tokens += sum(entry.tokens for job, _ in files for entry in job.manifest.rollouts)
        ways: dict[str, Callable[[], None]] = {
            READ: lambda: self._check([files], self._reader),
            ALL: lambda: self._check([[file] for file in files], self._judge),
            TOGETHER: lambda: self._check([files], self._judge),
        }
        params = RunParams(group_size=self._size.group_size, groups_per_lease=self._size.groups)
        for name, standing in DIALS.items():
            share = params.check_share(standing, self._size.rollouts)
            some = [(job.model_copy(update={"check_ppm": share}), path) for job, path in files]
            ways[name] = lambda some=some: self._check([some], self._judge)  # type: ignore[misc]
        for name in rotate(list(ways), turn):
            with count_cpu(lambda seconds, name=name: costs.add(name, seconds)):  # type: ignore[misc]
                ways[name]()

    def count_flops(self) -> float:
        """Mean FLOPs of one token of an answer."""
        tiny, layers = self._size.tiny, fuse_layers(self.policy.model)
        seen = PROMPT + self._size.tokens / 2
        return 2.0 * sum(map(count_weights, layers)) + 4.0 * tiny.layers * tiny.width * seen

    def _calibrate(self) -> Calibration:
        plan = CalibrationPlan(source=PromptSource(tokens=CALIBRATED, temperature=1.0, seed=0), samples=SAMPLES)
        return calibrate_policy(self.policy, [VariantSetup(name="engine", batch=64)], plan, name=self._size.name)

    def _write(self, first: int, leases: int) -> list[tuple[Job, Path]]:
        size = self._size.groups
        seeds = list_seeds(self._size, first * size, leases * size)
        order = LeaseOrder(
            lease="l1", step=1, first=first * size, count=leases * size, seeds=seeds, version=0, deadline_ms=0
        )
        work = self._generator.write(order)
        return [self._pack(work, work.groups[start : start + size]) for start in range(0, len(work.groups), size)]

    def _pack(self, work: FinishedWork, groups: Sequence[Group]) -> tuple[Job, Path]:
        path = self._folder / f"{groups[0].index}.parquet"
        names = {rollout.id for group in groups for rollout in group.rollouts}
        written = write_submission(path, groups, {name: work.proofs[name] for name in names})
        manifest = Manifest(
            lease="l1", fence=1, blob=written.sha256, size=written.size, version=0, rollouts=written.entries
        )
        return make_job(self._size, groups[0].index, manifest), path

    def _check(self, portions: Sequence[Sequence[tuple[Job, Path]]], judge: Judge) -> None:
        """Have files judged, portion by portion; all are honest."""
        for files in portions:
            opinions = self._runner.run(judge.judge_all(files, self.policy))
            verdicts = {opinion.verdict for opinion in opinions}
            if verdicts != {Verdict.ACCEPTED}:
                raise SystemExit(f"{self._size.name}: honest work is {verdicts}: {opinions[0].findings[:1]}")


def make_policy(tiny: TinyConfig) -> Policy:
    """A policy with random weights whose answers never end before the maximum length."""
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=Sort().alphabet, seed=5)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPEN)
        # One channel is the same for every token, no layer writes to it, and it only suppresses the end token.
        policy.model.get_input_embeddings().weight[:, 0] = BIAS
        for name, parameter in policy.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[0] = 0
        head = policy.model.get_output_embeddings().weight
        head[:, 0] = 0
        head[policy.eos_id] = 0
        head[policy.eos_id, 0] = -(BIAS**2)
    return policy


def list_seeds(size: Size, first: int, count: int) -> tuple[GroupSeeds, ...]:
    return tuple(derive_group(BEACON, index, size.group_size) for index in range(first, first + count))


def make_job(size: Size, first: int, manifest: Manifest) -> Job:
    """A validator's job for all of a submission."""
    return Job(
        submission=f"s{first + 1}",
        round=1,
        step=1,
        first=first,
        count=size.groups,
        group_size=size.group_size,
        max_tokens=size.tokens,
        seeds=tuple(map(show_seeds, list_seeds(size, first, size.groups))),
        bounded=False,
        version=0,
        manifest=manifest,
        check_ppm=MILLION,
        check_seed=SEED,
        duplicates=(),
        deadline_ms=0,
    )


@contextmanager
def count_cpu(note: Callable[[float], None]) -> Iterator[None]:
    """Report the CPU time of a block, here and in the processes started from here."""
    before = time.process_time() + read_children()
    yield
    note(time.process_time() + read_children() - before)


def read_children() -> float:
    """CPU seconds of our children, including their ended children."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(fields[1]) == os.getpid():
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def rotate(names: Sequence[str], turn: int) -> list[str]:
    """The names, rotated so that each turn begins with a different one."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def measure_size(size: Size) -> Costs:
    """All turns with one model; a short uncounted one warms up first."""
    costs = Costs(size.name, leases=size.leases)
    with tempfile.TemporaryDirectory(prefix="shoal-checking-") as name, asyncio.Runner() as runner:
        jail = ParserPool()
        try:
            setup = CheckSetup(size, Path(name), runner, jail)
            costs.flops = setup.count_flops()
            costs.speed = measure_speed(fuse_layers(setup.policy.model)[0], LONG)
            setup.measure(Costs(size.name), 0, 1)
            for turn in range(1, size.turns + 1):
                setup.measure(costs, turn, size.leases)
        finally:
            runner.run(jail.close())
    return costs


def list_figures(all_costs: Sequence[Costs]) -> dict[str, float]:
    """Named figures; those of long answers are of the model with the most expensive check."""
    demo = next(costs for costs in all_costs if costs.size == DEMO)
    long = [costs for costs in all_costs if costs is not demo]
    worst = max(long, key=lambda costs: costs.share(TOGETHER))
    single, wide = _pick(long, GROUP), _pick(long, WIDE)
    return {
        "cost_all_512": worst.share(TOGETHER),
        "bound_all_512": worst.bound,
        "cost_all_512_group": max(costs.share(TOGETHER) for costs in single),
        "cost_dial_512": max(costs.share("trusted") for costs in long),
        "cost_dial_512_group": max(costs.share("trusted") for costs in single),
        "cost_dial_512_wide": max(costs.share("trusted") for costs in wide),
        "cost_good_512": max(costs.share("good") for costs in long),
        "cost_read": max(costs.share(READ) for costs in long),
        "cost_replay": max(costs.share(TOGETHER) - costs.share(READ) for costs in long),
        "cost_all_demo": demo.share(TOGETHER),
        "cost_dial_demo": demo.share("trusted"),
        "batch_gain": min(costs.batch_gain for costs in long if costs.leases > 1),
        "batch_gain_demo": demo.batch_gain,
        "rollouts_per_s": worst.rollouts_per_s,
        "rollouts_per_s_demo": demo.rollouts_per_s,
    }


def _pick(all_costs: Sequence[Costs], end: str) -> Sequence[Costs]:
    """The costs whose names end with `end`; all if there are none."""
    return [costs for costs in all_costs if costs.size.endswith(end)] or all_costs


def format_table(all_costs: Sequence[Costs]) -> str:
    """The table of docs/validation.md."""
    lines = [
        "| model | tokens of an answer | written, tokens/s | reading | all, one by one | all | bound | good | trusted "
        "| batched | rollouts/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for costs in all_costs:
        told = [costs.share(READ), costs.share(ALL), costs.share(TOGETHER), costs.bound]
        told += [costs.share(name) for name in DIALS]
        shares = " | ".join(f"{100 * share:.2f} %" for share in told)
        gain = f"{costs.batch_gain:.2f} x" if costs.leases > 1 else "-"
        lines.append(
            f"| {costs.size} | {costs.mean_tokens:.0f} | {costs.tokens / costs.written:,.0f} | {shares} "
            f"| {gain} | {costs.rollouts_per_s:,.1f} |"
        )
    return "\n".join(lines)


def _add_written(costs: Costs, seconds: float) -> None:
    costs.written += seconds


def main() -> None:
    """Measure and print."""
    flags = parse_flags(__doc__ or "")
    tune_process(1)
    all_costs = [measure_size(size) for size in list_sizes(flags.quick)]
    finish(flags, format_table(all_costs), list_figures(all_costs))


if __name__ == "__main__":
    main()
