"""Attention over several sequences on one flat axis of tokens.

The axis is divided into *segments*: queries are tokens start .. end - 1, and each attends to itself, the segment's
tokens before it, and the whole prefix of the segment, if it has one. So the completions of a group share one copy of
their prompt, in the forward and in the backward pass, and the result equals running every sequence alone.

Cost: short segments of similar length are padded to one rectangle, long ones are computed alone in strips, whose memory
is linear in the length, with gradients too; the rest of the network never sees padding. How far a
segment is padded depends only on its own length. Matrix libraries may still change the order of summation when a
rectangle holds more segments; `even` cuts rectangles into pieces of one size, the last padded, so that no bit of a
segment depends on the number of its neighbours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED = 512
"""Number of keys above which strips, or for even pieces the fused kernel, beat a rectangle of scores."""
_ROUND = 8
"""Lengths are rounded up to a multiple of this before bucketing: fewer, fuller rectangles."""
_PIECE = 256
"""Queries of an even piece; a longer segment is a piece of its own."""
STRIP = 64
"""Queries of a strip. More of them waste more of the corner, fewer make the matrix products small."""
LONG = 2 * STRIP
"""Tokens from which a segment is cheaper in strips than in a rectangle with others."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start .. end - 1 of the flat axis, after the tokens of segment `prefix` (an index into the segments)."""

    start: int
    end: int
    prefix: int | None = None

    @property
    def length(self) -> int:
        return self.end - self.start


class PackedAttention:
    """Causal attention within each segment and over its prefix; an `Attend` for packed batches.

    Segments that see more than `_FUSED` keys are computed alone, see `StripAttention`: a rectangle stores a mask of all
    pairs for every head. With `strips`, for use without gradients, segments of `LONG` tokens are so too.
    """

    def __init__(self, segments: Sequence[Segment], *, even: bool = False, strips: bool = False) -> None:
        prefixes = (segments[segment.prefix] for segment in segments if segment.prefix is not None)
        assert all(prefix.prefix is None for prefix in prefixes), "a prefix has no prefix of its own"
        assert not (even and strips), "strips do not keep a segment's bits"
        self.segments, self.strips = segments, strips
        long = [] if even else [index for index in range(len(segments)) if _is_long(segments, index, strips)]
        self._parts: list[_LengthBucket | StripAttention] = [_cut_strips(segments, index) for index in long]
        self._parts += [_LengthBucket(segments, members, even) for members in _bucket_segments(segments, set(long))]
        order = torch.cat([part.flat_q for part in self._parts])
        self._inverse = torch.empty(len(order), dtype=torch.long)
        self._inverse[order] = torch.arange(len(order))

    def to(self, device: torch.device) -> "PackedAttention":
        """Move the index tables, which are built on the host, to the device of the model."""
        self._inverse = self._inverse.to(device)
        for part in self._parts:
            part.to(device)
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = torch.cat([part.attend(q, k, v) for part in self._parts])
        return mixed.index_select(0, self._inverse)


def positions_of(segments: Sequence[Segment]) -> Tensor:
    """Position of each flat token: from 0 at the start of a sequence, continuing after the prefix if there is one."""
    parts = []
    for segment in segments:
        offset = 0 if segment.prefix is None else segments[segment.prefix].length
        parts.append(torch.arange(offset, offset + segment.length))
    return torch.cat(parts)


def _is_long(segments: Sequence[Segment], index: int, strips: bool) -> bool:
    segment = segments[index]
    prefix = 0 if segment.prefix is None else segments[segment.prefix].length
    return _round_up(segment.length) + _round_up(prefix) > _FUSED or (strips and segment.length >= LONG)


def _cut_strips(segments: Sequence[Segment], index: int) -> "StripAttention":
    segment = segments[index]
    prefix = None if segment.prefix is None else segments[segment.prefix]
    span = slice(segment.start, segment.start) if prefix is None else slice(prefix.start, prefix.end)
    return StripAttention(segment.start, segment.end, span)


def _bucket_segments(segments: Sequence[Segment], done: set[int]) -> list[list[int]]:
    """Indices of segments of similar length, except those in `done`."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        if index in done:
            continue
        prefix = 0 if segment.prefix is None else segments[segment.prefix].length
        buckets.setdefault((_round_up(segment.length), _round_up(prefix)), []).append(index)
    return [buckets[key] for key in sorted(buckets)]


def _round_up(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


class _LengthBucket:
    """Segments of similar length as one rectangle (B, Q) of queries and (B, P + Q) of keys."""

    def __init__(self, segments: Sequence[Segment], members: list[int], even: bool) -> None:
        self._piece = max(1, _PIECE // _round_up(segments[members[0]].length)) if even else len(members)
        missing = -len(members) % self._piece
        own = [segments[index] for index in members + members[:1] * missing]
        prefixes = [None if s.prefix is None else segments[s.prefix] for s in own]
        q_index, q_valid = _rectangle([(s.start, s.end) for s in own])
        p_index, p_valid = _rectangle([(0, 0) if p is None else (p.start, p.end) for p in prefixes])
        self.shape = q_index.shape
        self.q_index = q_index.flatten()
        self.kv_index = torch.cat((p_index, q_index), 1).flatten()
        self.bias = _mask_bias(q_valid, p_valid)
        self.q_rows = q_valid[: len(members)].flatten().nonzero().squeeze(1)
        self.flat_q = self.q_index[self.q_rows]
        self._expanded: Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Move the tables that attention reads; `flat_q` is only for building."""
        self.q_index, self.kv_index = self.q_index.to(device), self.kv_index.to(device)
        self.bias, self.q_rows = self.bias.to(device), self.q_rows.to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mixed values (tokens of this bucket, H, D), in the order of `flat_q`."""
        num, length = self.shape
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        repeat = heads // kv_heads
        # (B * K, repeat * Q, D): heads that share keys become rows of one product.
        queries = q.index_select(0, self.q_index).view(num, length, kv_heads, repeat, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(num * kv_heads, repeat * length, dim)
        keys = self._gather(k, num, kv_heads, dim)
        values = self._gather(v, num, kv_heads, dim)
        inputs = (queries, keys, values, self._expand_bias(kv_heads, repeat, q.dtype))
        pieces = zip(*(x.split(self._piece * kv_heads) for x in inputs), strict=True)
        mixed = torch.cat([_mix_values(*piece) for piece in pieces])
        mixed = mixed.view(num, kv_heads, repeat, length, dim).permute(0, 3, 1, 2, 4).reshape(num * length, heads, dim)
        return mixed.index_select(0, self.q_rows)

    def _expand_bias(self, kv_heads: int, repeat: int, dtype: torch.dtype) -> Tensor:
        """The mask for every head, built once: all layers of a model use the same."""
        if self._expanded is None or self._expanded.dtype != dtype:
            num, length = self.shape
            bias = self.bias.to(dtype)[:, None, None].expand(num, kv_heads, repeat, length, -1)
            self._expanded = bias.reshape(num * kv_heads, repeat * length, -1)
        return self._expanded

    def _gather(self, x: Tensor, num: int, kv_heads: int, dim: int) -> Tensor:
        rows = x.index_select(0, self.kv_index).view(num, -1, kv_heads, dim)
        return rows.transpose(1, 2).reshape(num * kv_heads, -1, dim)


def _mix_values(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k / sqrt(D) + bias) v over (batch, rows, D)."""
    if keys.shape[1] > _FUSED:
        return F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None], bias[:, None])[:, 0]
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def _rectangle(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Flat indices (B, rounded length) of the spans, and a mask of the real ones."""
    starts = torch.tensor([start for start, _ in spans])
    lengths = torch.tensor([end - start for start, end in spans])
    offsets = torch.arange(_round_up(int(lengths.max())))
    valid = offsets < lengths[:, None]
    return torch.where(valid, starts[:, None] + offsets, 0), valid


def _mask_bias(q_valid: Tensor, p_valid: Tensor) -> Tensor:
    """0 where a query may attend, -inf elsewhere, (B, Q, P + Q). Padded queries see themselves: each needs a key."""
    num, length = q_valid.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(num, -1, -1)
    seen = torch.cat((p_valid[:, None].expand(-1, length, -1), causal), dim=2)
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


class StripAttention:
    """Causal attention of tokens start .. end - 1 of the flat axis, which also attend to all of `prefix`.

    For one long segment: queries in strips, each over the keys it can see. Compared with a rectangle of segments,
    nothing is padded or gathered, half of the products are never computed, and only the corner where a strip meets its
    own keys is masked. Memory is one strip's scores, not the square's: the backward pass computes them again. For
    segments of fewer than `LONG` tokens the calls of many short operators cost more than this saves.
    """

    def __init__(self, start: int, end: int, prefix: slice) -> None:
        self._own, self._prefix = slice(start, end), prefix
        self.flat_q = torch.arange(start, end)

    def to(self, device: torch.device) -> None:
        """Nothing to move: slices are on the host."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mixed values (tokens of the segment, H, D), in the order of `flat_q`."""
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        length, repeat = len(self.flat_q), heads // kv_heads
        # (K, Q * repeat, D): heads that share keys become rows of one product, those of a strip adjacent.
        queries = q[self._own].reshape(length, kv_heads, repeat * dim).transpose(0, 1) * dim**-0.5
        queries = queries.reshape(kv_heads, length * repeat, dim)
        mixed: Tensor = _StripMix.apply(queries, self._gather(k), self._gather(v), length)  # type: ignore[no-untyped-call]
        return mixed.view(kv_heads, length, repeat, dim).transpose(0, 1).reshape(length, heads, dim)

    def _gather(self, x: Tensor) -> Tensor:
        """Keys or values (K, P + Q, D); a view if the prefix ends where the segment begins."""
        if self._prefix.stop == self._own.start:
            return x[self._prefix.start : self._own.stop].transpose(0, 1)
        return torch.cat((x[self._prefix], x[self._own])).transpose(0, 1)


class _StripMix(torch.autograd.Function):
    """softmax(q k) v of one segment, strip by strip; the backward pass computes the weights of each strip again."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        ctx.length = length
        mixed, repeat = [], queries.shape[1] // length
        for rows, seen in _cut_queries(queries, keys, length):
            weights = _weigh_keys(queries[:, rows], keys[:, :seen], repeat).to(values.dtype)
            mixed.append(torch.bmm(weights, values[:, :seen]))
        return torch.cat(mixed, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        queries, keys, values = ctx.saved_tensors
        repeat = queries.shape[1] // ctx.length
        grad_q = torch.empty_like(queries)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values))
        for rows, seen in _cut_queries(queries, keys, ctx.length):
            strip, weights = grad[:, rows], _weigh_keys(queries[:, rows], keys[:, :seen], repeat)
            _add_product(grad_v[:, :seen], weights.to(grad.dtype).transpose(1, 2), strip)
            slope = torch.bmm(strip, values[:, :seen].transpose(1, 2)).float()
            slope = slope.sub_((weights * slope).sum(-1, keepdim=True)).mul_(weights).to(grad.dtype)
            grad_q[:, rows] = torch.bmm(slope, keys[:, :seen])
            _add_product(grad_k[:, :seen], slope.transpose(1, 2), queries[:, rows])
        return grad_q, grad_k.to(keys.dtype), grad_v.to(values.dtype), None


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, in float32 whatever the type of the factors."""
    if one.dtype == total.dtype:
        total.baddbmm_(one, other)
    else:
        total += torch.bmm(one, other)


def _cut_queries(queries: Tensor, keys: Tensor, length: int) -> Iterator[tuple[slice, int]]:
    """Rows of each strip, and how many keys its last query sees."""
    repeat, before = queries.shape[1] // length, keys.shape[1] - length
    for first in range(0, length, STRIP):
        last = min(first + STRIP, length)
        yield slice(first * repeat, last * repeat), before + last


def _weigh_keys(queries: Tensor, keys: Tensor, repeat: int) -> Tensor:
    """Float32 softmax of the scores of one strip, whose queries are the last of the keys."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    own = queries.shape[1] // repeat
    corner = scores[:, :, -own:]
    corner += _mask_corner(repeat, scores.device)[: corner.shape[1], : corner.shape[2]]
    return torch.softmax(scores, -1, dtype=torch.float32)


@cache
def _mask_corner(repeat: int, device: torch.device) -> Tensor:
    """0 where a query may attend, -inf elsewhere, (STRIP * repeat, STRIP)."""
    unseen = torch.ones(STRIP, STRIP, dtype=torch.bool).triu(1).repeat_interleave(repeat, dim=0)
    return torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf")).to(device)
