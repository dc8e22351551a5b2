"""What careful cheats have in common: other tokens, and all else as an honest worker would state it for these tokens.

    tokens of any origin -> one prefill with the true weights -> log-probs and proofs -> true rewards of the text

Invariants:
- what is handed in is well-formed: ids, prompts, seeds, temperature and version as leased, an end that keeps the stop
  rule, rewards that a validator finds too. Only the choice of the tokens is wrong;
- whoever avoids the true weights does not come here: it has no better numbers than those that it computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from shoal.engine.choice import Choose, choose_tokens
from shoal.engine.torch import TorchEngine
from shoal.group import Plan, score_group
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_completion
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.submission.write import Proofs
from shoal.toploc.build import build_batch
from shoal.toploc.replay import replay_rollouts
from shoal.toploc.stream import ProofBuilder
from shoal.worker.author import Author, Work

Tokens = Sequence[int] | np.ndarray
Retold = Mapping[str, Tokens]
"""token ids by id of the rollout"""
_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Forged:
    """Rollouts, and the proofs of each by id."""

    rollouts: tuple[Rollout, ...]
    proofs: Proofs


class RetellingAuthor(Author, ABC):
    """Hands in other tokens than the seeds write, and proves them with the true weights."""

    policy: Policy
    """of the version that is loaded"""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The true policy, which is kept."""
        self.policy = super().open_policy(version, folder)
        return self.policy

    def plan_lease(self, work: Work) -> list[Plan]:
        """What was leased, whatever `plan` made of it."""
        return Author.plan(self, work.order, self.policy.tokenizer)

    @abstractmethod
    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The tokens that are handed in for the requests of the lease."""

    def finish(self, work: Work) -> Work:
        """The other tokens, proven."""
        plans = self.plan_lease(work)
        retold = self.retell(plans, work)
        requests = [request for plan in plans for request in plan.requests]
        rollouts = [self.tell(request, retold[request.id], work.version) for request in requests]
        forged = prefill_tokens(self.policy.model, rollouts, eos_id=self.policy.eos_id)
        named = {rollout.id: rollout for rollout in forged.rollouts}
        groups = tuple(score_group(self.family, self.policy.tokenizer, plan, named) for plan in plans)
        return replace(work, groups=groups, proofs=forged.proofs)

    def tell(self, request: Request, ids: Tokens, version: int) -> Rollout:
        """A rollout of a request, still without log-probs."""
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

    def decode(self, plans: Sequence[Plan], choose: Choose) -> Retold:
        """The requests of plans, written with the true weights and another choice of tokens."""
        requests = [request for plan in plans for request in plan.requests]
        return list_tokens(
            decode_requests(self.policy.model, requests, eos_id=self.policy.eos_id, choose=choose).rollouts
        )

    def spell(self, text: str) -> list[int]:
        """The tokens of a text and the end token, or as many as are allowed."""
        return encode_completion(self.policy.tokenizer, text)[: self.recipe.max_tokens]


def list_tokens(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Token ids of rollouts by their ids."""
    return {rollout.id: rollout.token_ids for rollout in rollouts}


def list_rollouts(work: Work) -> list[Rollout]:
    """All rollouts of some work, in order."""
    return [rollout for group in work.groups for rollout in group.rollouts]


def decode_requests(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_id: int,
    slots: int = _SLOTS,
    choose: Choose = choose_tokens,
) -> Forged:
    """Decode requests with a model and a way of choosing tokens; proofs are of the states that it computed."""
    builder = ProofBuilder()
    engine = TorchEngine(model, eos_id=eos_id, slots=slots, sink=builder, choose=choose)
    found = {rollout.id: rollout for rollout in engine.generate(requests)}
    names = [request.id for request in requests]
    proofs = dict(zip(names, builder.take_many(names), strict=True))
    return Forged(tuple(found[name] for name in names), proofs)


def prefill_tokens(model: PreTrainedModel, rollouts: Sequence[Rollout], *, eos_id: int) -> Forged:
    """Log-probs and proofs of given tokens, as one prefill gives them."""
    replays = replay_rollouts(model, rollouts, eos_id=eos_id)
    proofs = build_batch([replay.hidden for replay in replays])
    stated = tuple(replace(r, logprobs=replay.logprobs) for r, replay in zip(rollouts, replays, strict=True))
    return Forged(stated, {rollout.id: own for rollout, own in zip(rollouts, proofs, strict=True)})


def lend_proofs(proofs: Sequence[bytes], count: int) -> list[bytes]:
    """Proofs of one rollout in the number that another needs: full chunks as often as asked for, then the last."""
    own = list(proofs)
    return ((own[:-1] or own) * count)[: count - 1] + own[-1:]
