"""Which models shoal can train: those whose logits our forward pass reproduces, tested on two short sequences.

Architectures differ in ways that no list covers: logits scaled after the head, states carried from token to token
outside the attention, keys and values of other shapes. Two packed sequences reveal all of these.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.errors import ConfigError
from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import attention_shape, compute_logits, is_lean, run_decoder

_MOVING = {"dynamic", "longrope"}
"""Rotations that change with the longest sequence of a batch: a token's state would depend on its neighbours."""
_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, NotImplementedError)
"""How an architecture's own code fails on input that it does not expect."""
_SEGMENTS = [Segment(0, 5), Segment(5, 8)]
_TOLERANCE, _SHORT_TOLERANCE = 1e-3, 0.1
"""Largest difference between logits, as a share of the largest logit, in float32 and in shorter floats."""


def check_model(model: PreTrainedModel) -> None:
    """Reject a model that `attend` cannot express, or whose own forward gives different logits."""
    check_kind(model)
    name = f"policy.path: {model.config.model_type}"
    try:
        error = _probe_model(model)
    except _FAILURES as failure:
        raise ConfigError(f"{name} is not supported: {first_line(failure)}") from failure
    if not error <= (_TOLERANCE if model.dtype == torch.float32 else _SHORT_TOLERANCE):
        raise ConfigError(f"{name} is not supported: packed sequences give different logits than separate ones")


def check_kind(model: PreTrainedModel) -> None:
    """The part of `check_model` that needs no weights."""
    name = f"policy.path: {model.config.model_type}"
    if obstacle := _find_obstacle(model.config):
        raise ConfigError(f"{name} with {obstacle} is not supported")
    if not is_lean(model) and not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} is not supported: it has no pluggable attention in transformers")


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _find_obstacle(config: Any) -> str | None:
    """A setting that rules a model out although a probe of a few tokens might not show it."""
    if kinds := sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"}):
        return f"{' and '.join(kinds)} layers"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        return "sliding-window layers"
    rope = getattr(config, "rope_parameters", None) or {}
    if moving := _MOVING & {rope.get("rope_type")}:
        return f"{moving.pop()} rotation"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "capped logits"
    return None


@torch.no_grad()
def _probe_model(model: PreTrainedModel) -> float:
    """How far the logits of two packed sequences are from those of the model's own forward on each."""
    token_ids = torch.arange(1, _SEGMENTS[-1].end + 1) * 7 % model.config.vocab_size
    layers, heads, kv_heads, dim = attention_shape(model.config)
    attention = PackedAttention(_SEGMENTS)
    seen: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(layer)
        if (q.shape[1:], k.shape[1:], v.shape[1:]) != ((heads, dim), (kv_heads, dim), (kv_heads, dim)):
            raise ValueError("its attention heads differ from its config")
        return attention(layer, q, k, v)

    packed = compute_logits(model, run_decoder(model, token_ids, positions_of(_SEGMENTS), attend))
    if seen != list(range(layers)):
        raise ValueError(f"it has attention in layers {seen}, not once in each of {layers}")
    own = [model(input_ids=token_ids[None, s.start : s.end], use_cache=False).logits[0].float() for s in _SEGMENTS]
    alone = torch.cat(own)
    return float((packed - alone).abs().max() / alone.abs().max())
