"""Dishonest workers: each attack is a function from honest ingredients to what a cheater would submit.

    @attack("name")
    def some_attack(stage: Stage) -> Forged: ...

The cheaters here are careful. One that has the true model states the log-probs and proofs that an honest worker would
have for the same tokens, so only the choice of tokens is wrong. One that runs a different model only has that model's
numbers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from altered import step_back
from models import load_subject
from shoal.engine.sampling import Choose, choose_tokens
from shoal.policy.altered import add_adapter, map_linears, round_channels, round_groups
from shoal.redteam.attacks.sampling import NUM_TRIES, draw_places, list_tries
from shoal.redteam.attacks.sampling import edit_prompt as bend_prompt
from shoal.redteam.behaviours.forged_work import ForgedRollouts, fit_proofs
from shoal.redteam.behaviours.sampling import (
    choose_cooler,
    choose_likeliest,
    choose_nucleus,
    choose_others,
    claim_tokens,
    plan_uniforms,
)
from shoal.redteam.behaviours.weights import drop_layers
from shoal.rollout import Rollout
from shoal.seeds import token_uniforms
from stage import GROUP, Stage


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    run: Callable[[Stage], ForgedRollouts]
    dtypes: tuple[str, ...]
    """dtypes of the verifier that it applies to"""
    chooses: bool
    """log-probs and proofs are honest for the tokens; only the tokens are not"""


ATTACKS: dict[str, Attack] = {}
UNLIKELY = 1e-6
"""Maximum probability of an "unlikely" token."""


def attack(
    name: str, *dtypes: str, chooses: bool = False
) -> Callable[[Callable[[Stage], ForgedRollouts]], Callable[[Stage], ForgedRollouts]]:
    """Register an attack, against verifiers of any dtype unless some are given."""

    def register(run: Callable[[Stage], ForgedRollouts]) -> Callable[[Stage], ForgedRollouts]:
        ATTACKS[name] = Attack(name, run, dtypes or ("float32", "bfloat16"), chooses)
        return run

    return register


# A different model generates, and proves what it computed.


@attack("int8 weights")
def quantise_eight(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("int8", lambda model: map_linears(model, round_channels)))


@attack("int4 weights")
def quantise_four(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("int4", lambda model: map_linears(model, round_groups)))


@attack("bf16 for fp32", "float32")
def narrow_weights(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("bf16", lambda model: copy.deepcopy(model).bfloat16()))


@attack("fp32 for bf16", "bfloat16")
def widen_weights(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("fp32", lambda model: copy.deepcopy(model).float()))


@attack("one step older, lr 1e-5")
def lag_step(stage: Stage) -> ForgedRollouts:
    return stage.generate(_older(stage, 1e-5))


@attack("one step older, lr 1e-6")
def lag_small(stage: Stage) -> ForgedRollouts:
    return stage.generate(_older(stage, 1e-6))


@attack("LoRA merged")
def merge_adapter(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("lora", lambda model: map_linears(model, add_adapter)))


@attack("half the layers")
def halve_layers(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.alter("half", drop_layers))


@attack("edited prompt")
def edit_prompt(stage: Stage) -> ForgedRollouts:
    """One token of the prompt is changed; the submission states the requested prompt."""
    vocabulary = stage.model.config.vocab_size
    return stage.generate(stage.model, requests=[bend_prompt(r, r.id, vocabulary) for r in stage.requests])


# The true model computes, but tokens are chosen differently.


@attack("temperature 0.9", chooses=True)
def cool_sampling(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.model, choose=choose_cooler(0.9))


@attack("top-p 0.95", chooses=True)
def cut_tail(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.model, choose=choose_nucleus(0.95))


@attack("greedy", chooses=True)
def take_likeliest(stage: Stage) -> ForgedRollouts:
    return stage.generate(stage.model, choose=choose_likeliest)


@attack("best of 4", chooses=True)
def pick_best(stage: Stage) -> ForgedRollouts:
    """Three more seeds per rollout; the likeliest of the four is submitted as if the right seed had produced it."""
    tries = [stage.honest]
    for turn in range(1, NUM_TRIES):
        others = [replace(list_tries(r, NUM_TRIES)[turn], id=r.id) for r in stage.requests]
        tries.append(stage.generate(stage.model, requests=others))
    best = [int(np.argmax([work.rollouts[i].logprobs.mean() for work in tries])) for i in range(len(stage.requests))]
    rollouts = tuple(tries[turn].rollouts[index] for index, turn in enumerate(best))
    return ForgedRollouts(rollouts, {r.id: tries[turn].proofs[r.id] for r, turn in zip(rollouts, best, strict=True)})


@attack("1 token edited", chooses=True)
def edit_one(stage: Stage) -> ForgedRollouts:
    return _edit_tokens(stage, 1)


@attack("1 hardly possible token, close to the draw", chooses=True)
def edit_closely(stage: Stage) -> ForgedRollouts:
    """The editor knows the sampling check: it picks the position where such a token is closest to the draw."""
    planned = plan_uniforms(stage.requests, {r.id: [_find_opening(stage, r)] for r in stage.honest.rollouts})

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        distances, closest = _measure_unlikely(logits / temperatures[:, None], uniforms)
        odd = torch.isin(uniforms, planned) & distances.isfinite()
        return claim_tokens(logits, temperatures, torch.where(odd, closest, tokens))

    return stage.generate(stage.model, choose=choose)


@attack("5 tokens edited", chooses=True)
def edit_five(stage: Stage) -> ForgedRollouts:
    return _edit_tokens(stage, 5)


@attack("50 tokens edited", chooses=True)
def edit_fifty(stage: Stage) -> ForgedRollouts:
    return _edit_tokens(stage, 50)


def choose_fixed(planned: Tensor, token: int) -> Choose:
    """At the planned draws, a fixed token."""

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        return claim_tokens(logits, temperatures, torch.where(torch.isin(uniforms, planned), token, tokens))

    return choose


@attack("cut off with a forced end", chooses=True)
def force_end(stage: Stage) -> ForgedRollouts:
    """Rollouts end at half their length: the end token is inserted where it was not drawn."""
    places = {r.id: [r.num_tokens // 2] for r in stage.honest.rollouts if r.num_tokens > 1}
    planned = plan_uniforms(stage.requests, places)
    return stage.generate(stage.model, choose=choose_fixed(planned, stage.eos_id))


# Text from one model, proof from another.


@attack("laundered: a small model writes", chooses=True)
def launder_scribe(stage: Stage) -> ForgedRollouts:
    """A different model's text, then one honest prefill over it for log-probs and proofs."""
    if stage.subject.name == "text":
        writer = load_subject("scribe", stage.model.dtype).policy.model
    else:
        writer = stage.alter("half", drop_layers)
    return stage.prefill(stage.generate(writer).rollouts)


@attack("laundered: int4 writes", chooses=True)
def launder_int4(stage: Stage) -> ForgedRollouts:
    writer = stage.alter("int4", lambda model: map_linears(model, round_groups))
    return stage.prefill(stage.generate(writer).rollouts)


@attack("proof of another rollout")
def swap_proofs(stage: Stage) -> ForgedRollouts:
    """Proofs come from a rollout with a different prompt, with the right number and a last chunk at the end."""
    honest = stage.honest
    lent = {}
    for index, rollout in enumerate(honest.rollouts):
        lender = honest.rollouts[(index + GROUP) % len(honest.rollouts)]
        lent[rollout.id] = fit_proofs(honest.proofs[lender.id], len(honest.proofs[rollout.id]))
    return ForgedRollouts(honest.rollouts, lent)


@attack("proof of an older version, lr 1e-5")
def prove_older(stage: Stage) -> ForgedRollouts:
    older = stage.prefill(stage.honest.rollouts, _older(stage, 1e-5))
    return ForgedRollouts(stage.honest.rollouts, older.proofs)


def _edit_tokens(stage: Stage, count: int) -> ForgedRollouts:
    """At `count` positions of each rollout, a different draw is used; everything after it is sampled honestly."""
    places = {rollout.id: draw_places(rollout, count) for rollout in stage.honest.rollouts}
    return stage.generate(stage.model, choose=choose_others(plan_uniforms(stage.requests, places)))


@torch.inference_mode()
def _find_opening(stage: Stage, rollout: Rollout) -> int:
    """The position of an honest rollout at which an unlikely token is closest to the draw."""
    text = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids])).long()
    logits = stage.model(text[None]).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
    uniforms = torch.from_numpy(token_uniforms(rollout.seed, 0, rollout.num_tokens))
    return int(_measure_unlikely(logits / rollout.temperature, uniforms)[0].argmin())


def _measure_unlikely(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Distance from the draw and id of the closest unlikely token of each row; infinite if there is none."""
    probs = logits.softmax(-1).double()
    high = probs.cumsum(-1)
    distances = torch.maximum(high - probs - uniforms[:, None], uniforms[:, None] - high)
    return distances.masked_fill(probs > UNLIKELY, torch.inf).min(-1)


def _older(stage: Stage, rate: float) -> PreTrainedModel:
    return stage.alter(f"older-{rate}", lambda model: step_back(model, stage.honest.rollouts, rate))
