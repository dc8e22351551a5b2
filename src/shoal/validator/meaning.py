"""The second stage: is this the work that was leased? It needs no weights, and is done for every rollout.

What is compared is derived again from the job: tasks, prompts, seeds, the stop rule, the rewards. A difference is no
proof of ill will, an older program may have caused it: it is unpaid, and costs width, but nobody is banned for it.

Two checks are about what an honest sampler does by chance, and fail it with a probability of at most exp(-CHANCE_NATS)
each, whatever the model. Be p the distribution that a token is drawn from, of V tokens, and P that of a completion:

    bounds   -(ln V + CHANCE_NATS) <= log-prob <= 0     a token with p < exp(-c) / V is drawn with probability < exp(-c)
    copies   two completions, each with a seed of its own, are equal and of probability P < exp(-c):
             the sum of P(x)^2 over all such x is below exp(-c)

So short answers and sure ones may be equal as often as they like: only the seed tells them from copies, which the proof
looks at. What a completion is worth in nats is the claim of who wrote it, and that is looked at there as well.

Rewards are compared as numbers, exactly: a verifier computes the same bits on every machine (tasks/base.py). They are
all computed again, but for families whose verifier is dear: of each of their groups a share that the job's seed draws.
Where ours met a limit, or came near one, a reward that differs says nothing (tasks/verify/base.py): that is a doubt of
its own, `LIMIT_CHECK`, and no breach.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.group import GroupShape, Plan, plan_groups
from shoal.policy.tokenizer import decode_completion
from shoal.recipe import Recipe
from shoal.rollout import Group, Request, Rollout, Score
from shoal.submission.claims import Contents
from shoal.swarm.beacon import number_beacon
from shoal.swarm.messages import Finding, Job, RolloutEntry
from shoal.swarm.params import count_drawn
from shoal.tasks.base import Family, is_dear, score_texts
from shoal.tasks.verify.base import Agreement, compare_claim
from shoal.toploc.logprobs import ROUNDING
from shoal.toploc.termination import check_ending
from shoal.validator.opinion import note_breach

COPY_CHECK = "copy"
"""the one breach that is not the last word: the proof tells a copy from a coincidence"""
LIMIT_CHECK = "limit"
"""the one finding that is no breach: a reward that this machine cannot be sure of"""
CHANCE_NATS = 40.0
"""what is less likely than exp(-40), which is 4e-18, is not taken for chance"""


class Meaning:
    """What the rollouts of a run must be; for one recipe and tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, family: Family | None = None) -> None:
        """`family` is what the recipe opens, if that was done already."""
        self._family: Family = family or recipe.open_family()
        self._tokenizer = tokenizer
        self._eos_id = int(tokenizer.eos_token_id)
        self._least_logprob = -(math.log(len(tokenizer)) + CHANCE_NATS)
        self._shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)

    def plan(self, job: Job) -> list[Plan]:
        """The groups that the job's lease asked for."""
        beacon = number_beacon(job.beacon)
        return plan_groups(
            self._family,
            self._tokenizer,
            self._shape,
            step=job.step,
            beacon=beacon,
            first=job.first,
            count=job.count,
        )

    def find_breaches(self, job: Job, plans: Sequence[Plan], contents: Contents) -> Iterator[Finding]:
        """Everything that is not as it must be; nothing, for honest work."""
        entries, rollouts = contents.entries, contents.rollouts
        if entries != job.manifest.rollouts:
            yield note_breach("manifest", "the file holds other rollouts than its manifest")
        if [group.index for group in contents.groups] != [plan.index for plan in plans]:
            yield note_breach("groups", f"not groups {job.first} to {job.first + job.count - 1}, which were leased")
            return
        for position in job.duplicates:
            if measure_nats(rollouts[position]) > CHANCE_NATS:
                yield note_breach(COPY_CHECK, f"rollout {position}: the tokens of an earlier submission")
        yield from _find_copies(entries, rollouts)
        for plan, group in zip(plans, contents.groups, strict=True):
            yield from self._check_group(job, plan, group)

    def _check_group(self, job: Job, plan: Plan, group: Group) -> Iterator[Finding]:
        if group.task_id != plan.task.id:
            yield note_breach("task", f"group {group.index}: another task than the lease's")
            return
        pairs = list(zip(plan.requests, group.rollouts, strict=True))
        differences = [_compare(request, rollout, job.version) for request, rollout in pairs]
        asked = [sample for sample in sorted(self._draw_scored(job, group)) if not differences[sample]]
        found = dict(zip(asked, self._score(plan, [group.rollouts[sample] for sample in asked]), strict=True))
        for sample, (request, rollout) in enumerate(pairs):
            if differences[sample]:
                yield note_breach("request", f"{rollout.id}: {differences[sample]}")
                continue
            yield from self._check_rollout(request, rollout)
            if sample in found:
                yield from _check_reward(rollout, group.scores[sample].value, found[sample])

    def _score(self, plan: Plan, rollouts: Sequence[Rollout]) -> list[Score]:
        """What ours gives for rollouts of one group; side by side where the verifier can do so."""
        texts = [decode_completion(self._tokenizer, rollout.token_ids) for rollout in rollouts]
        return score_texts(self._family, plan.task, texts)

    def _check_rollout(self, request: Request, rollout: Rollout) -> Iterator[Finding]:
        ending = check_ending(rollout, eos_id=self._eos_id, max_tokens=request.max_tokens)
        if ending.failed:
            yield note_breach("termination", f"{rollout.id}: {ending.where}")
        least, most = float(rollout.logprobs.min()), float(rollout.logprobs.max())
        if not self._least_logprob <= least <= most <= ROUNDING:
            wrong = most if most > ROUNDING else least
            yield note_breach("bounds", f"{rollout.id}: a log-prob of {wrong:.6g}, which no token that was drawn has")

    def _draw_scored(self, job: Job, group: Group) -> frozenset[int]:
        """Samples of a group whose reward is computed again."""
        size = len(group.rollouts)
        return draw_samples(job, group.index, size) if is_dear(self._family) else frozenset(range(size))


def _check_reward(rollout: Rollout, claimed: float, found: Score) -> Iterator[Finding]:
    match compare_claim(claimed, found):
        case Agreement.DIFFERS:
            yield note_breach("reward", f"{rollout.id}: {claimed!r} claimed, {found.value!r} found")
        case Agreement.UNSURE:
            yield note_breach(LIMIT_CHECK, f"{rollout.id}: {claimed!r} claimed, {found.reason}")


def draw_samples(job: Job, group: int, size: int) -> frozenset[int]:
    """Samples of a group whose dear reward is computed again: the job's share, at least one. No other draw of the seed
    is like it, so a rollout that the proof does not look at may be scored."""
    marks = [hashlib.sha256(f"{job.check_seed} reward {group} {sample}".encode()).digest() for sample in range(size)]
    chosen = sorted(range(size), key=marks.__getitem__)
    return frozenset(chosen[: count_drawn(job.check_ppm, size)])


def measure_nats(rollout: Rollout) -> float:
    """How unlikely a completion is by its own log-probs, in nats."""
    return -float(rollout.logprobs.sum(dtype=np.float64))


def _find_copies(entries: Sequence[RolloutEntry], rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """Rollouts of one file that are equal and too unlikely for that; the likelier claim of two counts for nothing."""
    first: dict[str, Rollout] = {}
    for entry, rollout in zip(entries, rollouts, strict=True):
        other = first.setdefault(entry.hash, rollout)
        if other is not rollout and max(measure_nats(other), measure_nats(rollout)) > CHANCE_NATS:
            yield note_breach(COPY_CHECK, f"{rollout.id}: the tokens of {other.id}, which has another seed")


def _compare(request: Request, rollout: Rollout, version: int) -> str:
    """How a rollout differs from what was asked for; empty if it does not."""
    if rollout.prompt_ids.tolist() != list(request.prompt_ids):
        return "another prompt"
    if rollout.seed != request.seed:
        return "another seed"
    if rollout.temperature != request.temperature:
        return "another temperature"
    if rollout.version != version:
        return f"v{rollout.version}, the manifest says v{version}"
    return ""
