"""A model, the requests of some leases, and the ways of working on them, honest or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedModel

from models import Subject
from shoal.engine.sampling import Choose, choose_tokens
from shoal.redteam.behaviours.forged_work import ForgedRollouts, decode_requests, prefill_tokens
from shoal.rollout import Request, Rollout, VersionRange
from shoal.seeds import derive_seed

GROUP = 4
"""Rollouts per prompt; four groups are a submission."""


@dataclass
class Stage:
    """A subject, the requests of some leases, and honest work on them."""

    subject: Subject
    requests: tuple[Request, ...]
    slots: int = 64
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _honest: ForgedRollouts | None = None

    @property
    def model(self) -> PreTrainedModel:
        return self.subject.policy.model

    @property
    def eos_id(self) -> int:
        return self.subject.policy.eos_id

    @property
    def honest(self) -> ForgedRollouts:
        if self._honest is None:
            self._honest = self.generate(self.model)
        return self._honest

    def alter(self, name: str, make: Callable[[PreTrainedModel], PreTrainedModel]) -> PreTrainedModel:
        """A modified copy of the model, created once per stage."""
        if name not in self._models:
            self._models[name] = make(self.model).eval()
        return self._models[name]

    def generate(
        self, model: PreTrainedModel, *, requests: Sequence[Request] | None = None, choose: Choose = choose_tokens
    ) -> ForgedRollouts:
        """Decode with a model and a token choice function; the result states the request, whatever was done."""
        requests = self.requests if requests is None else requests
        found = decode_requests(model, requests, eos_id=self.eos_id, slots=self.slots, choose=choose)
        asked = {request.id: request for request in self.requests}
        stated = tuple(state_request(r, asked[r.id]) if r.id in asked else r for r in found.rollouts)
        return ForgedRollouts(stated, found.proofs)

    def prefill(self, rollouts: Sequence[Rollout], model: PreTrainedModel | None = None) -> ForgedRollouts:
        """Log-probs and proofs of given tokens, from one prefill."""
        return prefill_tokens(self.model if model is None else model, rollouts, eos_id=self.eos_id)


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
    """A rollout presented as the result of the given request."""
    return replace(
        rollout,
        prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
        temperature=request.temperature,
        seed=request.seed,
        versions=(VersionRange(0, 0, rollout.num_tokens),),
    )
