"""The third stage: were these tokens sampled with these weights? One prefill over the rollouts that were drawn.

Which rollouts are looked at follows from the job's seed, which nobody knew when the manifest was signed; at least one
always is.
"""

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedModel

from shoal.group import Plan
from shoal.submission.claims import Contents
from shoal.swarm.messages import Finding, Job
from shoal.swarm.params import MILLION
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import Report, check_rollouts, weigh_reports
from shoal.toploc.finding import Finding as Measure
from shoal.toploc.finding import rank_finding
from shoal.validator.opinion import note_measure


def draw_positions(job: Job, count: int) -> list[int]:
    """Positions of the rollouts that are checked, in order; a share of `check_ppm`, and at least one."""
    marks = [_draw_mark(job.check_seed, position) for position in range(count)]
    chosen = [position for position, mark in enumerate(marks) if mark * MILLION < job.check_ppm << 64]
    return chosen or [marks.index(min(marks))]


def check_proofs(
    job: Job,
    plans: Sequence[Plan],
    contents: Contents,
    model: PreTrainedModel,
    calibration: Calibration,
    *,
    eos_id: int,
    seeded: bool,
) -> list[Finding]:
    """Of each check the worst number that was found, then all others that failed; blocks for as long as it takes."""
    requests = [request for plan in plans for request in plan.requests]
    chosen = draw_positions(job, len(requests))
    rollouts = contents.rollouts
    names = {requests[position].id for position in chosen}
    reports = check_rollouts(
        {job.version: model},
        [requests[position] for position in chosen],
        [rollouts[position] for position in chosen],
        {name: proofs for name, proofs in contents.proofs.items() if name in names},
        calibration,
        eos_id=eos_id,
        seeded=seeded,
    )
    together = weigh_reports(reports, calibration).judge(calibration.share)
    return _order_findings([*_name_measures(reports), ("all of it", together)])


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
