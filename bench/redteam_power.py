"""Power of the checks against every hard attack, and the lifetime of sleepers, on the weights of a red-team run.

    shoal redteam                                            # creates runs/redteam-seed0
    python bench/redteam_power.py [RUN] [--quick] [--json]

More trials than a swarm has time for, without a swarm: an attack and an honest worker do the same leases, and every
rollout is checked as by a validator, with the trusted weights and the run's calibration. A rollout counts as changed if
anything submitted differs from honest work on the same request. Shares have 95 % intervals (Wilson).

power      share of an attack's changed rollouts, and of its submissions, that a check detects: the `d` of the dial
lifetime   submissions until an owner with a good record that cheats in a share of them is detected. The owner cheats in
           each submission by an independent coin flip. Which rollouts are checked is drawn by the validator's own
           function with the run's own share, and the submission is detected if one of these fails, or all of them
           together do. So a lifetime costs microseconds, and the dial's promise is compared with thousands of them.

The promise is about rollouts that are not honest work. Most of what some attacks submit is honest work: where the
policy is certain, a different temperature draws the same tokens. Such an owner's coin is biased so that the promised
fraction of all its rollouts is bad. If it cannot cheat that much, it always cheats, and is compared with the dial's
promise for its actual fraction.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

from common import build_parser, finish
from offline_work import OfflineGenerator, OfflineRun, check_work, list_changed, make_order, open_run
from shoal.config.toml import read_toml
from shoal.launch.layout import SwarmPaths
from shoal.policy.model import Policy
from shoal.protocol.check_rate import Guarantee, count_submissions, detect_cheat, hasten
from shoal.protocol.messages import Job, Manifest, RolloutEntry, Standing
from shoal.protocol.params import RunParams, count_drawn, parse_params
from shoal.redteam.matrix import Proportion
from shoal.redteam.registry import Expected, list_attacks, make_behaviours
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import RolloutReport, weigh_reports
from shoal.train.eval import Estimate, estimate_share
from shoal.validator.proof import draw_positions
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour

POWER_LEASES, POWER_GROUPS = 8, 2
NUM_VERSIONS = 3
"""number of versions of the run to use, the last ones"""
COPIES = ("copy_all", "copy_one", "copy_encoded")
"""need another worker to copy from; detected as well as `own_old`, which copies from itself"""
SLEEPERS = ("edited_tokens", "greedy", "temperature", "truncation", "best_of_n")
"""attacks by owners that have the true weights"""
LEASES, LIFETIMES, MAX_SUBMISSIONS = 12, 2000, 10_000
STANDINGS = (Standing.GOOD, Standing.TRUSTED)
_JOB = Job(
    submission="s1",
    round=1,
    step=1,
    first=0,
    count=1,
    group_size=1,
    max_tokens=1,
    seeds=("0" * 32,),
    version=0,
    manifest=Manifest(
        lease="l1", fence=0, blob="0" * 64, size=0, version=0, rollouts=(RolloutEntry(hash="0" * 64, tokens=1),)
    ),
    check_ppm=0,
    check_seed="0" * 64,
    bounded=False,
    duplicates=(),
    deadline_ms=0,
)
"""only its draw is used"""


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/redteam-seed0"), metavar="RUN")
    flags = parser.parse_args()
    run = keep_last(open_run(flags.run), NUM_VERSIONS)
    attacks = [] if flags.quick else [found.name for found in list_attacks().values() if is_measured(found.name)]
    powers = [measure_power(name, run, leases=POWER_LEASES, groups=POWER_GROUPS) for name in attacks]
    params = read_params(flags.run)
    lifetimes = [
        each for name in SLEEPERS[: 1 if flags.quick else None] for each in measure_sleepers(name, run, params)
    ]
    finish(
        flags, "\n".join([*format_powers(powers), "", *format_lifetimes(lifetimes)]), collect_figures(powers, lifetimes)
    )


def is_measured(name: str) -> bool:
    """Whether an attack must be convicted, and can be carried out by a single worker."""
    return list_attacks()[name].expect is Expected.HARD and name not in COPIES


def keep_last(run: OfflineRun, count: int) -> OfflineRun:
    """A run with only its last versions."""
    kept = sorted(run.folders)[-count:]
    folders = {version: run.folders[version] for version in kept}
    return OfflineRun(recipe=run.recipe, folders=folders, calibration=run.calibration)


def read_params(folder: Path) -> RunParams:
    """The parameters that a swarm's coordinator starts with."""
    return parse_params(read_toml(SwarmPaths(folder).service)["params"])


def collect_figures(powers: Sequence["Power"], lifetimes: Sequence["SleeperLifetime"]) -> dict[str, float]:
    """The share detected for each attack, and the share of sleepers detected within the promise."""
    figures = {f"power_{power.attack}": power.rollouts.value for power in powers}
    if powers:
        figures |= {"power_least": min(figures.values()), "alarms": sum(power.alarms for power in powers)}
    for each in lifetimes:
        figures[f"kept_{each.attack}_{each.standing}"] = each.kept.value
    return figures | {"promises_refuted": sum(not each.holds for each in lifetimes)}


def format_powers(powers: Sequence["Power"]) -> list[str]:
    """One row per attack."""
    if not powers:
        return []
    lines = ["All rollouts checked: bad rollouts, and submissions with bad rollouts, that are detected.", ""]
    lines += ["| attack | bad rollouts | found | submissions found | false alarms |", "|---|---|---|---|---|"]
    for power in powers:
        bad = f"{round(power.changed.value * power.num_rollouts)} of {power.num_rollouts}"
        cells = (power.attack, bad, show(power.rollouts), show(power.submissions), str(power.alarms))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_lifetimes(lifetimes: Sequence["SleeperLifetime"]) -> list[str]:
    """One row per attack and standing."""
    lines = ["Owners with a good record that cheat in some of their submissions; bad rollouts are not honest work.", ""]
    head = ("attack", "standing", "cheats in", "bad", "replayed", "promise", "kept", "mean", "one in 100 lasts")
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for each in lifetimes:
        low, high = each.kept.interval
        cells = (
            *(each.attack, each.standing, f"{each.cheats:.0%}", f"{each.fraction:.1%}"),
            *(f"{each.checked} of {each.rollouts}", f"within {each.promised}, {each.probability:.0%}"),
            *(f"{each.kept.value:.1%} ({low:.1%} to {high:.1%})", f"{each.mean:.1f}", f"{each.longest:.0f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def show(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The offline result of an attack."""

    attack: str
    seeded: bool
    num_leases: int
    num_rollouts: int
    num_tokens: int
    changed: Estimate
    """share of rollouts that are not honest work"""
    rollouts: Estimate
    """share of these that some check catches"""
    submissions: Estimate
    """share of submissions with any of these that some check catches, if all rollouts are checked"""
    rollouts_by_check: Mapping[str, Estimate]
    submissions_by_check: Mapping[str, Estimate]
    alarms: int
    """unchanged rollouts that were rejected nevertheless"""
    reward: float
    """mean reward of the submitted work"""
    honest_reward: float
    """mean reward of honest work on the same leases"""
    honest_tokens: int


def measure_power(
    attack: str | WorkerBehaviour,
    run: OfflineRun,
    *,
    leases: int = 20,
    groups: int = 1,
    slots: int = 64,
    seeded: bool | None = None,
    seed: int = 0,
) -> Power:
    """Let an attack, or any behaviour, do leases of that many groups at the newest version, and check everything.

    `seeded=False` checks as if the engine could not sample by seed; None is as in the recipe.
    """
    behaviour = make_behaviours(attack, run.recipe)[0] if isinstance(attack, str) else attack
    cheat, honest = OfflineGenerator(behaviour, slots=slots), OfflineGenerator(WorkerBehaviour(run.recipe), slots=slots)
    trusted: Policy | None = None
    for version, folder in sorted(run.folders.items()):
        for generator in (cheat, honest):
            generator.load(version, folder)
        trusted = WorkerBehaviour(run.recipe).open_policy(version, folder)
    assert trusted is not None, "the run has no version"
    seeded = run.recipe.seeded if seeded is None else seeded
    counts = PowerCounts()
    for number in range(leases):
        order = make_order(run, number, groups=groups, seed=seed)
        done, base = cheat.write(order), honest.write(order)
        reports = check_work(done, trusted, run, seeded=seeded)
        together = weigh_reports(reports, run.calibration).judge(run.calibration.share)
        found = {together.check.value} if together.failed else set()
        counts.add(done, base, reports, found)
    return counts.sum_up(attack if isinstance(attack, str) else type(attack).__name__, seeded)


@dataclass(slots=True)
class PowerCounts:
    leases: int = 0
    rollouts: int = 0
    changed: int = 0
    caught: int = 0
    alarms: int = 0
    changed_leases: int = 0
    caught_leases: int = 0
    by_check: Counter[str] = field(default_factory=Counter)
    leases_by_check: Counter[str] = field(default_factory=Counter)
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    rewards: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, done: FinishedWork, base: FinishedWork, reports: Sequence[RolloutReport], together: set[str]) -> None:
        """Add one lease: submitted work, honest work on it, reports, and checks that failed for the submission."""
        changed = list_changed(done, base)
        failed = [{finding.check.value for finding in report.failed} for report in reports]
        odd = [names for names, is_changed in zip(failed, changed, strict=True) if is_changed]
        self.leases += 1
        self.rollouts += len(changed)
        self.changed += len(odd)
        self.caught += sum(bool(names) for names in odd)
        self.alarms += sum(bool(names) for names, is_changed in zip(failed, changed, strict=True) if not is_changed)
        self.by_check.update(name for names in odd for name in names)
        if odd:
            found = together.union(*odd)
            self.changed_leases += 1
            self.caught_leases += bool(found)
            self.leases_by_check.update(found)
        for place, work in enumerate((done, base)):
            self.tokens[place] += work.num_tokens
            self.rewards[place] += float(sum(group.rewards.sum() for group in work.groups))

    def sum_up(self, attack: str, seeded: bool) -> Power:
        """The shares."""
        return Power(
            attack=attack,
            seeded=seeded,
            num_leases=self.leases,
            num_rollouts=self.rollouts,
            num_tokens=self.tokens[0],
            changed=share_of(self.changed, self.rollouts),
            rollouts=share_of(self.caught, self.changed),
            submissions=share_of(self.caught_leases, self.changed_leases),
            rollouts_by_check={name: share_of(num, self.changed) for name, num in sorted(self.by_check.items())},
            submissions_by_check={
                name: share_of(num, self.changed_leases) for name, num in sorted(self.leases_by_check.items())
            },
            alarms=self.alarms,
            reward=self.rewards[0] / self.rollouts,
            honest_reward=self.rewards[1] / self.rollouts,
            honest_tokens=self.tokens[1],
        )


def share_of(count: int, total: int) -> Estimate:
    """A share; if there were no trials, its interval is all of [0, 1]."""
    return estimate_share(count, total) if total else Estimate(0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SleeperLifetime:
    """How long sleepers of one kind last, in submissions since they started to cheat."""

    attack: str
    standing: str
    fraction: float
    """share of bad rollouts"""
    cheats: float
    """share of its submissions in which it cheats"""
    rollouts: int
    """replayed rollouts of a submission"""
    checked: int
    """of these"""
    promised: int
    """submissions within which it must be detected ..."""
    probability: float
    """... with this probability"""
    kept: Proportion
    """careers that were detected within that"""
    mean: float
    longest: float
    """submissions that one in a hundred reaches"""

    @property
    def holds(self) -> bool:
        """Whether the promise is not refuted: it is below the upper end of the interval."""
        return self.kept.interval[1] >= self.probability


def measure_sleepers(attack: str, run: OfflineRun, params: RunParams, *, seed: int = 0) -> list[SleeperLifetime]:
    """Careers of an attack at the promise's own fraction, in each standing that is not fully checked."""
    works, changed = check_works(attack, run, groups=params.groups_per_lease, seed=seed)
    promises = {Standing.GOOD: hasten(params.guarantee), Standing.TRUSTED: params.guarantee}
    found = []
    for standing in STANDINGS:
        promise, rollouts = promises[standing], params.groups_per_lease * params.group_size
        share = params.check_share(standing, rollouts)
        checked, fraction = count_drawn(share, rollouts), min(promise.fraction, changed)
        promised = promise_within(promise, params.power, checked, fraction)
        rng = random.Random(f"{attack} {standing.value} {seed}")
        cheats = fraction / changed
        lengths = [draw_lifetime(works, run.calibration, cheats, share, rng) for _ in range(LIFETIMES)]
        found.append(
            SleeperLifetime(
                attack=attack,
                standing=standing.value,
                fraction=fraction,
                cheats=cheats,
                rollouts=rollouts,
                checked=checked,
                promised=promised,
                probability=promise.probability,
                kept=Proportion(sum(length <= promised for length in lengths), len(lengths)),
                mean=mean(lengths),
                longest=quantiles(lengths, n=100)[-1],
            )
        )
    return found


def promise_within(promise: Guarantee, power: float, checked: int, fraction: float) -> int:
    """Submissions within which an owner that cheats in a fraction of its rollouts is detected, by the dial."""
    if fraction >= promise.fraction:
        return promise.submissions
    return count_submissions(fraction, promise.probability, detect_cheat(checked, power))


def check_works(attack: str, run: OfflineRun, *, groups: int, seed: int) -> tuple[list[list[RolloutReport]], float]:
    """Reports on all rollouts of some leases done by an attack, and the share that is not honest work."""
    generator, honest = (
        OfflineGenerator(make_behaviours(attack, run.recipe)[0]),
        OfflineGenerator(WorkerBehaviour(run.recipe)),
    )
    trusted = WorkerBehaviour(run.recipe)
    for version, folder in sorted(run.folders.items()):
        generator.load(version, folder)
        honest.load(version, folder)
        policy = trusted.open_policy(version, folder)
    works, changed = [], []
    for number in range(LEASES):
        order = make_order(run, number, groups=groups, seed=seed)
        work = generator.write(order)
        works.append(check_work(work, policy, run, seeded=run.recipe.seeded))
        changed += list_changed(work, honest.write(order))
    return works, mean(changed)


def draw_lifetime(
    works: Sequence[Sequence[RolloutReport]], calibration: Calibration, fraction: float, share: int, rng: random.Random
) -> int:
    """Submissions of one owner until it is detected; `MAX_SUBMISSIONS` if it never is."""
    for number in range(1, MAX_SUBMISSIONS + 1):
        if rng.random() < fraction and is_found(rng.choice(works), calibration, share, rng.randbytes(32).hex()):
            return number
    return MAX_SUBMISSIONS


def is_found(reports: Sequence[RolloutReport], calibration: Calibration, share: int, seed: str) -> bool:
    """Whether a submission is detected by those of its rollouts that a seed selects."""
    job = _JOB.model_copy(update={"check_seed": seed, "check_ppm": share})
    drawn = [reports[position] for position in draw_positions(job, len(reports))]
    if any(not report.passed for report in drawn):
        return True
    return weigh_reports(drawn, calibration).judge(calibration.share).failed


if __name__ == "__main__":
    main()
