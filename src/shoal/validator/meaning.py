"""The second stage: is this the work that was leased? It needs no weights, and is done for every rollout.

What is compared is derived again from the job: tasks, prompts, seeds, the stop rule, the rewards. A difference is no
proof of ill will, an older program may have caused it: it is unpaid, and costs width, but nobody is banned for it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.group import GroupShape, Plan, plan_groups
from shoal.policy.tokenizer import decode_completion
from shoal.recipe import Recipe
from shoal.rollout import Group, Request, Rollout
from shoal.submission.claims import Contents
from shoal.swarm.beacon import number_beacon
from shoal.swarm.messages import Finding, Job
from shoal.tasks.base import Family
from shoal.toploc.termination import check_ending
from shoal.validator.opinion import note_breach


class Meaning:
    """What the rollouts of a run must be; for one recipe and tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self._family: Family = recipe.open_family()
        self._tokenizer = tokenizer
        self._eos_id = int(tokenizer.eos_token_id)
        self._shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)

    def plan(self, job: Job) -> list[Plan]:
        """The groups that the job's lease asked for."""
        beacon = number_beacon(job.beacon)
        return plan_groups(self._family, self._tokenizer, self._shape, beacon=beacon, first=job.first, count=job.count)

    def find_breaches(self, job: Job, plans: Sequence[Plan], contents: Contents) -> Iterator[Finding]:
        """Everything that is not as it must be; nothing, for honest work."""
        if contents.entries != job.manifest.rollouts:
            yield note_breach("manifest", "the file holds other rollouts than its manifest")
        if [group.index for group in contents.groups] != [plan.index for plan in plans]:
            yield note_breach("groups", f"not groups {job.first} to {job.first + job.count - 1}, which were leased")
            return
        for position in job.duplicates:
            yield note_breach("copy", f"rollout {position}: the tokens of an earlier submission")
        for plan, group in zip(plans, contents.groups, strict=True):
            yield from self._check_group(job, plan, group)

    def _check_group(self, job: Job, plan: Plan, group: Group) -> Iterator[Finding]:
        if group.task_id != plan.task.id:
            yield note_breach("task", f"group {group.index}: another task than the lease's")
            return
        for request, rollout, claimed in zip(plan.requests, group.rollouts, group.scores, strict=True):
            if difference := _compare(request, rollout, job.version):
                yield note_breach("request", f"{rollout.id}: {difference}")
                continue
            ending = check_ending(rollout, eos_id=self._eos_id, max_tokens=request.max_tokens)
            if ending.failed:
                yield note_breach("termination", f"{rollout.id}: {ending.where}")
            text = decode_completion(self._tokenizer, rollout.token_ids)
            score = self._family.score(plan.task, text)
            if claimed.value != score.value:
                yield note_breach("reward", f"{rollout.id}: {claimed.value:.6g} claimed, {score.value:.6g} found")


def _compare(request: Request, rollout: Rollout, version: int) -> str:
    """How a rollout differs from what was asked for; empty if it does not."""
    if not np.array_equal(rollout.prompt_ids, np.array(request.prompt_ids, dtype=np.int32)):
        return "another prompt"
    if rollout.seed != request.seed:
        return "another seed"
    if rollout.temperature != request.temperature:
        return "another temperature"
    if rollout.version != version:
        return f"v{rollout.version}, the manifest says v{version}"
    return ""
