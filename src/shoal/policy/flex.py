"""Attention of packed segments by torch's flex attention, for accelerators: one kernel, linear in memory, forward and
backward.

- The values are those of `PackedAttention` up to rounding, shared prefixes included.
- The axis of tokens is cut into blocks. Which blocks see each other follows from the segments and is listed on the
  host: the mask of all pairs of tokens, which torch's own `create_block_mask` evaluates, is quadratic in memory.
- On the CPU torch has only the forward, for comparison.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shoal.policy.attention import PackedAttention, Segment
from shoal.policy.decoder import Attend

AttentionName = Literal["auto", "packed", "flex"]
BLOCK = 128
"""Tokens of a block; the smallest size that torch's kernels accept on every device."""
_FLEX_DEVICES = {"cuda"}
"""Where `auto` means flex."""


def place_attention(packed: PackedAttention, device: torch.device, name: AttentionName) -> Attend:
    """The attention of a pack on the device of the model. Packs for use without gradients keep their strips."""
    if name == "flex" or (name == "auto" and device.type in _FLEX_DEVICES and not packed.strips):
        return FlexAttention(packed.segments, device)
    return packed.to(device)


class FlexAttention:
    """Causal attention within each segment and over its prefix; an `Attend` for packed batches."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.mask = build_block_mask(segments, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        run = flex_attention if q.device.type == "cpu" else _compile_flex()
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return run(*heads_first, block_mask=self.mask, enable_gqa=True)[0].transpose(0, 1)  # type: ignore[no-any-return]


@cache
def _compile_flex() -> Any:
    """Uncompiled, flex attention stores the scores of all pairs."""
    return torch.compile(flex_attention, dynamic=True)


def build_block_mask(segments: Sequence[Segment], device: torch.device) -> BlockMask:
    """Which blocks of tokens see each other, and within them which tokens."""
    lengths = [segment.length for segment in segments]
    own_host = np.repeat(np.arange(len(segments), dtype=np.int32), lengths)
    prefixes = [-1 if segment.prefix is None else segment.prefix for segment in segments]
    prefix_host = np.repeat(np.array(prefixes, dtype=np.int32), lengths)
    some, full = _list_blocks(segments, own_host, prefix_host)
    own, prefix = torch.from_numpy(own_host).to(device), torch.from_numpy(prefix_host).to(device)

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((own[q] == own[k]) & (q >= k)) | (own[k] == prefix[q])

    num, indices = (table.to(device) for table in _order_blocks(some & ~full))
    num_full, full_indices = (table.to(device) for table in _order_blocks(full))
    sizes = (len(own_host), len(own_host))
    return BlockMask.from_kv_blocks(num, indices, num_full, full_indices, BLOCK, sees, sizes)


def _list_blocks(segments: Sequence[Segment], own: np.ndarray, prefix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each block of queries and of keys, whether any query sees any key, and whether all see all."""
    num = -(-len(own) // BLOCK)
    some = np.zeros((num, num), dtype=bool)
    for segment in segments:
        rows = _cover(segment)
        some[rows, rows] = True
        if segment.prefix is not None:
            some[rows, _cover(segments[segment.prefix])] = True
    some &= np.tri(num, dtype=bool)
    owner, shared = _find_common(own), _find_common(prefix)
    earlier = (owner[:, None] == owner) & np.tri(num, k=-1, dtype=bool)
    inside = (owner[:, None] >= 0) & (owner >= 0)
    return some, inside & (earlier | (shared[:, None] == owner))


def _cover(segment: Segment) -> slice:
    """Blocks with tokens of the segment."""
    return slice(segment.start // BLOCK, (segment.end - 1) // BLOCK + 1)


def _find_common(ids: np.ndarray) -> np.ndarray:
    """The id that all tokens of a block have, or -1."""
    blocks = [ids[first : first + BLOCK] for first in range(0, len(ids), BLOCK)]
    return np.array([block[0] if len(block) == BLOCK and (block == block[0]).all() else -1 for block in blocks])


def _order_blocks(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries sees, and their indices first in each row, as torch lists them."""
    counts = blocks.sum(1, dtype=np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(indices)[None, None]
