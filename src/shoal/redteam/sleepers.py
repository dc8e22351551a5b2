"""Offline: within how many submissions an owner of good record that cheats in a share of them is found.

An attack does a few leases for real, and every rollout of them is checked once. Then careers are drawn: in each
submission the owner cheats by a coin, throughout; which rollouts are looked at is drawn by the validator's own function
with the run's own share, and the submission is found if one of these fails, or all of them together do. So a career
costs microseconds, and the dial's promise is held against thousands of them.

The promise is about rollouts that are not honest work. Of what some attacks hand in most is: where the policy is sure,
another temperature draws the same tokens. Such an owner's coin is weighted so that the promise's fraction of all its
rollouts are bad; if it cannot cheat that much, it does so always, and is held to what the dial says of its fraction.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, quantiles

from shoal.redteam.offline import Scribe
from shoal.redteam.power import Ground, check_work, list_changed, make_order
from shoal.redteam.rate import Rate
from shoal.redteam.registry import make_authors
from shoal.swarm.messages import Job, Manifest, RolloutEntry, Standing
from shoal.swarm.params import RunParams, count_drawn
from shoal.swarm.rules.dial import Guarantee, count_submissions, detect_cheat, hasten
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import Report, weigh_reports
from shoal.validator.proof import draw_positions
from shoal.worker.author import Author

LEASES, CAREERS, MOST = 12, 2000, 10_000
STANDINGS = (Standing.GOOD, Standing.TRUSTED)
_JOB = Job(
    submission="s1",
    round=1,
    step=1,
    first=0,
    count=1,
    group_size=1,
    max_tokens=1,
    beacon="0" * 64,
    version=0,
    manifest=Manifest(
        lease="l1", fence=0, blob="0" * 64, size=0, version=0, rollouts=(RolloutEntry(hash="0" * 64, tokens=1),)
    ),
    check_ppm=0,
    check_seed="0" * 64,
    duplicates=(),
    deadline_ms=0,
)
"""of which only the draw is used"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Career:
    """How long sleepers of one kind last, in submissions since they began to cheat."""

    attack: str
    standing: str
    fraction: float
    """of its rollouts that are bad"""
    cheats: float
    """share of its submissions in which it cheats"""
    rollouts: int
    """of a submission"""
    checked: int
    """of these"""
    promised: int
    """submissions within which it is to be found ..."""
    probability: float
    """... with this probability"""
    kept: Rate
    """careers that were found within that"""
    mean: float
    longest: float
    """that one in a hundred reaches"""

    @property
    def holds(self) -> bool:
        """Whether the promise is not refuted: it lies below the upper end of the interval."""
        return self.kept.interval[1] >= self.probability


def measure_sleepers(attack: str, ground: Ground, params: RunParams, *, seed: int = 0) -> list[Career]:
    """Careers of an attack at the promise's own fraction, in each standing that is not fully checked."""
    works, changed = judge_works(attack, ground, groups=params.groups_per_lease, seed=seed)
    promises = {Standing.GOOD: hasten(params.guarantee), Standing.TRUSTED: params.guarantee}
    found = []
    for standing in STANDINGS:
        promise, rollouts = promises[standing], params.groups_per_lease * params.group_size
        share = params.check_share(standing, rollouts)
        checked, fraction = count_drawn(share, rollouts), min(promise.fraction, changed)
        promised = promise_within(promise, params.power, checked, fraction)
        rng = random.Random(f"{attack} {standing.value} {seed}")
        cheats = fraction / changed
        lengths = [live_career(works, ground.calibration, cheats, share, rng) for _ in range(CAREERS)]
        found.append(
            Career(
                attack=attack,
                standing=standing.value,
                fraction=fraction,
                cheats=cheats,
                rollouts=rollouts,
                checked=checked,
                promised=promised,
                probability=promise.probability,
                kept=Rate(sum(length <= promised for length in lengths), len(lengths)),
                mean=mean(lengths),
                longest=quantiles(lengths, n=100)[-1],
            )
        )
    return found


def promise_within(promise: Guarantee, power: float, checked: int, fraction: float) -> int:
    """Submissions within which who cheats in a fraction of its rollouts is found, by the dial."""
    if fraction >= promise.fraction:
        return promise.submissions
    return count_submissions(fraction, promise.probability, detect_cheat(checked, power))


def judge_works(attack: str, ground: Ground, *, groups: int, seed: int) -> tuple[list[list[Report]], float]:
    """Reports on all rollouts of some leases that an attack did, and the share of these that are not honest work."""
    scribe, honest = Scribe(make_authors(attack, ground.recipe)[0]), Scribe(Author(ground.recipe))
    trusted = Author(ground.recipe)
    for version, folder in sorted(ground.folders.items()):
        scribe.load(version, folder)
        honest.load(version, folder)
        policy = trusted.open_policy(version, folder)
    works, changed = [], []
    for number in range(LEASES):
        order = make_order(ground, number, groups=groups, seed=seed)
        work = scribe.write(order)
        works.append(check_work(work, policy, ground, seeded=ground.recipe.seeded))
        changed += list_changed(work, honest.write(order))
    return works, mean(changed)


def live_career(
    works: Sequence[Sequence[Report]], calibration: Calibration, fraction: float, share: int, rng: random.Random
) -> int:
    """Submissions of one owner until it is found; `MOST` if it never is."""
    for number in range(1, MOST + 1):
        if rng.random() < fraction and is_found(rng.choice(works), calibration, share, rng.randbytes(32).hex()):
            return number
    return MOST


def is_found(reports: Sequence[Report], calibration: Calibration, share: int, seed: str) -> bool:
    """Whether a submission is found by those of its rollouts that a seed draws."""
    job = _JOB.model_copy(update={"check_seed": seed, "check_ppm": share})
    drawn = [reports[position] for position in draw_positions(job, len(reports))]
    if any(not report.passed for report in drawn):
        return True
    return weigh_reports(drawn, calibration).judge(calibration.share).failed
