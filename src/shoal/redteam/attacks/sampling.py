"""Tokens other than those that the seeds draw from the stated prompt, proven with the true weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.calibrate.calibrate import FLOORS
from shoal.group import GroupPlan, score_group
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_prompt
from shoal.redteam.behaviours import sampling
from shoal.redteam.behaviours.forged_work import SubstitutingBehaviour, Tokens, TokensById, list_rollouts, list_tokens
from shoal.redteam.behaviours.weights import shrink_policy
from shoal.redteam.registry import Expected, attack
from shoal.rollout import Request, Rollout
from shoal.seeds import derive_seed
from shoal.tasks.split import train_task
from shoal.toploc.finding import Check
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import LeaseOrder

NUM_TRIES = 4
NUM_EASY_TASKS = 16
TOLERANCE = FLOORS[Check.SAMPLING] / 2
"""half of the smallest distance that any calibration allows"""


@attack("prompt", expect=Expected.HARD, text="the answered prompt differs from the stated one")
class PromptBehaviour(SubstitutingBehaviour):
    """Changes one token of the prompt; the leased prompt is stated and proven."""

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """Plans with changed prompts, one per group."""
        plans, size = super().plan(order, tokenizer), len(tokenizer)
        return [replace(p, requests=tuple(edit_prompt(r, p.task.id, size) for r in p.requests)) for p in plans]


def edit_prompt(request: Request, name: str, vocab_size: int) -> Request:
    """A request with a different token in the middle of its prompt; the same name gives the same change."""
    ids = list(request.prompt_ids)
    ids[len(ids) // 2] = derive_seed("prompt", name) % vocab_size
    return replace(request, prompt_ids=tuple(ids))


@attack("temperature", expect=Expected.HARD, text="tokens are drawn at a different temperature")
class CoolBehaviour(sampling.ChoosingBehaviour):
    """Samples at nine tenths of the temperature: likelier texts, better rewards."""

    choose = staticmethod(sampling.choose_cooler(0.9))


@attack("top_p", expect=Expected.HARD, text="tokens are drawn only from the likeliest ones")
class NucleusBehaviour(sampling.ChoosingBehaviour):
    """Samples from the likeliest tokens with 95 % total probability, a common default of inference servers."""

    choose = staticmethod(sampling.choose_nucleus(0.95))


@attack("greedy", expect=Expected.HARD, text="the likeliest token is always taken")
class GreedyBehaviour(sampling.ChoosingBehaviour):
    """Takes the likeliest token each time."""

    choose = staticmethod(sampling.choose_likeliest)


@attack(
    "best_of_n", expect=Expected.HARD, text="several completions are drawn, and the one with the best reward is kept"
)
class BestOfNBehaviour(SubstitutingBehaviour):
    """Tries three more seeds for each rollout and submits the best; the honest one wins ties."""

    keeps_honest = True

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """Plans with all attempts of a request in a row, the honest one first."""
        plans = super().plan(order, tokenizer)
        return [replace(p, requests=tuple(t for r in p.requests for t in list_tries(r, NUM_TRIES))) for p in plans]

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The best attempt of each request."""
        best = {}
        for plan, group in zip(plans, work.groups, strict=True):
            for place, request in enumerate(plan.requests):
                first = NUM_TRIES * place
                chosen = first + int(group.rewards[first : first + NUM_TRIES].argmax())  # ties: the first
                best[request.id] = group.rollouts[chosen].token_ids
        return best


def list_tries(request: Request, count: int) -> list[Request]:
    """The request, and copies with other seeds."""
    seeds = [(n, derive_seed("try", n, request.seed)) for n in range(1, count)]
    return [request, *(replace(request, id=f"{request.id}+{n}", seed=seed) for n, seed in seeds)]


@attack("edited_tokens", expect=Expected.HARD, text="a token is changed after sampling, and proven honestly")
class EditingBehaviour(SubstitutingBehaviour):
    """Puts a different token at one position of each rollout; the tokens after it are sampled honestly."""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The requests sampled again, with the changed positions."""
        requests = [request for plan in plans for request in plan.requests]
        places = {rollout.id: draw_places(rollout, 1) for rollout in list_rollouts(work)}
        return self.decode(plans, sampling.choose_others(sampling.plan_uniforms(requests, places)))


def draw_places(rollout: Rollout, count: int) -> list[int]:
    """Random token positions, unordered."""
    rng = np.random.default_rng(derive_seed("edit", count, rollout.id))
    return rng.choice(rollout.num_tokens, min(count, rollout.num_tokens), replace=False).tolist()


@attack("foreign_text", expect=Expected.HARD, text="a small model generates; the true one only prefills for the proof")
class ForeignTextBehaviour(SubstitutingBehaviour):
    """Half of the layers generate. Log-probs and proofs come from the true model, whose prefill is cheaper."""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The small policy; the true one is kept."""
        return shrink_policy(super().open_policy(version, folder))


@attack("stated_prompt", expect=Expected.SOFT, text="a different prompt is answered, and stated")
class EasyPromptBehaviour(WorkerBehaviour):
    """Answers the shortest prompt it can find instead of the leased ones."""

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """The leased groups, all with this one prompt."""
        tasks = [train_task(self.family, derive_seed("easy", number)) for number in range(NUM_EASY_TASKS)]
        easiest = tuple(encode_prompt(tokenizer, min((task.prompt for task in tasks), key=len)))
        plans = super().plan(order, tokenizer)
        return [replace(p, requests=tuple(replace(r, prompt_ids=easiest) for r in p.requests)) for p in plans]


@attack("noise", expect=Expected.BOUNDED, text="where rounding decides between two tokens, the better one is kept")
class NoiseBehaviour(SubstitutingBehaviour):
    """Where rounding decides between two tokens, generates both continuations and submits the one with better reward.

    No check can distinguish this from an honest machine that rounds the other way. The gain is bounded by how rare such
    positions are (`CloseChoice.openings` counts them).
    """

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """For each rollout, the better of the honest one and the alternative."""
        choice = sampling.CloseChoice(TOLERANCE)
        others = self.decode(plans, choice)
        kept = dict[str, Tokens](list_tokens(list_rollouts(work)))
        if not choice.openings:
            return kept
        for plan, group in zip(plans, work.groups, strict=True):
            rollouts = {r.id: self.build_rollout(r, others[r.id], work.version) for r in plan.requests}
            other = score_group(self.family, self.policy.tokenizer, plan, rollouts)
            better = other.rewards > group.rewards
            kept |= {r.id: others[r.id] for r, is_better in zip(plan.requests, better, strict=True) if is_better}
        return kept
