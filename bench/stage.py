"""A worker's stage: a model, the requests of some leases, and the ways of working on them, honest or not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import shoal.engine.torch as engine_module
from models import Subject
from shoal.engine.choice import choose_tokens
from shoal.engine.torch import TorchEngine
from shoal.rollout import Request, Rollout, VersionRange
from shoal.seeds import derive_seed
from shoal.toploc.build import build_batch
from shoal.toploc.replay import replay_rollouts

GROUP = 4
"""Rollouts per prompt; four groups are a submission."""
Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What the engine calls to choose tokens: logits (R, V), temperatures (R,), uniforms (R,) to tokens and log-probs."""


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


def state_request(rollout: Rollout, request: Request) -> Rollout:
    """A rollout as if it had been made as asked."""
    return replace(
        rollout,
        prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
        temperature=request.temperature,
        seed=request.seed,
        versions=(VersionRange(0, 0, rollout.num_tokens),),
    )


@contextmanager
def _choosing(choose: Choose) -> Iterator[None]:
    engine_module.choose_tokens = choose
    try:
        yield
    finally:
        engine_module.choose_tokens = choose_tokens
