"""The top values of a chunk against their definition: a stable sort by falling magnitude."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.toploc import select
from shoal.toploc.select import group_chunks, read_bits, select_top, split_chunks

NEGATIVE = 0x8000 - 0x10000  # the sign bit of an int16


def sort_plain(chunk: np.ndarray, k: int) -> list[int]:
    """The definition: NaNs first, then by magnitude, then by index."""
    magnitudes = chunk.astype(np.int64) & 0x7FFF
    magnitudes[magnitudes > 0x7F80] = 0x7FC0
    return np.argsort(-magnitudes, kind="stable")[:k].tolist()


def check_choice(chunks: list[np.ndarray], k: int) -> None:
    indices, bits = select_top(chunks, k)
    for chunk, found, patterns in zip(chunks, indices.tolist(), bits, strict=True):
        assert found == sort_plain(chunk, k)
        own = chunk[found].view(np.uint16)
        nan = (own & 0x7FFF) > 0x7F80
        assert np.array_equal(patterns[~nan], own[~nan])
        assert (patterns[nan] == 0x7FC0).all()


def round_plain(values: np.ndarray) -> np.ndarray:
    """bfloat16 patterns of float32 values: add half of the last place, and a bit more where the last bit is odd."""
    raw = values.view(np.uint32).astype(np.uint64)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=6),
    st.integers(1, 200),
    st.sampled_from([2, 5, 300, 0x8000]),
    st.integers(0, 2**32),
)
def test_the_choice_is_a_stable_sort_whatever_ties_there_are(lengths: list[int], k: int, kinds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, kinds, length) | rng.choice([0, 0x8000], length) for length in lengths]
    check_choice([chunk.astype(np.uint16).view(np.int16) for chunk in drawn], min(k, *lengths))


@pytest.mark.parametrize("width", [1, 3, 64, 128, 129, 896, 5120])
@pytest.mark.parametrize("tokens", [1, 2, 31, 32])
def test_gaussian_states_of_any_shape_are_sorted(width: int, tokens: int) -> None:
    chunk = read_bits(draw_normal(tokens, width)).reshape(-1)
    check_choice([chunk], min(128, len(chunk)))


@pytest.mark.parametrize("channels", [1, 4, 40])
def test_a_few_loud_channels_change_nothing(channels: int) -> None:
    """All top values at indices a multiple of the width apart: the case the blocks are laid out for."""
    hidden = draw_normal(64, 896)
    hidden[:, 7 : 7 + channels] *= 50
    check_choice(split_chunks(hidden, 32), 128)


def test_a_constant_chunk_gives_its_first_indices() -> None:
    indices, _ = select_top([np.full(5000, 0x3F80, dtype=np.int16)], 128)
    assert indices[0].tolist() == list(range(128))


def test_zeros_at_the_end_of_a_tile_are_never_chosen() -> None:
    """A long and a short chunk share a tile, and the short one is all zeros."""
    for longest in (5000, 9000):  # ranked whole, and searched for candidates
        indices, _ = select_top([np.zeros(130, dtype=np.int16), np.arange(longest, dtype=np.int16)], 128)
        assert indices[0].tolist() == list(range(128))


@pytest.mark.parametrize("spread", [3, 40_000])
def test_small_and_large_chunks_are_ranked_alike(spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to rank agree on ties, NaNs, signs and chunks of mixed lengths."""
    rng = np.random.default_rng(spread)
    chunks = [rng.integers(-spread, spread, size).clip(-32768, 32767).astype(np.int16) for size in (300, 4096, 129)]
    ranked = select_top(chunks, 128)
    monkeypatch.setattr(select, "SMALL_VALUES", 0)
    searched = select_top(chunks, 128)
    assert all(np.array_equal(one, other) for one, other in zip(ranked, searched, strict=True))


def test_the_choice_does_not_depend_on_batch_or_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = split_chunks(draw_normal(32 * 9 + 5, 96), 32)
    together = select_top(chunks, 128)
    alone = [select_top([chunk], 128) for chunk in chunks]
    monkeypatch.setattr(select, "TILE_BYTES", 20_000)
    small = select_top(chunks[::-1], 128)
    for part in range(2):
        assert np.array_equal(together[part], np.concatenate([one[part] for one in alone]))
        assert np.array_equal(together[part], small[part][::-1])


def test_the_choice_does_not_depend_on_the_number_of_threads() -> None:
    hidden = torch.randn(64, 5120, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(select_top(split_chunks(hidden, 32), 128))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(found[0][part], other[part]) for other in found[1:] for part in range(2))


def test_every_nan_is_the_same_and_larger_than_infinity() -> None:
    chunk = np.array([0x7F80, 0x7F81, 0xFFFF, 0x3F80, 0xFFC0, 0xFF80, 0x7FFF], dtype=np.uint16).view(np.int16)
    indices, bits = select_top([chunk], 6)
    assert indices[0].tolist() == [1, 2, 4, 6, 0, 5]
    assert bits[0].tolist() == [0x7FC0] * 4 + [0x7F80, 0xFF80]


@pytest.mark.parametrize("places", [[0], [5, 900, 901], list(range(0, 4000, 7))])
def test_nans_anywhere_in_a_large_chunk_are_sorted_too(places: list[int]) -> None:
    chunk = read_bits(draw_normal(32, 128)).reshape(-1).copy()
    chunk[places] = np.where(np.arange(len(places)) % 2, np.int16(0x7F81), np.int16(-1))
    check_choice([chunk], 128)


def test_minus_zero_ties_with_zero_and_keeps_its_sign() -> None:
    indices, bits = select_top([np.array([0, NEGATIVE, 0, 1], dtype=np.int16)], 3)
    assert indices[0].tolist() == [3, 0, 1]
    assert bits[0].tolist() == [1, 0, 0x8000]


def test_the_order_of_chunks_is_kept_whatever_their_lengths() -> None:
    lengths = [300, 5000, 130, 5000, 128]
    chunks = [read_bits(draw_normal(1, length, seed=length + i)).reshape(-1) for i, length in enumerate(lengths)]
    check_choice(chunks, 128)


def test_no_chunks_give_no_rows() -> None:
    indices, bits = select_top([], 4)
    assert indices.shape == bits.shape == (0, 4)


def test_float32_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    raw[:4] = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF]  # halfway down, halfway up, above half, to infinity
    values = raw.view(np.float32)
    values = values[np.isfinite(values)].reshape(-1, 1)
    expected = round_plain(values[:, 0]).view(np.int16)
    assert np.array_equal(read_bits(values)[:, 0], expected)
    assert np.array_equal(read_bits(torch.from_numpy(values))[:, 0], expected)
    assert expected[:4].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


def test_float16_is_rounded_to_nearest_even() -> None:
    values = np.arange(0x10000, dtype=np.uint32).astype(np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(-1, 1)
    expected = round_plain(values[:, 0].astype(np.float32)).view(np.int16)
    assert np.array_equal(read_bits(values)[:, 0], expected)
    assert np.array_equal(read_bits(torch.from_numpy(values))[:, 0], expected)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_nan_stays_nan_in_every_lane(kind: type) -> None:
    """Vector lanes and the scalar rest of a loop round NaN to different patterns; both are NaN."""
    values = np.full((1, 37), np.nan, dtype=kind)
    assert ((read_bits(values) & 0x7FFF) > 0x7F80).all()
    assert select_top(split_chunks(values, 32), 37)[1].tolist() == [[0x7FC0] * 37]


def test_strided_and_read_only_states_are_read_like_any_others() -> None:
    hidden = draw_normal(40, 64).float()
    expected = read_bits(hidden)
    wide = torch.zeros(40, 128)
    wide[:, ::2] = hidden
    assert np.array_equal(read_bits(wide[:, ::2]), expected)
    assert np.array_equal(read_bits(hidden.T.contiguous().T), expected)
    array = hidden.numpy()
    array.setflags(write=False)
    assert np.array_equal(read_bits(array), expected)
    assert np.array_equal(read_bits(array[::-1]), expected[::-1])


def test_states_under_autograd_or_inference_mode_are_read() -> None:
    with torch.inference_mode():
        frozen = torch.ones(1, 2)
    assert read_bits(frozen).tolist() == read_bits(torch.ones(1, 2, requires_grad=True)).tolist() == [[0x3F80] * 2]


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(4), torch.zeros(1, 2, 3), torch.zeros(4, 0), torch.zeros(2, 2).double(), np.zeros((2, 2))],
    ids=["flat", "three axes", "no width", "double", "numpy double"],
)
def test_other_shapes_and_types_are_refused(hidden: Tensor) -> None:
    with pytest.raises(ValueError, match="hidden states"):
        read_bits(hidden)


@pytest.mark.parametrize(
    ("tokens", "lengths"), [(0, []), (1, [1]), (31, [31]), (32, [32]), (33, [32, 1]), (64, [32] * 2)]
)
def test_chunks_have_32_tokens_and_the_last_one_the_rest(tokens: int, lengths: list[int]) -> None:
    assert [len(chunk) for chunk in split_chunks(draw_normal(tokens, 16), 32)] == [16 * length for length in lengths]


def test_a_chunk_of_few_values_commits_to_all_of_them() -> None:
    chunks = [np.zeros(length, dtype=np.int16) for length in (200, 5, 128, 127, 5)]
    assert group_chunks(chunks, 128) == {128: [0, 2], 5: [1, 4], 127: [3]}
