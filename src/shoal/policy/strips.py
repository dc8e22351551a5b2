"""Attention of one long segment where no gradient is wanted: queries in strips, each over the keys it can see.

Against a rectangle of segments (layout.py) nothing is padded or gathered, half of the products are never computed, and
there is no mask but in the corner where a strip meets its own keys. Memory is one strip's scores, not the square's.
The calls of many short operators cost more than that saves where a segment has fewer than `LONG` tokens.
"""

from functools import cache

import torch
from torch import Tensor

STRIP = 64
"""Queries of a strip. More of them waste more of the corner, fewer make matrix products small."""
LONG = 2 * STRIP
"""Tokens from which a segment is cheaper in strips than beside others in a rectangle."""


class StripAttention:
    """Causal attention of tokens start .. end - 1 of the flat axis, which all see those of `prefix` too."""

    def __init__(self, start: int, end: int, prefix: slice) -> None:
        self._own, self._prefix = slice(start, end), prefix
        self.flat_q = torch.arange(start, end)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mixed values (tokens of the segment, H, D), in the order of `flat_q`."""
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        length, repeat = len(self.flat_q), heads // kv_heads
        # (K, Q * repeat, D): the heads that share keys become rows of one product, those of a strip side by side
        queries = q[self._own].reshape(length, kv_heads, repeat * dim).transpose(0, 1) * dim**-0.5
        queries = queries.reshape(kv_heads, length * repeat, dim)
        keys, values = self._gather(k), self._gather(v)
        strips = [self._mix_strip(strip, queries, keys, values) for strip in range(0, length, STRIP)]
        mixed = torch.cat(strips, dim=1).view(kv_heads, length, repeat, dim)
        return mixed.transpose(0, 1).reshape(length, heads, dim)

    def _mix_strip(self, first: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """softmax(q k) v for the strip that begins with query `first`."""
        length = len(self.flat_q)
        repeat, before = queries.shape[1] // length, keys.shape[1] - length
        last = min(first + STRIP, length)
        scores = torch.bmm(queries[:, first * repeat : last * repeat], keys[:, : before + last].transpose(1, 2))
        corner = scores[:, :, before + first :]
        corner += _mask_corner(repeat)[: corner.shape[1], : corner.shape[2]]
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values[:, : before + last])

    def _gather(self, x: Tensor) -> Tensor:
        """Keys or values (K, P + Q, D); a view where the prefix ends where the segment begins."""
        if self._prefix.stop == self._own.start:
            return x[self._prefix.start : self._own.stop].transpose(0, 1)
        return torch.cat((x[self._prefix], x[self._own])).transpose(0, 1)


@cache
def _mask_corner(repeat: int) -> Tensor:
    """0 where a query may look, -inf elsewhere, (STRIP * repeat, STRIP)."""
    unseen = torch.ones(STRIP, STRIP, dtype=torch.bool).triu(1).repeat_interleave(repeat, dim=0)
    return torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
