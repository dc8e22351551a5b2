"""Packed segments: positions, and attention equal to a plain masked softmax over all pairs, in strips too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.sizes import Sizes
from torch import Tensor

from shoal.policy.attention import LONG, STRIP, PackedAttention, Segment, StripAttention, positions_of

HEADS, KV_HEADS, DIM = 4, 2, 8


def build_segments(shape: list[tuple[int, int | None]]) -> list[Segment]:
    """Consecutive segments of these lengths; the second number selects which of those without prefix is the prefix."""
    segments: list[Segment] = []
    roots: list[int] = []
    for length, prefix in shape:
        start = segments[-1].end if segments else 0
        if prefix is None or not roots:
            roots.append(len(segments))
            segments.append(Segment(start, start + length))
        else:
            segments.append(Segment(start, start + length, roots[prefix % len(roots)]))
    return segments


def draw_inputs(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    shapes = ((size, HEADS, DIM), (size, KV_HEADS, DIM), (size, KV_HEADS, DIM))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def attend_naively(segments: list[Segment], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token with every token, with a mask written from the definition."""
    size = len(q)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        for token in range(segment.start, segment.end):
            seen[token, segment.start : token + 1] = True
            if segment.prefix is not None:
                prefix = segments[segment.prefix]
                seen[token, prefix.start : prefix.end] = True
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


lengths = st.integers(1, 30)
shapes = st.lists(st.tuples(lengths, st.none() | st.integers(0, 3)), min_size=1, max_size=7)


@settings(max_examples=25)
@given(shape=shapes, even=st.booleans())
def test_attention_is_the_masked_softmax_with_its_gradients(shape: list[tuple[int, int | None]], even: bool) -> None:
    segments = build_segments(shape)
    inputs = draw_inputs(segments[-1].end)
    ours, theirs = PackedAttention(segments, even=even)(0, *inputs), attend_naively(segments, *inputs)
    # The mixture is weighted in float32 as in transformers, whatever the dtype.
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)).double()
    for got, expected in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("even", [True, False])
def test_long_sequences_have_the_masked_softmax_and_its_gradients(even: bool) -> None:
    segments = [Segment(0, 530), Segment(530, 600, 0), Segment(600, 605)]
    inputs = draw_inputs(605, torch.float32)
    ours, theirs = PackedAttention(segments, even=even)(0, *inputs), attend_naively(segments, *inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for got, expected in zip(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(theirs.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_the_memory_of_a_long_sequence_is_linear_with_gradients() -> None:
    long, short = 40 * STRIP, 20 * STRIP
    sizes = []
    for length in (short, long):
        segments = [Segment(0, length), Segment(length, length + STRIP, 0)]
        inputs = draw_inputs(length + STRIP, torch.float32)
        with Sizes() as seen:
            mixed = PackedAttention(segments)(0, *inputs)
            torch.autograd.grad(mixed.square().sum(), inputs)
        sizes.append(seen.largest)
    # The scores of a strip for all heads, over all keys; the square would be 40 times as large.
    assert sizes[1] == STRIP * HEADS * (long + STRIP) and sizes[1] < 2 * sizes[0]


def test_segments_may_stand_in_any_order_of_length() -> None:
    segments = build_segments([(9, None), (17, 0), (1, 0), (8, None), (9, 1), (30, 0)])
    inputs = draw_inputs(segments[-1].end)
    torch.testing.assert_close(
        PackedAttention(segments)(0, *inputs), attend_naively(segments, *inputs), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [1, 40, 64, 128])
def test_even_a_segment_has_the_same_bits_beside_any_others(threads: int, length: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(length)
    num = 37  # more than one piece of the shortest
    q, k, v = (torch.randn(num * length, heads, 32, generator=generator) for heads in (2, 1, 1))
    many = [Segment(index * length, (index + 1) * length) for index in range(num)]
    together = PackedAttention(many, even=True)(0, q, k, v)
    single = [PackedAttention(many[:1], even=True)(0, *(x[s.start : s.end] for x in (q, k, v))) for s in many]
    torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(single))


def test_positions_start_at_zero_or_continue_after_a_prefix() -> None:
    segments = [Segment(0, 3), Segment(3, 5, 0), Segment(5, 7), Segment(7, 10, 0)]
    assert positions_of(segments).tolist() == [0, 1, 2, 3, 4, 0, 1, 3, 4, 5]


def test_a_prefix_of_a_prefix_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no prefix of its own"):
        PackedAttention([Segment(0, 3), Segment(3, 5, 0), Segment(5, 7, 1)])


edges = st.sampled_from([LONG - 1, LONG, LONG + 1, LONG + STRIP, LONG + STRIP + 5])
long_shapes = st.lists(st.tuples(edges | st.integers(1, 30), st.none() | st.integers(0, 3)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(shape=long_shapes)
@torch.no_grad()
def test_long_and_short_segments_side_by_side_are_the_masked_softmax(shape: list[tuple[int, int | None]]) -> None:
    segments = build_segments(shape)
    inputs = draw_inputs(segments[-1].end)
    ours, theirs = PackedAttention(segments, strips=True)(0, *inputs), attend_naively(segments, *inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gap", [0, 7])
@torch.no_grad()
def test_a_prefix_may_stand_right_before_a_segment_or_elsewhere(gap: int) -> None:
    start = 20 + gap
    segments = [Segment(0, 20), *([Segment(20, start)] if gap else []), Segment(start, start + 2 * STRIP, 0)]
    q, k, v = draw_inputs(start + 2 * STRIP)
    part = StripAttention(start, start + 2 * STRIP, slice(0, 20))
    expected = attend_naively(segments, q, k, v)[start:]
    torch.testing.assert_close(part.attend(q, k, v), expected, atol=1e-5, rtol=1e-5)
    assert part.flat_q.tolist() == list(range(start, start + 2 * STRIP))


@torch.no_grad()
def test_a_later_token_changes_nothing_before_it() -> None:
    q, k, v = draw_inputs(3 * STRIP, torch.float32)
    part = StripAttention(0, 3 * STRIP, slice(0, 0))
    before = part.attend(q, k, v)
    for at in (STRIP - 1, STRIP, 2 * STRIP + 9):
        changed = [x.detach().clone() for x in (q, k, v)]
        for x in changed:
            x[at] = 1e4
        assert torch.equal(part.attend(*changed)[:at], before[:at])


@torch.no_grad()
def test_strips_keep_the_dtype_they_are_given() -> None:
    inputs = draw_inputs(STRIP + 9)
    part = StripAttention(0, STRIP + 9, slice(0, 0))
    wide = part.attend(*inputs)
    q, k, v = (x.float() for x in inputs)
    narrow = part.attend(q, k, v)
    assert narrow.dtype == torch.float32 and wide.dtype == torch.float64
    torch.testing.assert_close(narrow.double(), wide, atol=1e-5, rtol=1e-5)


def test_strips_and_even_pieces_exclude_each_other() -> None:
    with pytest.raises(AssertionError, match="keep a segment's bits"):
        PackedAttention([Segment(0, 3)], even=True, strips=True)
