"""From a file to an opinion: form, meaning, proof, cheap to dear. The first stage that fails decides.

    form     it is no submission                                -> rejected_form
    meaning  it is not the work that was leased                 -> rejected_soft (rejected_form for its manifest)
    proof    it was not sampled with the weights it states      -> rejected_hard, which takes two validators
    doubt    weights not at hand, no reader to be had           -> inconclusive: unpaid, nobody is blamed

Invariants:
- nothing in a file raises: what cannot be read is a finding;
- an opinion is a function of job, file, weights and calibration: whoever holds the same four finds the same numbers.
"""

import asyncio
from pathlib import Path

from shoal.learner.filter import has_signal
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.submission.bounds import Bounds, FormError
from shoal.submission.claims import Contents
from shoal.submission.jail import Jail, JailError
from shoal.submission.read import read_submission
from shoal.swarm.messages import GroupFinding, Job, Verdict
from shoal.toploc.calibration import Calibration
from shoal.validator.meaning import Meaning
from shoal.validator.opinion import Opinion, note_breach, reject
from shoal.validator.proof import check_proofs

_FORMAL = frozenset({"manifest", "groups"})
"""checks of meaning that are about the file as a whole"""


class Judge:
    """Judges the submissions of one run."""

    def __init__(self, recipe: Recipe, calibration: Calibration, jail: Jail) -> None:
        self._recipe, self._calibration, self._jail = recipe, calibration, jail

    async def judge(self, job: Job, path: Path, policy: Policy) -> Opinion:
        """What is to be said of the file at `path`; `policy` is that of the job's version."""
        try:
            contents = await read_submission(self._jail, path, self.bound_file(job, policy))
        except FormError as error:
            return reject(Verdict.FORM, [note_breach("form", str(error))])
        except JailError as error:
            return reject(Verdict.INCONCLUSIVE, [note_breach("reader", str(error))])
        return await asyncio.to_thread(self._judge_contents, job, contents, policy)

    def bound_file(self, job: Job, policy: Policy) -> Bounds:
        """How large the file may be."""
        config = policy.model.config
        return Bounds(
            max_rollouts=job.count * job.group_size,
            group_size=job.group_size,
            max_tokens=job.max_tokens,
            vocab_size=config.vocab_size,
            max_prompt_tokens=config.max_position_embeddings,
        )

    def _judge_contents(self, job: Job, contents: Contents, policy: Policy) -> Opinion:
        meaning = Meaning(self._recipe, policy.tokenizer)
        plans = meaning.plan(job)
        if breaches := list(meaning.find_breaches(job, plans, contents)):
            formal = any(finding.check in _FORMAL for finding in breaches)
            return reject(Verdict.FORM if formal else Verdict.SOFT, breaches)
        findings = check_proofs(
            job,
            plans,
            contents,
            policy.model,
            self._calibration,
            eos_id=policy.eos_id,
            seeded=self._recipe.seeded,
        )
        if not all(finding.passed for finding in findings):
            return reject(Verdict.HARD, findings)
        return Opinion(
            verdict=Verdict.ACCEPTED,
            findings=tuple(findings),
            tokens=sum(group.num_tokens for group in contents.groups),
            groups=tuple(
                GroupFinding(index=group.index, signal=has_signal(group.rewards)) for group in contents.groups
            ),
        )
