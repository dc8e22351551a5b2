"""The third stage: were these tokens sampled with these weights? One prefill over the rollouts that were drawn.

Which rollouts are looked at follows from the job's seed, which nobody knew when the manifest was signed; at least one
always is. Several submissions of one version are checked together, with the numbers that each has alone.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from shoal.group import Plan
from shoal.submission.claims import Contents
from shoal.swarm.messages import Finding, Job
from shoal.swarm.params import count_drawn
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import Batch, Report, check_batches, weigh_reports
from shoal.toploc.finding import Finding as Measure
from shoal.toploc.finding import rank_finding
from shoal.validator.opinion import note_measure

MAX_TOKENS = 1 << 16
"""of answers whose states are in memory at once, unless one submission has more"""


def draw_positions(job: Job, count: int) -> list[int]:
    """Positions of the rollouts that are checked, in order: as many as `check_ppm` is, those with the least marks."""
    marks = sorted((_draw_mark(job.check_seed, position), position) for position in range(count))
    return sorted(position for _, position in marks[: count_drawn(job.check_ppm, count)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A submission whose file was read and means what it must: what is left is its proof."""

    job: Job
    plans: Sequence[Plan]
    contents: Contents
    breaches: tuple[Finding, ...] = ()
    """what may be a copy, which is for the proof to say"""

    def draw(self) -> Batch:
        """The rollouts that are replayed, and what was asked for there."""
        requests = [request for plan in self.plans for request in plan.requests]
        # What may be a copy is looked at whatever the draw: that costs little, and whoever copies is found at once.
        chosen = sorted({*draw_positions(self.job, len(requests)), *self.job.duplicates})
        rollouts = self.contents.rollouts
        names = {requests[position].id for position in chosen}
        return Batch(
            requests=[requests[position] for position in chosen],
            rollouts=[rollouts[position] for position in chosen],
            proofs={name: proofs for name, proofs in self.contents.proofs.items() if name in names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the replay of a submission's drawn rollouts showed."""

    findings: list[Finding]
    """of each check the worst number that was found, then all others that failed"""
    reports: list[Report]
    num_rollouts: int
    num_tokens: int
    """of answers, replayed"""

    @property
    def holds(self) -> bool:
        return all(finding.passed for finding in self.findings)


def check_proofs(
    cases: Sequence[Case], model: PreTrainedModel, calibration: Calibration, *, eos_id: int, seeded: bool
) -> list[Proof]:
    """The proofs of several submissions of one version, each as it would be alone; blocks for as long as it takes."""
    proofs: list[Proof] = []
    for batches in _split_batches([case.draw() for case in cases]):
        version = cases[len(proofs)].job.version
        found = check_batches({version: model}, batches, calibration, eos_id=eos_id, seeded=seeded)
        proofs += [_weigh(batch, reports, calibration) for batch, reports in zip(batches, found, strict=True)]
    return proofs


def _split_batches(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Runs of batches with at most `MAX_TOKENS` each, whose states are in memory at once; a larger one is alone."""
    run: list[Batch] = []
    for batch in batches:
        if run and sum(map(_count_tokens, run)) + _count_tokens(batch) > MAX_TOKENS:
            yield run
            run = []
        run.append(batch)
    if run:
        yield run


def _count_tokens(batch: Batch) -> int:
    return sum(rollout.num_tokens for rollout in batch.rollouts)


def _weigh(batch: Batch, reports: list[Report], calibration: Calibration) -> Proof:
    together = weigh_reports(reports, calibration).judge(calibration.share)
    return Proof(
        findings=_order_findings([*_name_measures(reports), ("all of it", together)]),
        reports=reports,
        num_rollouts=len(batch.rollouts),
        num_tokens=_count_tokens(batch),
    )


def _name_measures(reports: Sequence[Report]) -> list[tuple[str, Measure]]:
    return [(report.rollout_id, measure) for report in reports for measure in report.findings]


def _order_findings(named: Sequence[tuple[str, Measure]]) -> list[Finding]:
    """The worst of each check first, failed ones before passed ones, then further failures."""
    ranked = sorted(named, key=lambda pair: rank_finding(pair[1]), reverse=True)
    worst: dict[str, tuple[str, Measure]] = {}
    for name, measure in ranked:
        worst.setdefault(measure.check.value, (name, measure))
    first = list(worst.values())
    others = [pair for pair in ranked if pair[1].failed and pair not in first]
    return [
        note_measure(measure.check.value, measure.statistic, measure.threshold, f"{name}, {measure.where}")
        for name, measure in [*first, *others]
    ]


def _draw_mark(seed: str, position: int) -> int:
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
