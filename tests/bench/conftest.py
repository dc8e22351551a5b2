"""A tiny setup for tests of the benchmarks' parts, which are loaded here so that tests can import them."""

import string
from typing import TYPE_CHECKING

import pytest
from tests.fixtures.benches import load_bench

if TYPE_CHECKING:
    from stage import Stage

for _name in (
    "altered",
    "attacks",
    "checking",
    "diloco",
    "diloco_arms",
    "diloco_model",
    "forgers",
    "guesses",
    "lora",
    "models",
    "parts",
    "records",
    "separation",
    "sharing",
    "stage",
):
    load_bench(_name)


@pytest.fixture(scope="session")
def stage() -> "Stage":
    """Four groups of four rollouts by a model with random, sharpened weights."""
    import torch

    from models import Subject
    from shoal.config.run import PolicyConfig, TinyConfig
    from shoal.policy.model import load_policy
    from stage import Stage, draw_requests

    tiny = TinyConfig(arch="llama", layers=2, width=64, heads=2, kv_heads=1, context=256)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=string.ascii_letters, seed=5)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        policy.model.get_output_embeddings().weight[policy.eos_id] = 0
    subject = Subject("tiny", policy, ((4, 9, 13, 7), (20,), (5, 6), (40, 41, 42)), 80)
    return Stage(subject, draw_requests(subject, "test", 16, 80), slots=16)
