"""From a file to an assessment: form, consistency, proof, cheapest first. The first stage that fails decides.

    form         it is not a submission                           -> rejected_form
                 it crashes its parser each time                  -> inconclusive; rejected_form if another validator
                                                                     finds the same
    consistency  it is not the work that was leased               -> rejected_soft (rejected_form for its manifest)
                 it claims a reward that no verifier gives        -> rejected_hard, which takes two validators
                 it is a copy                                     -> the proof decides: rejected_hard or rejected_soft
    proof        it was not sampled with the weights it states    -> rejected_hard, which takes two validators
    doubt        no weights, no working parser; or a reward that
                 our verifier cannot decide with certainty, of
                 work that passes everything else                 -> inconclusive: unpaid, without blame

Invariants:
- nothing in a file raises: an unreadable file is a finding;
- an assessment is a function of job, file, weights and calibration: validators with the same inputs find the same
  numbers, whatever else they judge concurrently. Only the CPU time that it took is measured;
- the file of an owner without a record (`Job.bounded`) is read with little more CPU time than an honest one needs, and
  its first violation decides: the rewards of the rest are not computed;
- a doubt hides nothing: work is inconclusive only if its tokens were sampled. Otherwise one rollout near a limit would
  make any rubbish free of charge.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from shoal.learner.filter import has_signal
from shoal.policy.model import Policy
from shoal.protocol.messages import Finding, Job, Verdict
from shoal.protocol.outcome import CRASH_CHECK
from shoal.protocol.params import MILLION
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.sandbox.pool import read_jobs_cpu
from shoal.submission.limits import FormError, ParserCrashError, SubmissionLimits
from shoal.submission.read import ParserPool, ParserPoolError, ReadCost, SubmissionContents, read_submission
from shoal.tasks.base import Family
from shoal.toploc.calibration import Calibration
from shoal.toploc.rivals import Rival, RivalWeights, make_rivals, measure_change
from shoal.validator.consistency import COPY_CHECK, LIMIT_CHECK, REWARD_CHECK, ConsistencyCheck
from shoal.validator.finding import (
    Assessment,
    Replayed,
    count_drift,
    describe_group,
    measurement,
    rejected,
    state_odds,
    violation,
)
from shoal.validator.proof import ProofCase, ProofResult, check_proofs

_OPEN = frozenset({COPY_CHECK, LIMIT_CHECK})
"""consistency checks after which the proof is checked all the same"""
_FORMAL = frozenset({"manifest", "groups"})
"""consistency checks of the file as a whole"""


class Judge:
    """Judges the submissions of one run."""

    def __init__(self, recipe: Recipe, calibration: Calibration, parsers: ParserPool) -> None:
        self._recipe, self._calibration, self._parsers = recipe, calibration, parsers
        self._work: asyncio.Task[list[Assessment]] | None = None
        """the current computation; it continues after its caller gave up, because a thread cannot be stopped"""
        self.previous: Policy | None = None
        """the version before the one that is judged next, if `needs_previous`; None if nobody has it"""

    @property
    def needs_previous(self) -> bool:
        """Whether work is compared with the version before its own."""
        return Rival.PREVIOUS in self._calibration.rivals

    @cached_property
    def _family(self) -> Family:
        return self._recipe.open_family()

    async def judge(self, job: Job, path: Path, policy: Policy) -> Assessment:
        """Assess the file at `path`; `policy` is that of the job's version."""
        return (await self.judge_all([(job, path)], policy))[0]

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        """Assess several files whose jobs are of one version, each as if it were alone."""
        costs = [ReadCost() for _ in files]
        read = await asyncio.gather(
            *(self._read(job, path, policy, cost) for (job, path), cost in zip(files, costs, strict=True))
        )
        await self.finish()
        jobs = [job for job, _ in files]
        self._work = asyncio.create_task(asyncio.to_thread(self._judge_read, jobs, read, policy))
        assessments = await asyncio.shield(self._work)
        pairs = zip(assessments, costs, strict=True)
        return [replace(assessment, cpu_s=assessment.cpu_s + cost.cpu_s) for assessment, cost in pairs]

    async def finish(self) -> None:
        """Wait for a computation that outlived its deadline: two at once would both be late."""
        if self._work is not None:
            await asyncio.shield(self._work)
            self._work = None

    async def _read(self, job: Job, path: Path, policy: Policy, cost: ReadCost) -> SubmissionContents | Assessment:
        try:
            limits = self.limit_file(job, policy)
            return await read_submission(self._parsers, path, limits, bounded=job.bounded, cost=cost)
        except ParserCrashError as error:
            return rejected(Verdict.INCONCLUSIVE, [measurement(CRASH_CHECK, error.num_deaths, 0, error.reason)])
        except FormError as error:
            return rejected(Verdict.FORM, [violation("form", str(error))])
        except ParserPoolError as error:
            return rejected(Verdict.INCONCLUSIVE, [violation("reader", str(error))])

    def limit_file(self, job: Job, policy: Policy) -> SubmissionLimits:
        """Size limits of the file."""
        config = policy.model.config
        return SubmissionLimits(
            max_rollouts=job.count * job.group_size,
            group_size=job.group_size,
            max_tokens=job.max_tokens,
            vocab_size=config.vocab_size,
            max_prompt_tokens=config.max_position_embeddings,
            file_bytes=max(1, job.manifest.size),  # the size that the run accepted; its limit may have changed since
        )

    def _judge_read(
        self, jobs: Sequence[Job], read: Sequence[SubmissionContents | Assessment], policy: Policy
    ) -> list[Assessment]:
        """Assess parsed submissions, with one replay for all that are consistent."""
        consistency = ConsistencyCheck(self._recipe, policy.tokenizer, self._family)
        begun_s = time.process_time() + read_jobs_cpu()  # programs of a submission run in sandboxes
        found = [
            item if isinstance(item, Assessment) else self._check_consistency(consistency, job, item)
            for job, item in zip(jobs, read, strict=True)
        ]
        cases = [case for case in found if isinstance(case, ProofCase)]
        seeded, eos_id = self._recipe.seeded, policy.eos_id
        rivals = self._find_rivals(policy) if cases else {}
        proofs = iter(check_proofs(cases, policy.model, self._calibration, eos_id=eos_id, seeded=seeded, rivals=rivals))
        assessed = [self._assess_proof(item, next(proofs)) if isinstance(item, ProofCase) else item for item in found]
        share_s = (time.process_time() + read_jobs_cpu() - begun_s) / len(jobs)
        return [replace(assessment, cpu_s=share_s) for assessment in assessed]

    def _find_rivals(self, policy: Policy) -> dict[Rival, RivalWeights]:
        """The weights that work is compared with; none in float32."""
        bets, previous = self._calibration.rivals, self.previous
        if not bets:
            return {}
        if previous is not None:
            is_near = measure_change(policy.model, previous.model) < bets[Rival.PREVIOUS].least_change
            previous = None if is_near else previous
        return make_rivals(policy.model, None if previous is None else previous.model)

    def _check_consistency(
        self, consistency: ConsistencyCheck, job: Job, contents: SubmissionContents
    ) -> ProofCase | Assessment:
        plans = consistency.plan(job)
        violations = _list_violations(consistency.find_violations(job, plans, contents), bounded=job.bounded)
        if any(finding.check not in _OPEN for finding in violations):
            return rejected(_weigh_violations(violations), violations)
        if _has_copies(violations):
            # Only the seeds distinguish a copy from a coincidence, so all rollouts are replayed.
            job = job.model_copy(update={"check_ppm": MILLION})
        return ProofCase(job=job, plans=plans, contents=contents, violations=violations)

    def _is_wanted(self, group: Group) -> bool:
        """Whether a group counts for its batch."""
        return has_signal(group.rewards) or not self._recipe.filter

    def _assess_proof(self, case: ProofCase, proof: ProofResult) -> Assessment:
        replayed = Replayed(rollouts=proof.num_rollouts, tokens=proof.num_tokens)
        if not proof.holds:
            return rejected(Verdict.HARD, [*proof.findings, *case.violations], replayed)
        if case.violations:
            verdict = Verdict.SOFT if _has_copies(case.violations) else Verdict.INCONCLUSIVE
            return rejected(verdict, [*case.violations, *proof.findings], replayed)
        groups = case.contents.groups
        return Assessment(
            verdict=Verdict.ACCEPTED,
            findings=tuple(proof.findings),
            tokens=sum(group.num_tokens for group in groups),
            groups=tuple(describe_group(group, signal=self._is_wanted(group)) for group in groups),
            drift=count_drift(proof.reports, self._calibration),
            odds=state_odds(proof.reports),
            replayed=replayed,
        )


def _weigh_violations(violations: Sequence[Finding]) -> Verdict:
    """The verdict on work that is not what was leased."""
    checks = {finding.check for finding in violations}
    if checks & _FORMAL:
        return Verdict.FORM
    return Verdict.HARD if REWARD_CHECK in checks else Verdict.SOFT


def _list_violations(found: Iterator[Finding], *, bounded: bool) -> tuple[Finding, ...]:
    """All violations; `bounded`: only up to the first that decides, because finding more takes time."""
    violations = list[Finding]()
    for finding in found:
        violations.append(finding)
        if bounded and finding.check not in _OPEN:
            break
    return tuple(violations)


def _has_copies(violations: Sequence[Finding]) -> bool:
    return any(finding.check == COPY_CHECK for finding in violations)
