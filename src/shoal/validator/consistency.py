"""The second stage: is this the work that was leased? Needs no weights; done for every rollout.

Everything compared is derived again from the job: tasks, prompts, seeds, the stop rule, the rewards. A difference does
not prove fraud, because an outdated program may cause it: the work is unpaid and the lease limit drops, without a ban.

Two checks concern what an honest sampler does by chance; an honest rollout fails each with probability at most
exp(-CHANCE_NATS), whatever the model. Let p be the distribution that a token is drawn from, over V tokens, and P that
of a completion:

    bounds   -(ln V + CHANCE_NATS) <= log-prob <= 0     a token with p < exp(-c) / V is drawn with probability < exp(-c)
    copies   two completions with different seeds are equal and have probability P < exp(-c):
             the sum of P(x)^2 over all such x is below exp(-c)

So short and certain answers may be equal as often as they like: only the seed distinguishes them from copies, which the
proof checks. The nats of a completion are the worker's claim, which the proof checks as well.

Rewards are compared exactly: a verifier computes the same bits on every machine (tasks/base.py), and its version is
part of the recipe, so that no other version scores for a run. All rewards are computed again; of a task whose verifier
is expensive, only a share of each group, drawn by the job's seed.

    reward       proven false: no machine computes the claim. It is decided like a failed proof, as fraud
    reward_low   less than found, by a verifier with a time limit: a machine that is too slow may have given up
    limit        our verifier hit a limit, came close to one, or scores otherwise under other conditions: a doubt, and
                 not a violation (tasks/verify/base.py)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.group import GroupPlan, GroupShape, plan_leased
from shoal.policy.tokenizer import decode_completion
from shoal.protocol.beacon import read_seeds
from shoal.protocol.messages import Finding, Job, RolloutEntry
from shoal.recipe import Recipe
from shoal.rollout import Group, Request, Rollout, Score
from shoal.submission.read import SubmissionContents
from shoal.tasks.base import Family, is_expensive, score_again, score_texts
from shoal.tasks.verify.base import Agreement, compare_claim, give_up
from shoal.toploc.token_checks import ROUNDING, check_ending
from shoal.validator.finding import violation
from shoal.validator.proof import draw_positions

COPY_CHECK = "copy"
"""the one violation that does not decide: the proof distinguishes a copy from a coincidence"""
REWARD_CHECK = "reward"
"""the one violation that is fraud, whatever else is found"""
LOW_REWARD_CHECK = "reward_low"
LIMIT_CHECK = "limit"
"""the one finding that is not a violation: a reward that this machine cannot decide with certainty"""
CHANCE_NATS = 40.0
"""events less likely than exp(-40) = 4e-18 are not attributed to chance"""


class ConsistencyCheck:
    """What the rollouts of a run must satisfy, for one recipe and tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, family: Family | None = None) -> None:
        """`family` is what the recipe opens, if it is open already."""
        self._family: Family = family or recipe.open_family()
        self._tokenizer = tokenizer
        self._eos_id = int(tokenizer.eos_token_id)
        self._least_logprob = -(math.log(len(tokenizer)) + CHANCE_NATS)
        self._shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)

    def plan(self, job: Job) -> list[GroupPlan]:
        """The groups that the job's lease requested."""
        seeds = [read_seeds(text) for text in job.seeds]
        return plan_leased(self._family, self._tokenizer, self._shape, step=job.step, first=job.first, seeds=seeds)

    def find_violations(self, job: Job, plans: Sequence[GroupPlan], contents: SubmissionContents) -> Iterator[Finding]:
        """All violations; none for honest work."""
        entries, rollouts = contents.entries, contents.rollouts
        if entries != job.manifest.rollouts:
            yield violation("manifest", "the file holds other rollouts than its manifest")
        if [group.index for group in contents.groups] != [plan.index for plan in plans]:
            yield violation("groups", f"not groups {job.first} to {job.first + job.count - 1}, which were leased")
            return
        for position in job.duplicates:
            if measure_nats(rollouts[position]) > CHANCE_NATS:
                yield violation(COPY_CHECK, f"rollout {position}: the tokens of an earlier submission")
        yield from _find_copies(entries, rollouts)
        doubts = _Doubts()
        for plan, group in zip(plans, contents.groups, strict=True):
            yield from self._check_group(job, plan, group, doubts)

    def _check_group(self, job: Job, plan: GroupPlan, group: Group, doubts: "_Doubts") -> Iterator[Finding]:
        if group.task_id != plan.task.id:
            yield violation("task", f"group {group.index}: its task differs from the lease")
            return
        pairs = list(zip(plan.requests, group.rollouts, strict=True))
        differences = [_compare(request, rollout, job.version) for request, rollout in pairs]
        is_timed = is_expensive(self._family, plan.task)
        drawn = _draw_scored(job, group) if is_timed else range(len(group.rollouts))
        asked = [sample for sample in drawn if not differences[sample]]
        found = dict(zip(asked, self._score(plan, [group.rollouts[sample] for sample in asked]), strict=True))
        for sample, (request, rollout) in enumerate(pairs):
            if differences[sample]:
                yield violation("request", f"{rollout.id}: {differences[sample]}")
                continue
            yield from self._check_rollout(request, rollout)
            if sample in found:
                claim = _Claim(plan, rollout, group.scores[sample].value, is_timed)
                yield from self._check_reward(claim, found[sample], doubts)

    def _score(self, plan: GroupPlan, rollouts: Sequence[Rollout]) -> list[Score]:
        """Our scores for rollouts of one group; concurrently if the verifier supports it."""
        texts = [decode_completion(self._tokenizer, rollout.token_ids) for rollout in rollouts]
        return score_texts(self._family, plan.task, texts)

    def _check_reward(self, claim: "_Claim", found: Score, doubts: "_Doubts") -> Iterator[Finding]:
        def score_more() -> Iterator[Score]:
            text = decode_completion(self._tokenizer, claim.rollout.token_ids)
            return doubts.limit(score_again(self._family, claim.plan.task, text, found), is_low=is_low)

        where = f"{claim.rollout.id}: {claim.reward!r} claimed"
        is_low = claim.is_timed and claim.reward < found.value
        match compare_claim(claim.reward, found, score_more):
            case Agreement.DIFFERS:
                doubts.proven.add(is_low)
                yield violation(LOW_REWARD_CHECK if is_low else REWARD_CHECK, f"{where}, {found.value!r} found")
            case Agreement.UNSURE:
                yield violation(LIMIT_CHECK, f"{where}, {found.reason}")

    def _check_rollout(self, request: Request, rollout: Rollout) -> Iterator[Finding]:
        ending = check_ending(rollout, eos_id=self._eos_id, max_tokens=request.max_tokens)
        if ending.failed:
            yield violation("termination", f"{rollout.id}: {ending.where}")
        least, most = float(rollout.logprobs.min()), float(rollout.logprobs.max())
        if not self._least_logprob <= least <= most <= ROUNDING:
            wrong = most if most > ROUNDING else least
            yield violation("bounds", f"{rollout.id}: a log-prob of {wrong:.6g}, which no token that was drawn has")


def _draw_scored(job: Job, group: Group) -> Sequence[int]:
    """Samples of a group whose expensive reward is computed again, in order: the job's share, drawn independently of
    the proof's rollouts, so that rollouts that the proof skips may still be scored."""
    return draw_positions(job, len(group.rollouts), f"reward {group.index} ")


class _Claim(NamedTuple):
    """A reward that a worker claims."""

    plan: GroupPlan
    rollout: Rollout
    reward: float
    is_timed: bool
    """whether its verifier has a time limit"""


@dataclass(slots=True)
class _Doubts:
    """How many false claims of a submission may still be scored again: each costs a validator several scores."""

    left: int = 4
    proven: set[bool] = field(default_factory=set)
    """kinds of claims found to be false (True: too low): another of a kind decides nothing and is not scored again"""

    def limit(self, scores: Iterator[Score], *, is_low: bool) -> Iterator[Score]:
        """The scores; none if they do not matter, and one without certainty if the submission has used up its share."""
        if is_low in self.proven:
            return iter(())
        self.left -= 1
        return scores if self.left >= 0 else iter((give_up("too many doubts"),))


def measure_nats(rollout: Rollout) -> float:
    """How unlikely a completion is according to its own log-probs, in nats."""
    return -float(rollout.logprobs.sum(dtype=np.float64))


def _find_copies(entries: Sequence[RolloutEntry], rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """Equal rollouts of one file that are too unlikely for a coincidence; of two claims the less likely one counts."""
    first: dict[str, Rollout] = {}
    for entry, rollout in zip(entries, rollouts, strict=True):
        other = first.setdefault(entry.hash, rollout)
        if other is not rollout and max(measure_nats(other), measure_nats(rollout)) > CHANCE_NATS:
            yield violation(COPY_CHECK, f"{rollout.id}: the tokens of {other.id}, which has another seed")


def _compare(request: Request, rollout: Rollout, version: int) -> str:
    """How a rollout differs from its request; empty if it does not."""
    if rollout.prompt_ids.tolist() != list(request.prompt_ids):
        return "another prompt"
    if rollout.seed != request.seed:
        return "another seed"
    if rollout.temperature != request.temperature:
        return "another temperature"
    if rollout.version != version:
        return f"v{rollout.version}, the manifest says v{version}"
    return ""
