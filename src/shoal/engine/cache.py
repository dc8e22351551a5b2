"""Keys and values of the active rollouts, one row per slot, and decode attention over them.

Shapes: R rows in use, K key/value heads, T positions, D head size; storage is (layers, 2, rows, K, T, D).
- Keys, values and masks are on the device of the model; lengths, which decide what is read, are on the host.
- Rows 0 .. R - 1 are in use, without holes: the engine moves rows when one finishes.
- T is read in multiples of a tile, and positions beyond a row's length have weight exactly 0. With the CPU libraries
  tested, a row's result then has the same bits whatever the other rows are (tests/engine/test_invariance.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STEP = 16
_SMALL = 400
"""torch multiplies matrices with fewer scalar products in its own loop, which sums in a different order than BLAS."""
_LONG = 128
"""BLAS libraries split longer sums into parts whose size depends on the length."""
_BLOCK = 64
"""Rows that share one T: a long rollout makes only its block read that far, not the whole batch."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How positions are read: `tile` at a time, and summed over `chunk`, a multiple of it, at a time.

    A product over a tile is large enough for BLAS, and one over a chunk short enough to be summed in one part: the
    order of summation is the same however far a neighbour makes a row read.
    """

    tile: int
    chunk: int

    @classmethod
    def for_heads(cls, repeat: int, dim: int) -> "Tiling":
        """The tiling for `repeat` query heads of size `dim` per key/value head."""
        tile = -(-_SMALL // (_STEP * repeat * dim)) * _STEP
        return cls(tile, max(1, _LONG // tile) * tile)

    def round_up(self, length: int) -> int:
        return -(-length // self.tile) * self.tile


class SlotCache:
    """Preallocated storage; `lengths` is the number of positions in each row."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        dim: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 64,
    ) -> None:
        self._shape = (layers, 2, slots + 1, kv_heads, dim)  # one spare row, see DecodeAttention
        self._tiling = Tiling.for_heads(heads // kv_heads, dim)
        self._dtype, self._device = dtype, device
        self.lengths = torch.zeros(slots, dtype=torch.long)
        self._allocate(capacity)

    @property
    def capacity(self) -> int:
        return self._store.shape[4]

    def reserve(self, capacity: int) -> None:
        """Make room for longer sequences; the contents are kept."""
        if capacity <= self.capacity:
            return
        before, seen = self._store, self._bias
        self._allocate(capacity)
        self._store[..., : before.shape[4], :] = before
        self._bias[:, : seen.shape[1]] = seen

    def clear(self) -> None:
        """Zero everything: not even masked values of other weights may stay (0 x inf is not 0)."""
        self._store.zero_()

    def open_rows(self, start: int, prefixes: Sequence[Tensor | None]) -> None:
        """Start rows from `start` on, each with the keys and values (layers, 2, K, T, D) of its prompt, or empty."""
        for row, prefix in enumerate(prefixes, start=start):
            if prefix is not None:
                self._store[:, :, row, :, : prefix.shape[3]] = prefix
        rows = slice(start, start + len(prefixes))
        self.lengths[rows] = torch.tensor([0 if prefix is None else prefix.shape[3] for prefix in prefixes])
        unseen = torch.arange(self.capacity) >= self.lengths[rows, None]
        bias = torch.zeros(unseen.shape, dtype=self._dtype).masked_fill_(unseen, float("-inf"))
        self._bias[rows] = bias.to(self._device)

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows over free ones."""
        top = self._tiling.round_up(int(self.lengths[source].max()))
        self.lengths[target] = self.lengths[source]
        source, target = source.to(self._device), target.to(self._device)
        self._store[:, :, target, :, :top] = self._store[:, :, source, :, :top]
        self._bias[target] = self._bias[source]

    def begin_step(self, rows: int) -> "DecodeAttention":
        """Add one position to rows 0 .. rows - 1; returns the attention of this step."""
        at = self.lengths[:rows].clone()
        self._bias[torch.arange(rows, device=self._device), at.to(self._device)] = 0.0
        self.lengths[:rows] += 1
        return DecodeAttention(self._store, self._bias, at, self._tiling)

    def _allocate(self, capacity: int) -> None:
        layers, two, rows, kv_heads, dim = self._shape
        length = self._tiling.round_up(capacity)
        self._store = torch.zeros(layers, two, rows, kv_heads, length, dim, dtype=self._dtype, device=self._device)
        self._bias = torch.full((rows, length), float("-inf"), dtype=self._dtype, device=self._device)
        self._bias[:, 0] = 0.0  # a row must attend to at least one position


class DecodeAttention:
    """Attention of one new token per row: writes its key and value, then attends to all before; an `Attend`."""

    def __init__(self, store: Tensor, bias: Tensor, at: Tensor, tiling: Tiling) -> None:
        _, _, _, kv_heads, capacity, _ = store.shape
        self._store, self._rows, self._chunk = store, len(at), tiling.chunk
        # Flat index of (row, head, position).
        heads = torch.arange(len(at) * kv_heads).view(-1, kv_heads)
        self._flat = (heads * capacity + at[:, None]).flatten().to(store.device)
        spans = _block_spans(at, tiling)
        if kv_heads == 1:
            # A batch of one product is summed in a different order than larger ones: a single row adds the next.
            spans = [(slice(span.start, max(span.stop, span.start + 2)), top) for span, top in spans]
        self._spans = [(span, bias[span, None, None, :top], top) for span, top in spans]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._store[layer]
        dim = q.shape[2]
        for store, fresh in ((keys, k), (values, v)):
            store.view(-1, dim).index_copy_(0, self._flat, fresh[: self._rows].reshape(-1, dim))
        grouped = q.reshape(q.shape[0], k.shape[1], -1, dim) * dim**-0.5
        mixed = torch.zeros_like(grouped)  # rows beyond R are padding of the matrix products
        for span, bias, top in self._spans:
            scores = torch.matmul(grouped[span], keys[span, :, :top].transpose(2, 3)).add_(bias)
            mixed[span] = self._mix_values(torch.softmax(scores, -1), values[span, :, :top])
        return mixed.view(q.shape)

    def _mix_values(self, weights: Tensor, values: Tensor) -> Tensor:
        first, *rest = zip(weights.split(self._chunk, 3), values.split(self._chunk, 2), strict=True)
        mixed = torch.matmul(*first)
        for part in rest:
            mixed += torch.matmul(*part)
        return mixed


def _block_spans(at: Tensor, tiling: Tiling) -> list[tuple[slice, int]]:
    """Runs of row blocks that read equally far, and how far."""
    spans: list[tuple[slice, int]] = []
    end = 0
    for block in at.split(_BLOCK):
        start, end, top = end, end + len(block), tiling.round_up(int(block.max()) + 1)
        if spans and spans[-1][1] == top:
            start = spans.pop()[0].start
        spans.append((slice(start, end), top))
    return spans
