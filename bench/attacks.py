"""The dishonest: each attack is a function from honest ingredients to what a cheater would hand in.

    @attack("name", "what the cheater does")
    def some_attack(stage: Stage) -> Work: ...

Cheaters here are careful. Whoever holds the true model states the log-probs and proofs that an honest worker would have
for the same tokens, so only the choice of tokens is wrong; whoever runs another model has nothing better than its numbers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import shoal.engine.torch as engine_module
from models import Subject, load_subject
from shoal.config import LearnerConfig
from shoal.engine.sampler import choose_tokens
from shoal.engine.torch import TorchEngine
from shoal.learner.learner import Learner
from shoal.rollout import Group, Request, Rollout, Score, VersionRange
from shoal.seeds import derive_seed, token_uniforms
from shoal.toploc.build import build_batch
from shoal.toploc.replay import replay_rollouts

GROUP = 4
"""Rollouts per prompt; four groups are a submission."""
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_WARM_STEPS = 3
_LORA_RANK, _LORA_SHARE = 8, 1e-3
_INT4_GROUP = 32


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker hands in: rollouts, and the proofs of each by id."""

    rollouts: tuple[Rollout, ...]
    proofs: Mapping[str, Sequence[bytes]]


@dataclass
class Stage:
    """A subject, the requests of some leases, and what honest work on them looks like."""

    subject: Subject
    requests: tuple[Request, ...]
    slots: int = 64
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _honest: Work | None = None

    @property
    def model(self) -> PreTrainedModel:
        return self.subject.policy.model

    @property
    def eos_id(self) -> int:
        return self.subject.policy.eos_id

    @property
    def honest(self) -> Work:
        if self._honest is None:
            self._honest = self.generate(self.model)
        return self._honest

    def alter(self, name: str, make: Callable[[PreTrainedModel], PreTrainedModel]) -> PreTrainedModel:
        """An altered copy of the model, made once per stage."""
        if name not in self._models:
            self._models[name] = make(self.model).eval()
        return self._models[name]

    def generate(
        self, model: PreTrainedModel, *, requests: Sequence[Request] | None = None, choose: Choose = choose_tokens
    ) -> Work:
        """Decode with a model and a way of choosing tokens; the result states what was asked, whatever was done."""
        states: dict[str, list[Tensor]] = {}

        def keep(rollout_id: str, start: int, hidden: Tensor) -> None:
            states.setdefault(rollout_id, []).append(hidden.clone())

        requests = self.requests if requests is None else requests
        with _choosing(choose):
            engine = TorchEngine(model, eos_id=self.eos_id, slots=self.slots, sink=keep)
            found = {rollout.id: rollout for rollout in engine.generate(requests)}
        rollouts = [found[request.id] for request in requests]
        proofs = build_batch([torch.cat(states[rollout.id]) for rollout in rollouts])
        asked = {request.id: request for request in self.requests}
        stated = tuple(state_request(r, asked[r.id]) if r.id in asked else r for r in rollouts)
        return Work(stated, {rollout.id: own for rollout, own in zip(rollouts, proofs, strict=True)})

    def prefill(self, rollouts: Sequence[Rollout], model: PreTrainedModel | None = None) -> Work:
        """Log-probs and proofs of given tokens, as one prefill gives them."""
        replays = replay_rollouts(self.model if model is None else model, rollouts, eos_id=self.eos_id)
        proofs = build_batch([replay.hidden for replay in replays])
        stated = tuple(replace(r, logprobs=replay.logprobs) for r, replay in zip(rollouts, replays, strict=True))
        return Work(stated, {rollout.id: own for rollout, own in zip(rollouts, proofs, strict=True)})


@dataclass(frozen=True, slots=True)
class Attack:
    """One way of cheating."""

    name: str
    run: Callable[[Stage], Work]
    dtypes: tuple[str, ...]
    """verifiers it makes sense against"""
    chooses: bool
    """log-probs and proofs are honest for the tokens, only these are not"""


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, *dtypes: str, chooses: bool = False
) -> Callable[[Callable[[Stage], Work]], Callable[[Stage], Work]]:
    """Register a way of cheating, against verifiers of any dtype unless some are named."""

    def register(run: Callable[[Stage], Work]) -> Callable[[Stage], Work]:
        ATTACKS[name] = Attack(name, run, dtypes or ("float32", "bfloat16"), chooses)
        return run

    return register


def draw_requests(subject: Subject, name: str, count: int, max_tokens: int) -> tuple[Request, ...]:
    """Requests in groups of one prompt, the seeds derived from `name`."""
    first = derive_seed("bench", name) % len(subject.prompts)
    return tuple(
        Request(
            id=f"{name}.{index}",
            prompt_ids=subject.prompts[(first + index // GROUP) % len(subject.prompts)],
            seed=derive_seed("bench", name, index),
            max_tokens=min(max_tokens, subject.max_tokens),
        )
        for index in range(count)
    )


# Another model writes, and proves what it computed.


@attack("int8 weights")
def quantise_eight(stage: Stage) -> Work:
    return stage.generate(stage.alter("int8", lambda model: _map_linears(model, round_channels)))


@attack("int4 weights")
def quantise_four(stage: Stage) -> Work:
    return stage.generate(stage.alter("int4", lambda model: _map_linears(model, round_groups)))


@attack("bf16 for fp32", "float32")
def narrow_weights(stage: Stage) -> Work:
    return stage.generate(stage.alter("bf16", lambda model: copy.deepcopy(model).bfloat16()))


@attack("fp32 for bf16", "bfloat16")
def widen_weights(stage: Stage) -> Work:
    return stage.generate(stage.alter("fp32", lambda model: copy.deepcopy(model).float()))


@attack("one step older, lr 1e-5")
def lag_step(stage: Stage) -> Work:
    return stage.generate(_older(stage, 1e-5))


@attack("one step older, lr 1e-6")
def lag_small(stage: Stage) -> Work:
    return stage.generate(_older(stage, 1e-6))


@attack("LoRA merged")
def merge_adapter(stage: Stage) -> Work:
    return stage.generate(stage.alter("lora", lambda model: _map_linears(model, _add_adapter)))


@attack("half the layers")
def halve_layers(stage: Stage) -> Work:
    return stage.generate(stage.alter("half", _drop_layers))


@attack("edited prompt")
def edit_prompt(stage: Stage) -> Work:
    """One token of the prompt is another; the submission states the prompt that was asked."""
    vocabulary = stage.model.config.vocab_size
    edited = []
    for request in stage.requests:
        ids = list(request.prompt_ids)
        ids[len(ids) // 2] = derive_seed("prompt", request.id) % vocabulary
        edited.append(replace(request, prompt_ids=tuple(ids)))
    return stage.generate(stage.model, requests=edited)


# The true model computes, but tokens are chosen otherwise.


@attack("temperature 0.9", chooses=True)
def cool_sampling(stage: Stage) -> Work:
    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return claim_tokens(logits, temperatures, choose_tokens(logits, temperatures * 0.9, uniforms)[0])

    return stage.generate(stage.model, choose=choose)


@attack("top-p 0.95", chooses=True)
def cut_tail(stage: Stage) -> Work:
    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return claim_tokens(logits, temperatures, choose_tokens(keep_nucleus(logits, 0.95), temperatures, uniforms)[0])

    return stage.generate(stage.model, choose=choose)


@attack("greedy", chooses=True)
def take_likeliest(stage: Stage) -> Work:
    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return claim_tokens(logits, temperatures, logits.argmax(-1))

    return stage.generate(stage.model, choose=choose)


@attack("best of 4", chooses=True)
def pick_best(stage: Stage) -> Work:
    """Three more seeds for each rollout; the likeliest of the four is handed in as if the seed asked for had given it."""
    tries = [stage.honest]
    for turn in range(1, 4):
        others = [replace(r, seed=derive_seed("try", turn, r.seed)) for r in stage.requests]
        tries.append(stage.generate(stage.model, requests=others))
    best = [int(np.argmax([work.rollouts[i].logprobs.mean() for work in tries])) for i in range(len(stage.requests))]
    rollouts = tuple(tries[turn].rollouts[index] for index, turn in enumerate(best))
    return Work(rollouts, {r.id: tries[turn].proofs[r.id] for r, turn in zip(rollouts, best, strict=True)})


@attack("1 token edited", chooses=True)
def edit_one(stage: Stage) -> Work:
    return _edit_tokens(stage, 1)


@attack("5 tokens edited", chooses=True)
def edit_five(stage: Stage) -> Work:
    return _edit_tokens(stage, 5)


@attack("50 tokens edited", chooses=True)
def edit_fifty(stage: Stage) -> Work:
    return _edit_tokens(stage, 50)


@attack("cut off with a forced end", chooses=True)
def force_end(stage: Stage) -> Work:
    """Rollouts end at half their length: the end token is put where it was not drawn."""
    places = {r.id: [r.num_tokens // 2] for r in stage.honest.rollouts if r.num_tokens > 1}
    planned = plan_uniforms(stage.requests, places)

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        tokens = torch.where(torch.isin(uniforms, planned), stage.eos_id, tokens)
        return claim_tokens(logits, temperatures, tokens)

    return stage.generate(stage.model, choose=choose)


# Text of one, proof of another.


@attack("laundered: a small model writes", chooses=True)
def launder_scribe(stage: Stage) -> Work:
    """Another model's text, then one honest prefill over it for log-probs and proofs."""
    if stage.subject.name == "text":
        writer = load_subject("scribe", stage.model.dtype).policy.model
    else:
        writer = stage.alter("half", _drop_layers)
    return stage.prefill(stage.generate(writer).rollouts)


@attack("laundered: int4 writes", chooses=True)
def launder_int4(stage: Stage) -> Work:
    writer = stage.alter("int4", lambda model: _map_linears(model, round_groups))
    return stage.prefill(stage.generate(writer).rollouts)


@attack("proof of another rollout")
def swap_proofs(stage: Stage) -> Work:
    """A rollout of another prompt lends its proofs, in the number asked for and, for the last, of a last chunk."""
    honest = stage.honest
    lent = {}
    for index, rollout in enumerate(honest.rollouts):
        lender = honest.rollouts[(index + GROUP) % len(honest.rollouts)]
        count, proofs = len(honest.proofs[rollout.id]), list(honest.proofs[lender.id])
        lent[rollout.id] = ((proofs[:-1] or proofs) * count)[: count - 1] + proofs[-1:]
    return Work(honest.rollouts, lent)


@attack("proof of an older version, lr 1e-5")
def prove_older(stage: Stage) -> Work:
    older = stage.prefill(stage.honest.rollouts, _older(stage, 1e-5))
    return Work(stage.honest.rollouts, older.proofs)


def claim_tokens(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens with the log-probs that honest sampling would have recorded for them."""
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def keep_nucleus(logits: Tensor, share: float) -> Tensor:
    """Logits (R, V) of the likeliest tokens that together have at least `share`; the rest -inf."""
    order = logits.argsort(dim=-1, descending=True)
    probs = torch.softmax(logits, -1).gather(1, order)
    before = probs.cumsum(-1) - probs
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= share)
    return logits.masked_fill(cut, float("-inf"))


def state_request(rollout: Rollout, request: Request) -> Rollout:
    """A rollout as if it had been made as asked."""
    return replace(
        rollout,
        prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
        temperature=request.temperature,
        seed=request.seed,
        versions=(VersionRange(0, 0, rollout.num_tokens),),
    )


def plan_uniforms(requests: Sequence[Request], places: Mapping[str, Sequence[int]]) -> Tensor:
    """The draws at given token places of each request: 53 bits name the place in whatever row the engine has it."""
    draws = [token_uniforms(r.seed, 0, r.max_tokens)[list(places.get(r.id, ()))] for r in requests]
    return torch.from_numpy(np.concatenate(draws))


def round_channels(weight: Tensor) -> Tensor:
    """Nearest of 255 levels, one scale per output channel."""
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scale).round_() * scale


def round_groups(weight: Tensor) -> Tensor:
    """Nearest of 15 levels, one scale per 32 weights of a row."""
    groups = weight.reshape(-1, _INT4_GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 7
    return ((groups / scale).round_() * scale).view(weight.shape)


@contextmanager
def _choosing(choose: Choose) -> Iterator[None]:
    engine_module.choose_tokens = choose
    try:
        yield
    finally:
        engine_module.choose_tokens = choose_tokens


def _edit_tokens(stage: Stage, count: int) -> Work:
    """At `count` places of each rollout the next likeliest draw stands instead; all that follows is written honestly."""
    places = {}
    for rollout in stage.honest.rollouts:
        rng = np.random.default_rng(derive_seed("edit", count, rollout.id))
        places[rollout.id] = rng.choice(rollout.num_tokens, min(count, rollout.num_tokens), replace=False).tolist()
    planned = plan_uniforms(stage.requests, places)

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        without = logits.scatter(1, tokens[:, None], float("-inf"))
        others = choose_tokens(without, temperatures, (uniforms + 0.5) % 1.0)[0]
        return claim_tokens(logits, temperatures, torch.where(torch.isin(uniforms, planned), others, tokens))

    return stage.generate(stage.model, choose=choose)


def _map_linears(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A copy with every matrix of its layers changed; embeddings and head stay."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in changed.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight.float()))
    return changed


def _add_adapter(weight: Tensor) -> Tensor:
    """A random update of rank 8 whose norm is a thousandth of the weight's."""
    rng = torch.Generator().manual_seed(weight.shape[0] * 65537 + weight.shape[1])
    update = torch.randn(weight.shape[0], _LORA_RANK, generator=rng) @ torch.randn(
        _LORA_RANK, weight.shape[1], generator=rng
    )
    return weight + update * (_LORA_SHARE * weight.norm() / update.norm())


def _drop_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Every second layer is left out."""
    shorter = copy.deepcopy(model)
    shorter.model.layers = shorter.model.layers[::2]
    shorter.config.num_hidden_layers = len(shorter.model.layers)
    return shorter


def _older(stage: Stage, rate: float) -> PreTrainedModel:
    return stage.alter(f"older-{rate}", lambda model: step_back(model, stage.honest.rollouts, rate))


def step_back(model: PreTrainedModel, rollouts: Sequence[Rollout], rate: float) -> PreTrainedModel:
    """The weights before one AdamW step of RL.

    Some steps fill the optimizer's averages, for the very first one of Adam moves every weight by the whole rate; the
    step after them is then taken back from the given weights.
    """
    trained = copy.deepcopy(model).float()
    config = LearnerConfig(lr=rate, ramp=0, updates=1)
    learner = Learner(trained, config, max_tokens=max(rollout.num_tokens for rollout in rollouts))
    groups = [_score_group(index, rollouts[index * GROUP :][:GROUP]) for index in range(min(4, len(rollouts) // GROUP))]
    for turn in range(_WARM_STEPS):
        learner.train_step([groups[turn % len(groups)]])
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    learner.train_step([groups[_WARM_STEPS % len(groups)]])
    older = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in older.state_dict().items():
            tensor.copy_(tensor.float() - (trained.state_dict()[name] - before[name]))
    return older


def _score_group(index: int, rollouts: Sequence[Rollout]) -> Group:
    """A group with a reward that differs among its rollouts: shorter words, as the first tokens' ids have it."""
    order = np.argsort(np.argsort([int(rollout.token_ids[:32].sum()) for rollout in rollouts]))
    scores = tuple(Score(float(rank) / (len(rollouts) - 1), "rank") for rank in order)
    return Group(index=index, task_id=str(index), rollouts=tuple(rollouts), scores=scores)
