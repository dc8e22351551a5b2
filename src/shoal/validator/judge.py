"""From a file to an opinion: form, meaning, proof, cheap to dear. The first stage that fails decides.

    form     it is no submission                                -> rejected_form
             it ends its reader each time                       -> inconclusive: if another finds so too, rejected_form
    meaning  it is not the work that was leased                 -> rejected_soft (rejected_form for its manifest)
             it is a copy                                       -> the proof is asked: rejected_hard or rejected_soft
    proof    it was not sampled with the weights it states      -> rejected_hard, which takes two validators
    doubt    weights not at hand, no reader to be had, a reward
             that our verifier cannot be sure of                -> inconclusive: unpaid, nobody is blamed

Invariants:
- nothing in a file raises: what cannot be read is a finding;
- an opinion is a function of job, file, weights and calibration: whoever holds the same four finds the same numbers,
  whatever else is judged beside it.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from shoal.learner.filter import has_signal
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.bounds import Bounds, CrashError, FormError
from shoal.submission.claims import Contents
from shoal.submission.jail import Jail, JailError
from shoal.submission.read import read_submission
from shoal.swarm.messages import Job, Verdict
from shoal.swarm.params import MILLION
from shoal.swarm.rules.outcome import CRASH_CHECK
from shoal.tasks.base import Family
from shoal.toploc.calibration import Calibration
from shoal.validator.history import count_drift, describe_group
from shoal.validator.meaning import COPY_CHECK, LIMIT_CHECK, Meaning
from shoal.validator.opinion import Opinion, Replayed, note_breach, note_measure, reject
from shoal.validator.proof import Case, Proof, check_proofs

_FORMAL = frozenset({"manifest", "groups"})
"""checks of meaning that are about the file as a whole"""


class Judge:
    """Judges the submissions of one run."""

    def __init__(self, recipe: Recipe, calibration: Calibration, jail: Jail) -> None:
        self._recipe, self._calibration, self._jail = recipe, calibration, jail
        self._work: asyncio.Task[list[Opinion]] | None = None
        """what is computed; it goes on if nobody waits for it any more, for a thread cannot be ended"""

    @cached_property
    def _family(self) -> Family:
        return self._recipe.open_family()

    async def judge(self, job: Job, path: Path, policy: Policy) -> Opinion:
        """What is to be said of the file at `path`; `policy` is that of the job's version."""
        return (await self.judge_all([(job, path)], policy))[0]

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        """The same of several files, whose jobs are of one version; each as it would be alone."""
        read = await asyncio.gather(*(self._read(job, path, policy) for job, path in files))
        await self.finish()
        jobs = [job for job, _ in files]
        self._work = asyncio.create_task(asyncio.to_thread(self._judge_read, jobs, read, policy))
        return await asyncio.shield(self._work)

    async def finish(self) -> None:
        """Wait for what is still computed though its time was over: two at once would be late both."""
        if self._work is not None:
            await asyncio.shield(self._work)
            self._work = None

    async def _read(self, job: Job, path: Path, policy: Policy) -> Contents | Opinion:
        try:
            return await read_submission(self._jail, path, self.bound_file(job, policy))
        except CrashError as error:
            return reject(Verdict.INCONCLUSIVE, [note_measure(CRASH_CHECK, error.num_deaths, 0, error.reason)])
        except FormError as error:
            return reject(Verdict.FORM, [note_breach("form", str(error))])
        except JailError as error:
            return reject(Verdict.INCONCLUSIVE, [note_breach("reader", str(error))])

    def bound_file(self, job: Job, policy: Policy) -> Bounds:
        """How large the file may be."""
        config = policy.model.config
        return Bounds(
            max_rollouts=job.count * job.group_size,
            group_size=job.group_size,
            max_tokens=job.max_tokens,
            vocab_size=config.vocab_size,
            max_prompt_tokens=config.max_position_embeddings,
            file_bytes=max(1, job.manifest.size),  # as the run took it, whose limit may be changed
        )

    def _judge_read(self, jobs: Sequence[Job], read: Sequence[Contents | Opinion], policy: Policy) -> list[Opinion]:
        """Opinions on what was read, with one replay for all whose meaning holds."""
        meaning = Meaning(self._recipe, policy.tokenizer, self._family)
        told = [
            found if isinstance(found, Opinion) else self._find_meaning(meaning, job, found)
            for job, found in zip(jobs, read, strict=True)
        ]
        cases = [case for case in told if isinstance(case, Case)]
        seeded, eos_id = self._recipe.seeded, policy.eos_id
        proofs = iter(check_proofs(cases, policy.model, self._calibration, eos_id=eos_id, seeded=seeded))
        return [self._weigh_proof(item, next(proofs)) if isinstance(item, Case) else item for item in told]

    def _find_meaning(self, meaning: Meaning, job: Job, contents: Contents) -> Case | Opinion:
        plans = meaning.plan(job)
        breaches = tuple(meaning.find_breaches(job, plans, contents))
        doubts = tuple(finding for finding in breaches if finding.check == LIMIT_CHECK)
        if any(finding.check not in (COPY_CHECK, LIMIT_CHECK) for finding in breaches):
            formal = any(finding.check in _FORMAL for finding in breaches)
            return reject(Verdict.FORM if formal else Verdict.SOFT, breaches)
        if doubts:
            return reject(Verdict.INCONCLUSIVE, doubts)
        if breaches:
            # Whether it is fraud or a chance in a million is for the seeds to say, and they are asked of all rollouts.
            job = job.model_copy(update={"check_ppm": MILLION})
        return Case(job=job, plans=plans, contents=contents, breaches=breaches)

    def _is_wanted(self, group: Group) -> bool:
        """Whether a group counts for its batch."""
        return has_signal(group.rewards) or not self._recipe.filter

    def _weigh_proof(self, case: Case, proof: Proof) -> Opinion:
        replayed = Replayed(rollouts=proof.num_rollouts, tokens=proof.num_tokens)
        if not proof.holds:
            return reject(Verdict.HARD, [*proof.findings, *case.breaches], replayed)
        if case.breaches:
            return reject(Verdict.SOFT, [*case.breaches, *proof.findings], replayed)
        groups = case.contents.groups
        return Opinion(
            verdict=Verdict.ACCEPTED,
            findings=tuple(proof.findings),
            tokens=sum(group.num_tokens for group in groups),
            groups=tuple(describe_group(group, signal=self._is_wanted(group)) for group in groups),
            drift=count_drift(proof.reports, self._calibration),
            replayed=replayed,
        )
