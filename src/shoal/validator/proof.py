"""The third stage: were these tokens sampled with these weights? One prefill over the drawn rollouts.

The rollouts to check follow from the job's seed, which was unknown when the manifest was signed; at least one is always
checked. Several submissions of one version are checked together, with the same numbers as alone.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from shoal.group import GroupPlan
from shoal.protocol.messages import Finding, Job
from shoal.protocol.params import count_drawn
from shoal.submission.read import SubmissionContents
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import CheckBatch, RolloutReport, check_batches, judge_rivals, weigh_reports
from shoal.toploc.finding import CheckResult, rank_finding
from shoal.toploc.rivals import Rival, RivalWeights
from shoal.validator.finding import measurement

MAX_TOKENS = 1 << 16
"""most answer tokens whose states are in memory at once, unless one submission has more"""


def draw_positions(job: Job, count: int, label: str = "") -> list[int]:
    """The positions to check out of `count`, in order: a share of `check_ppm`, at least one, those with the smallest
    hashes. Draws with different labels are independent of each other."""
    marks = [hashlib.sha256(f"{job.check_seed} {label}{position}".encode()).digest() for position in range(count)]
    return sorted(sorted(range(count), key=marks.__getitem__)[: count_drawn(job.check_ppm, count)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCase:
    """A well-formed and consistent submission, whose proof is still to be checked."""

    job: Job
    plans: Sequence[GroupPlan]
    contents: SubmissionContents
    violations: tuple[Finding, ...] = ()
    """possible copies, which the proof decides, and rewards that nothing decides"""

    def draw(self) -> CheckBatch:
        """The rollouts to replay, and their requests."""
        requests = [request for plan in self.plans for request in plan.requests]
        # Possible copies are always replayed: that is cheap and finds copies at once.
        chosen = sorted({*draw_positions(self.job, len(requests)), *self.job.duplicates})
        rollouts = self.contents.rollouts
        names = {requests[position].id for position in chosen}
        return CheckBatch(
            requests=[requests[position] for position in chosen],
            rollouts=[rollouts[position] for position in chosen],
            proofs={name: proofs for name, proofs in self.contents.proofs.items() if name in names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """Result of replaying a submission's drawn rollouts."""

    findings: list[Finding]
    """the worst number of each check, then all other failures"""
    reports: list[RolloutReport]
    num_rollouts: int
    num_tokens: int
    """answer tokens replayed"""

    @property
    def holds(self) -> bool:
        return all(finding.passed for finding in self.findings)


def check_proofs(
    cases: Sequence[ProofCase],
    model: PreTrainedModel,
    calibration: Calibration,
    *,
    eos_id: int,
    seeded: bool,
    rivals: Mapping[Rival, RivalWeights] | None = None,
) -> list[ProofResult]:
    """Check the proofs of several submissions of one version, each as if it were alone. Blocking."""
    proofs: list[ProofResult] = []
    for batches in _split_batches([case.draw() for case in cases]):
        version = cases[len(proofs)].job.version
        found = check_batches({version: model}, batches, calibration, eos_id=eos_id, seeded=seeded, rivals=rivals)
        proofs += [_weigh(batch, reports, calibration) for batch, reports in zip(batches, found, strict=True)]
    return proofs


def _split_batches(batches: Sequence[CheckBatch]) -> Iterator[list[CheckBatch]]:
    """Split into runs of at most `MAX_TOKENS`, whose states are in memory at once; a larger batch is alone."""
    run: list[CheckBatch] = []
    for batch in batches:
        if run and sum(map(_count_tokens, run)) + _count_tokens(batch) > MAX_TOKENS:
            yield run
            run = []
        run.append(batch)
    if run:
        yield run


def _count_tokens(batch: CheckBatch) -> int:
    return sum(rollout.num_tokens for rollout in batch.rollouts)


def _weigh(batch: CheckBatch, reports: list[RolloutReport], calibration: Calibration) -> ProofResult:
    named = [(report.rollout_id, result) for report in reports for result in report.findings]
    named.append(("all of it", weigh_reports(reports, calibration).judge(calibration.share)))
    if any(report.rivals for report in reports):
        named.append(("all of it", judge_rivals(reports, calibration)))
    return ProofResult(
        findings=_order_findings(named),
        reports=reports,
        num_rollouts=len(batch.rollouts),
        num_tokens=_count_tokens(batch),
    )


def _order_findings(named: Sequence[tuple[str, CheckResult]]) -> list[Finding]:
    """The worst of each check first, failed ones before passed ones, then further failures."""
    ranked = sorted(named, key=lambda pair: rank_finding(pair[1]), reverse=True)
    worst: dict[str, tuple[str, CheckResult]] = {}
    for name, result in ranked:
        worst.setdefault(result.check.value, (name, result))
    first = list(worst.values())
    others = [pair for pair in ranked if pair[1].failed and pair not in first]
    return [
        measurement(result.check.value, result.statistic, result.threshold, f"{name}, {result.where}")
        for name, result in [*first, *others]
    ]
