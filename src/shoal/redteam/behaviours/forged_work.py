"""Base classes of careful cheats: substituted tokens, forged proofs, copied work.

    tokens of any origin -> one prefill with the true weights -> log-probs and proofs -> true rewards of the text

Invariants:
- what `SubstitutingBehaviour` submits is well-formed: ids, prompts, seeds, temperature and version as leased, an end
  that follows the stop rule, rewards that a validator confirms. Only the choice of tokens is wrong;
- a behaviour that avoids the true weights (`ProofForger`) runs them only occasionally, on its own tasks, and has no
  better log-probs than those of the small model;
- a copier gets leaked work (submissions are not public, so the worst case is that other workers leak theirs) and saves
  the generation: one prefill gives the log-probs and proofs of the tokens after its own prompt. Copying work for the
  same groups would gain nothing, and there is nothing to detect: every worker gets the same rollouts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import EngineConfig
from shoal.engine import open_engine
from shoal.engine.base import CHUNK
from shoal.engine.sampling import Choose, choose_tokens
from shoal.group import GroupPlan, plan_groups, score_group
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_completion
from shoal.recipe import Recipe
from shoal.redteam.behaviours.weights import shrink_policy
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import derive_seed
from shoal.submission.write import Proofs
from shoal.toploc.build import ProofBuilder, build_batch
from shoal.toploc.field import P
from shoal.toploc.proof import TOPK, pack_proofs
from shoal.toploc.replay import replay_rollouts
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour

Tokens = Sequence[int] | np.ndarray
TokensById = Mapping[str, Tokens]
"""token ids by rollout id"""
_SLOTS = 64


@dataclass(frozen=True, slots=True)
class ForgedRollouts:
    """Rollouts, and the proofs of each by rollout id."""

    rollouts: tuple[Rollout, ...]
    proofs: Proofs


class SubstitutingBehaviour(WorkerBehaviour):
    """Submits tokens other than those the seeds draw, and proves them with the true weights."""

    policy: Policy
    """of the loaded version"""
    keeps_honest = False
    """whether it submits the honest rollouts of a lease in which it found nothing better"""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.unchanged: set[str] = set()
        """leases whose work is honest, because nothing was better"""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The true policy, which is kept."""
        self.policy = super().open_policy(version, folder)
        return self.policy

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The tokens to submit for the requests of the lease; by default those of the honest work."""
        return list_tokens(list_rollouts(work))

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The substituted tokens, proven."""
        plans = WorkerBehaviour.plan(self, work.order, self.policy.tokenizer)  # as leased, not as overridden
        tokens = self.substitute(plans, work)
        requests = [request for plan in plans for request in plan.requests]
        honest = list_tokens(list_rollouts(work))
        if self.keeps_honest and all(np.array_equal(tokens[r.id], honest[r.id]) for r in requests):
            self.unchanged.add(work.order.lease)
        rollouts = [self.build_rollout(request, tokens[request.id], work.version) for request in requests]
        forged = prefill_tokens(self.policy.model, rollouts, eos_id=self.policy.eos_id)
        named = {rollout.id: rollout for rollout in forged.rollouts}
        groups = tuple(score_group(self.family, self.policy.tokenizer, plan, named) for plan in plans)
        return replace(work, groups=groups, proofs=forged.proofs)

    def build_rollout(self, request: Request, ids: Tokens, version: int) -> Rollout:
        """A rollout for a request, without log-probs."""
        tokens = np.array(ids, dtype=np.int32)
        return Rollout(
            id=request.id,
            prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            finish=Finish.STOP if tokens[-1] == self.policy.eos_id else Finish.LENGTH,
            versions=(VersionRange(version, 0, len(tokens)),),
            temperature=request.temperature,
            seed=request.seed,
        )

    def decode(self, plans: Sequence[GroupPlan], choose: Choose) -> TokensById:
        """Generate the requests of plans with the true weights and a different choice of tokens."""
        requests = [request for plan in plans for request in plan.requests]
        decoded = decode_requests(self.policy.model, requests, eos_id=self.policy.eos_id, choose=choose)
        return list_tokens(decoded.rollouts)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text and the end token, up to the allowed number."""
        return encode_completion(self.policy.tokenizer, text)[: self.recipe.max_tokens]


def list_tokens(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Token ids of rollouts by rollout id."""
    return {rollout.id: rollout.token_ids for rollout in rollouts}


def list_rollouts(work: FinishedWork) -> list[Rollout]:
    """All rollouts of some work, in order."""
    return [rollout for group in work.groups for rollout in group.rollouts]


def decode_requests(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_id: int,
    slots: int = _SLOTS,
    choose: Choose = choose_tokens,
) -> ForgedRollouts:
    """Decode requests with a model and a token choice function; proofs are of the states that it computed."""
    builder = ProofBuilder()
    engine = open_engine(EngineConfig(slots=slots), model, eos_id=eos_id, sink=builder, choose=choose)
    found = {rollout.id: rollout for rollout in engine.generate(requests)}
    names = [request.id for request in requests]
    proofs = dict(zip(names, builder.take_many(names), strict=True))
    return ForgedRollouts(tuple(found[name] for name in names), proofs)


def prefill_tokens(model: PreTrainedModel, rollouts: Sequence[Rollout], *, eos_id: int) -> ForgedRollouts:
    """Log-probs and proofs of given tokens, from one prefill."""
    replays = replay_rollouts(model, rollouts, eos_id=eos_id)
    proofs = build_batch([replay.hidden for replay in replays])
    stated = tuple(replace(r, logprobs=replay.logprobs) for r, replay in zip(rollouts, replays, strict=True))
    return ForgedRollouts(stated, {rollout.id: own for rollout, own in zip(rollouts, proofs, strict=True)})


def fit_proofs(proofs: Sequence[bytes], count: int) -> list[bytes]:
    """Stretch one rollout's proofs to the number another needs: repeat the full chunks, then the last."""
    own = list(proofs)
    return ((own[:-1] or own) * count)[: count - 1] + own[-1:]


NUM_STUDIED_GROUPS = 2
Bits = NDArray[np.uint16]


class ProofForger(WorkerBehaviour, ABC):
    """Half of the layers generate; proofs are forged."""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The small policy; studies the true one first."""
        true = super().open_policy(version, folder)
        self.study(true)
        return shrink_policy(true)

    @abstractmethod
    def study(self, policy: Policy) -> None:
        """Learn from the true policy what helps to forge proofs."""

    @abstractmethod
    def forge(self, num_tokens: int) -> list[bytes]:
        """Proofs for a rollout of that many tokens."""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The small model's work with forged proofs."""
        return replace(work, proofs={r.id: self.forge(r.num_tokens) for r in list_rollouts(work)})

    def generate_honestly(self, policy: Policy) -> ForgedRollouts:
        """Honest work on its own tasks."""
        beacon, count = derive_seed("study", policy.num_parameters), NUM_STUDIED_GROUPS
        plans = plan_groups(self.family, policy.tokenizer, self.shape, step=1, beacon=beacon, first=0, count=count)
        requests = [request for plan in plans for request in plan.requests]
        return decode_requests(policy.model, requests, eos_id=policy.eos_id)

    def read_states(self, policy: Policy) -> list[Tensor]:
        """States (tokens, width) of the true model for each rollout of such work."""
        rollouts = self.generate_honestly(policy).rollouts
        return [replay.hidden for replay in replay_rollouts(policy.model, rollouts, eos_id=policy.eos_id)]


def commit_constant(pattern: int, num_tokens: int, width: int) -> list[bytes]:
    """Proofs by constant polynomials, which give the same pattern everywhere; the number and lengths are right."""
    proofs = []
    for start in range(0, num_tokens, CHUNK):
        size = min(TOPK, min(CHUNK, num_tokens - start) * width)
        coefficients = np.zeros((1, size), dtype=np.uint16)
        coefficients[0, 0] = pattern
        proofs += pack_proofs(np.array([P]), coefficients)
    return proofs


def pick_pattern(patterns: Bits) -> np.uint16:
    """The most frequent exponent, with the median mantissa and the more frequent sign of the values that have it."""
    exponents = patterns & 0x7F80
    values, counts = np.unique(exponents, return_counts=True)
    same = patterns[exponents == values[counts.argmax()]]
    sign = 0x8000 if (same >= 0x8000).mean() > 0.5 else 0
    return np.uint16(values[counts.argmax()] | int(np.median(same & 0x7F)) | sign)


class LeakingBehaviour(WorkerBehaviour):
    """Works honestly and leaks its work."""

    leaked: FinishedWork | None = None
    """the newest work; a copier in another thread may read it"""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The honest work, leaked."""
        self.leaked = work
        return work


class CopyingBehaviour(SubstitutingBehaviour):
    """Submits leaked work as its own, up to `most` rollouts per lease. Honest until something has leaked."""

    def __init__(self, recipe: Recipe, source: LeakingBehaviour, *, most: int | None = None) -> None:
        super().__init__(recipe)
        self._source, self._most = source, most

    @property
    def is_honest(self) -> bool:
        return self._source.leaked is None

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The leaked tokens, proven again."""
        return work if self.is_honest else super().finish(work)

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The leaked tokens replace the first of its own; none is used twice, which would be detected."""
        assert self._source.leaked is not None, "nothing has leaked yet"
        own, leaked = list_tokens(list_rollouts(work)), list_rollouts(self._source.leaked)[: self._most]
        return own | {name: other.token_ids for name, other in zip(own, leaked, strict=False)}
