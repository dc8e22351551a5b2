"""Running an engine to the end with all its outputs, and requests of every kind."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from shoal.engine.torch import TorchEngine
from shoal.policy.model import Policy
from shoal.rollout import Request, Rollout


@dataclass
class Collector:
    """A sink that keeps every chunk, together with the rollouts."""

    chunks: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    def __call__(self, rollout_id: str, start: int, hidden: Tensor) -> None:
        self.chunks.setdefault(rollout_id, []).append((start, hidden.clone()))

    def finish(self, engine: TorchEngine) -> "Collector":
        """Step until the engine is idle."""
        while engine.busy:
            self.rollouts |= {rollout.id: rollout for rollout in engine.step()}
        return self

    def hidden(self, rollout_id: str) -> Tensor:
        return torch.cat([chunk for _, chunk in self.chunks[rollout_id]])

    def bits(self, rollout_id: str) -> tuple[list[int], bytes, bytes]:
        """Tokens, and every bit of log-probs and hidden states."""
        rollout = self.rollouts[rollout_id]
        return rollout.token_ids.tolist(), rollout.logprobs.tobytes(), self.hidden(rollout_id).numpy().tobytes()


Run = Callable[..., Collector]
MakeRequests = Callable[..., list[Request]]


@pytest.fixture(scope="session")
def collect() -> type[Collector]:
    return Collector


@pytest.fixture(scope="session")
def run() -> Run:
    def generate(
        policy: Policy, requests: Sequence[Request], *, slots: int = 16, eos_id: int | None = None
    ) -> Collector:
        collector = Collector()
        eos_id = policy.eos_id if eos_id is None else eos_id
        engine = TorchEngine(policy.model, eos_id=eos_id, slots=slots, sink=collector)
        engine.submit(requests)
        return collector.finish(engine)

    return generate


@pytest.fixture(scope="session")
def make_requests() -> MakeRequests:
    def make(
        groups: int, *, prompts: Sequence[int] = (1, 2, 9, 17), limits: Sequence[int] = (1, 5, 40), size: int = 3
    ) -> list[Request]:
        """Groups that share a prompt, with prompt lengths and token limits from the lists, mixed temperatures."""
        rng = random.Random(groups)
        requests = []
        for group in range(groups):
            prompt = tuple(rng.randrange(3, 24) for _ in range(prompts[group % len(prompts)]))
            for sample in range(size):
                request = Request(
                    id=f"{group}.{sample}",
                    prompt_ids=prompt,
                    seed=rng.getrandbits(64),
                    max_tokens=rng.choice(limits),
                    temperature=rng.choice((1.0, 1.0, 0.7, 0.0)),
                )
                requests.append(request)
        return requests

    return make
