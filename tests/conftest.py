"""Settings of the whole suite, and tiny models that tests of several parts share.

Properties are tried on the same examples each time, however busy the machine is.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from shoal.cli import SPIN_COUNT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shoal.policy.model import Policy

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the command does, before anything imports torch
settings.register_profile("shoal", deadline=None, derandomize=True)
settings.load_profile("shoal")

_ALPHABET = "0123456789+-*/=abcdef"
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def qwen() -> "Policy":
    """A tiny Qwen3, peaked enough that tokens differ in probability. Shared: tests that write to it copy it first."""
    return _make_policy("qwen3", heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def llama() -> "Policy":
    """A tiny Llama with a single key/value head."""
    return _make_policy("llama", heads=2, kv_heads=1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., "PreTrainedModel"]:
    """Builds a small random causal LM of any architecture that transformers knows."""

    def make(name: str, **changes: Any) -> "PreTrainedModel":
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(name, **{**_SIZES, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _sharpen(AutoModelForCausalLM.from_config(config)).eval()

    return make


def _make_policy(arch: Any, heads: int, kv_heads: int) -> "Policy":
    from shoal.config import PolicyConfig, TinyConfig
    from shoal.policy.model import load_policy

    tiny = TinyConfig(arch=arch, layers=2, width=32, heads=heads, kv_heads=kv_heads, context=512)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=_ALPHABET, seed=1)
    _sharpen(policy.model).eval()
    return policy


def _sharpen(model: "PreTrainedModel") -> "PreTrainedModel":
    import torch

    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.mul_(5)
            else:  # norms are all ones and biases all zeros at first, which would hide a mix-up
                generator = torch.Generator().manual_seed(index)
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model
