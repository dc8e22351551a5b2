"""How well the checks tell an attack from honest work: many leases, judged offline, no swarm.

An author and an honest one do the same leases. Every rollout is checked as a validator would check it with the trusted
weights and the run's calibration; a rollout counts as changed if anything handed in differs from honest work on the
same request. Shares have 95 % intervals (Wilson).

    power = measure_power("top_p", open_ground(Path("runs/demo-seed0")), leases=20)
    power.rollouts.value         share of changed rollouts that at least one check catches: the `d` of the dial
    power.submissions.value      share of submissions with a changed rollout that are caught if all of it is checked
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError
from shoal.eval import Estimate, estimate_share
from shoal.group import plan_groups
from shoal.policy.model import Policy
from shoal.recipe import Recipe, load_recipe
from shoal.redteam.forge import list_rollouts
from shoal.redteam.offline import Scribe
from shoal.redteam.registry import make_authors
from shoal.seeds import derive_seed
from shoal.toploc.calibration import Calibration, load_calibration
from shoal.toploc.check import Report, check_rollouts, weigh_reports
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a run offers to those who work for it: its recipe, weights by version, and its calibration."""

    recipe: Recipe
    folders: Mapping[int, Path]
    """of versions, at least one"""
    calibration: Calibration

    @property
    def newest(self) -> int:
        return max(self.folders)


def open_ground(run: Path) -> Ground:
    """The ground of a swarm's folder: v0, and the versions that it still holds."""
    launch = run / "launch"
    if not (launch / "recipe.json").exists():
        raise ConfigError(f"{run}: is no folder of a swarm; `shoal prepare` makes one")
    found = {int(path.name[1:]): path for path in sorted((run / "versions").glob("v*")) if path.is_dir()}
    recipe = load_recipe((launch / "recipe.json").read_bytes())
    if recipe.set.hash:
        recipe = recipe.bring_set((launch / "tasks.jsonl").read_bytes())
    return Ground(
        recipe=recipe,
        folders={0: launch / "v0"} | found,
        calibration=load_calibration(launch / "calibration.json"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What became of an attack, offline."""

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
    """unchanged rollouts that were caught all the same"""
    reward: float
    """mean of what was handed in"""
    honest_reward: float
    """mean of honest work on the same leases"""
    honest_tokens: int


def measure_power(
    attack: str | Author,
    ground: Ground,
    *,
    leases: int = 20,
    groups: int = 1,
    slots: int = 64,
    seeded: bool | None = None,
    seed: int = 0,
) -> Power:
    """Have an attack, or any author, do leases of so many groups at the newest version, and check all of it.

    `seeded=False` checks as if the engine could not sample by seed; None is as the recipe says.
    """
    author = make_authors(attack, ground.recipe)[0] if isinstance(attack, str) else attack
    cheat, honest = Scribe(author, slots=slots), Scribe(Author(ground.recipe), slots=slots)
    trusted: Policy | None = None
    for version, folder in sorted(ground.folders.items()):
        for scribe in (cheat, honest):
            scribe.load(version, folder)
        trusted = Author(ground.recipe).open_policy(version, folder)
    assert trusted is not None, "a ground has a version"
    seeded = ground.recipe.seeded if seeded is None else seeded
    tally = _Tally()
    for number in range(leases):
        order = make_order(ground, number, groups=groups, seed=seed)
        done, base = cheat.write(order), honest.write(order)
        reports = check_work(done, trusted, ground, seeded=seeded)
        together = weigh_reports(reports, ground.calibration).judge(ground.calibration.share)
        found = {together.check.value} if together.failed else set()
        tally.add(done, base, reports, found)
    return tally.sum_up(attack if isinstance(attack, str) else type(attack).__name__, seeded)


def make_order(ground: Ground, number: int, *, groups: int, seed: int = 0) -> Order:
    """A lease of a step that the newest version may write."""
    newest = ground.newest
    return Order(
        lease=f"l{number}",
        step=newest + 1,
        first=0,
        count=groups,
        beacon=derive_seed("power", seed, number),
        oldest=newest,
        deadline_ms=0,
    )


def check_work(work: Work, policy: Policy, ground: Ground, *, seeded: bool) -> list[Report]:
    """A report on every rollout, as a validator that looks at all of them makes it."""
    author, order = Author(ground.recipe), work.order
    plans = plan_groups(
        author.family,
        policy.tokenizer,
        author.shape,
        step=order.step,
        beacon=order.beacon,
        first=order.first,
        count=order.count,
    )
    return check_rollouts(
        {work.version: policy.model},
        [request for plan in plans for request in plan.requests],
        list_rollouts(work),
        work.proofs,
        ground.calibration,
        eos_id=policy.eos_id,
        seeded=seeded,
    )


@dataclass(slots=True)
class _Tally:
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

    def add(self, done: Work, base: Work, reports: Sequence[Report], together: set[str]) -> None:
        """One lease: what was handed in, honest work on it, and what the checks say; `together` failed as a whole."""
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
            changed=_share(self.changed, self.rollouts),
            rollouts=_share(self.caught, self.changed),
            submissions=_share(self.caught_leases, self.changed_leases),
            rollouts_by_check={name: _share(num, self.changed) for name, num in sorted(self.by_check.items())},
            submissions_by_check={
                name: _share(num, self.changed_leases) for name, num in sorted(self.leases_by_check.items())
            },
            alarms=self.alarms,
            reward=self.rewards[0] / self.rollouts,
            honest_reward=self.rewards[1] / self.rollouts,
            honest_tokens=self.tokens[1],
        )


def list_changed(done: Work, base: Work) -> list[bool]:
    """Of each rollout whether tokens or proofs are others than those of honest work."""
    pairs = zip(list_rollouts(done), list_rollouts(base), strict=True)
    return [
        not np.array_equal(own.token_ids, true.token_ids) or list(done.proofs[own.id]) != list(base.proofs[true.id])
        for own, true in pairs
    ]


def _share(count: int, total: int) -> Estimate:
    """A share, and all of [0, 1] as its interval where nothing was tried."""
    return estimate_share(count, total) if total else Estimate(0.0, 0.0, 1.0)
