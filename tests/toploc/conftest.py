"""A tiny model that writes long, varied text, workers honest and not, and thresholds measured on the honest ones."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shoal.policy.model import Policy
    from shoal.rollout import Request, Rollout
    from shoal.toploc.calibration import Calibration
    from shoal.toploc.check import Report


@dataclass(frozen=True)
class Work:
    """What a worker hands in."""

    rollouts: "list[Rollout]"
    proofs: dict[str, list[bytes]]


def make_policy(seed: int, *, width: int = 64, layers: int = 2) -> "Policy":
    """Random weights, sharpened until tokens differ in probability by orders of magnitude; ends are rare."""
    import torch

    from shoal.config import PolicyConfig, TinyConfig
    from shoal.policy.model import load_policy

    tiny = TinyConfig(layers=layers, width=width, heads=2, kv_heads=1, context=256)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=string.ascii_letters, seed=seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
        head = policy.model.get_output_embeddings().weight
        head.mul_(3)
        head[policy.eos_id] = 0
    policy.model.eval()
    return policy


@pytest.fixture(scope="session")
def speaker() -> "Policy":
    return make_policy(1)


@pytest.fixture(scope="session")
def stranger() -> "Policy":
    """Another model with the same tokenizer."""
    return make_policy(2)


@pytest.fixture(scope="session")
def requests_16(speaker: "Policy") -> "list[Request]":
    """A lease: four prompts, four rollouts each."""
    from shoal.rollout import Request
    from shoal.seeds import derive_seed

    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, 50, size).tolist()) for size in (1, 5, 12, 20)]
    return [
        Request(id=f"g{group}.{i}", prompt_ids=prompts[group], seed=derive_seed("lease", group, i), max_tokens=96)
        for group in range(4)
        for i in range(4)
    ]


@pytest.fixture(scope="session")
def work() -> "Callable[..., Work]":
    """Runs an engine with proofs. Its rollouts say what `claims` asked for, whatever was really computed."""

    def run(model: "PreTrainedModel", requests: "Sequence[Request]", claims: "Sequence[Request] | None" = None) -> Work:
        from shoal.engine.torch import TorchEngine
        from shoal.toploc import ProofBuilder

        builder = ProofBuilder()
        engine = TorchEngine(model, eos_id=1, slots=16, sink=builder)
        found = {rollout.id: rollout for rollout in engine.generate(requests)}
        pairs = zip(requests, claims or requests, strict=True)
        rollouts = [claim(found[request.id], asked) for request, asked in pairs]
        proofs = {asked.id: builder.take(r.id) for r, asked in zip(requests, claims or requests, strict=True)}
        return Work(rollouts, proofs)

    return run


def claim(rollout: "Rollout", request: "Request") -> "Rollout":
    """A rollout relabelled as the answer to a request."""
    prompt = np.array(request.prompt_ids, dtype=np.int32)
    return replace(rollout, id=request.id, prompt_ids=prompt, seed=request.seed, temperature=request.temperature)


@pytest.fixture(scope="session")
def launder(speaker: "Policy") -> "Callable[[Sequence[Rollout]], Work]":
    """Tokens of any origin, with proofs and log-probs of an honest prefill over them."""

    def prefill(rollouts: "Sequence[Rollout]") -> Work:
        from shoal.toploc import build_batch
        from shoal.toploc.replay import replay_rollouts

        replays = replay_rollouts(speaker.model, rollouts, eos_id=speaker.eos_id)
        proofs = build_batch([replay.hidden for replay in replays])
        pairs = list(zip(rollouts, replays, strict=True))
        return Work(
            [replace(rollout, logprobs=replay.logprobs) for rollout, replay in pairs],
            {rollout.id: own for rollout, own in zip(rollouts, proofs, strict=True)},
        )

    return prefill


@pytest.fixture(scope="session")
def calibration(speaker: "Policy") -> "Calibration":
    """Of three variants: enough for tests that attack, too little for a real verifier."""
    from shoal.toploc.calibrate import Plan, calibrate_policy
    from shoal.toploc.prompts import Source
    from shoal.toploc.variants import Way

    ways = [
        Way(name="engine"),
        Way(name="transformers", source="plain", batch=64),
        Way(name="float64", replay="double"),
    ]
    plan = Plan(source=Source(tokens=96, temperature=1.0, seed=0), samples=600)
    return calibrate_policy(speaker, ways, plan, lambda line: None, name="speaker")


@pytest.fixture(scope="session")
def check(speaker: "Policy", requests_16: "list[Request]", calibration: "Calibration") -> "Callable[..., list[Report]]":
    """Checks what a worker handed in for the lease."""

    def run(work: Work, *, seeded: bool = True) -> "list[Report]":
        from shoal.toploc.check import check_rollouts

        return check_rollouts(
            {0: speaker.model},
            requests_16,
            work.rollouts,
            work.proofs,
            calibration,
            eos_id=speaker.eos_id,
            seeded=seeded,
        )

    return run
