"""Keys and values of prompts, each computed once for all requests that share it.

The bits of a prefix depend only on its own tokens: batches stay within the row counts that may be mixed, a longer
prefix is computed alone, and attention runs on pieces of one size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.engine.batch_invariance import RowCounts
from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import Layer, run_decoder

Tokens = tuple[int, ...]


def compute_prefixes(
    model: PreTrainedModel, layers: list[Layer] | None, prefixes: Sequence[Tokens], counts: RowCounts
) -> dict[Tokens, Tensor]:
    """Keys and values (layers, 2, K, T, D) of each prefix; empty prefixes are omitted."""
    found: dict[Tokens, Tensor] = {}
    for batch in _split_batches([prefix for prefix in prefixes if prefix], counts.most):
        found.update(_compute_batch(model, layers, batch, counts))
    return found


class _Recorder:
    """Packed attention that keeps the keys and values of every layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._attention = PackedAttention(segments, even=True).to(device)
        self._num_tokens = segments[-1].end
        self.layers: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num = self._num_tokens
        self.layers.append(torch.stack((k[:num], v[:num])))
        mixed = torch.zeros_like(q)
        mixed[:num] = self._attention(layer, q, k, v)
        return mixed


def _split_batches(prefixes: Sequence[Tokens], most: int) -> list[list[Tokens]]:
    batches: list[list[Tokens]] = []
    room = 0
    for prefix in prefixes:
        if len(prefix) > room:
            batches.append([])
            room = most
        batches[-1].append(prefix)
        room -= len(prefix)
    return batches


def _compute_batch(
    model: PreTrainedModel, layers: list[Layer] | None, prefixes: list[Tokens], counts: RowCounts
) -> dict[Tokens, Tensor]:
    segments: list[Segment] = []
    for prefix in prefixes:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, start + len(prefix)))
    recorder = _Recorder(segments, model.device)
    flat = counts.pad_flat(torch.tensor([token for prefix in prefixes for token in prefix]))
    positions = counts.pad_flat(positions_of(segments))
    run_decoder(model, flat.to(model.device), positions.to(model.device), recorder, layers)
    stacked = torch.stack(recorder.layers).transpose(2, 3)  # (layers, 2, K, T, D)
    return {prefix: stacked[..., s.start : s.end, :] for prefix, s in zip(prefixes, segments, strict=True)}
