"""Bin packing with shared prompts."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policy.packing import pack_samples


def count_tokens(members: list[int], lengths: list[int], prompts: list[int], groups: list[int]) -> int:
    return sum(lengths[i] for i in members) + sum({groups[i]: prompts[i] for i in members}.values())


def test_samples_of_a_group_share_one_prompt() -> None:
    # 6 + 3 * 2 fills the bin; with prompts of their own each takes 8.
    assert pack_samples([2, 2, 2], [6, 6, 6], [0, 0, 0], 12) == [[0, 1, 2]]
    assert pack_samples([2, 2, 2], [6, 6, 6], [0, 1, 2], 12) == [[0], [1], [2]]


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4], [0] * 5])
def test_without_prompts_to_share_it_is_first_fit_decreasing(groups: list[int]) -> None:
    # by length 7 6 5 4 3: 7+3, 6+4, 5
    assert pack_samples([4, 7, 5, 3, 6], [0] * 5, groups, 10) == [[1, 3], [0, 4], [2]]


def test_a_sample_prefers_a_bin_that_holds_its_prompt() -> None:
    # Sample 0 leaves 6 free. Sample 1 (9 with prompt) opens a bin; sample 2 (4 with prompt, 2 without) follows it.
    assert pack_samples([12, 7, 2], [2, 2, 2], [0, 1, 1], 20) == [[0], [1, 2]]


def test_a_sample_above_the_limit_is_alone_and_whole() -> None:
    assert pack_samples([30, 1, 1], [5, 5, 5], [0, 0, 0], 20) == [[0], [1, 2]]


def test_equal_samples_keep_their_order() -> None:
    assert pack_samples([5] * 6, [0] * 6, list(range(6)), 10) == [[0, 1], [2, 3], [4, 5]]


def test_nothing_to_pack_gives_no_bins() -> None:
    assert pack_samples([], [], [], 10) == []


def test_a_group_with_two_prompt_lengths_is_refused() -> None:
    with pytest.raises(AssertionError, match="one prompt"):
        pack_samples([1, 1], [2, 3], [0, 0], 10)


@given(
    samples=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=40),
    prompt_of=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    max_tokens=st.integers(1, 60),
)
def test_every_sample_is_in_exactly_one_bin_and_no_bin_is_over(
    samples: list[tuple[int, int]], prompt_of: list[int], max_tokens: int
) -> None:
    lengths, groups = [length for length, _ in samples], [group for _, group in samples]
    prompts = [prompt_of[group] for group in groups]
    bins = pack_samples(lengths, prompts, groups, max_tokens)
    assert sorted(i for members in bins for i in members) == list(range(len(samples)))
    for members in bins:
        assert len(members) == 1 or count_tokens(members, lengths, prompts, groups) <= max_tokens
    assert bins == pack_samples(lengths, prompts, groups, max_tokens)


def make_batch(num_groups: int, group_size: int) -> tuple[list[int], list[int], list[int]]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 400, num_groups).repeat(group_size).tolist()
    lengths = np.minimum(rng.lognormal(np.log(2000), 0.7, num_groups * group_size), 30000).astype(int).tolist()
    return lengths, prompts, np.repeat(np.arange(num_groups), group_size).tolist()


def test_a_large_batch_is_packed_tightly_and_quickly() -> None:
    lengths, prompts, groups = make_batch(256, 16)
    start = time.perf_counter()
    bins = pack_samples(lengths, prompts, groups, 32768)
    assert time.perf_counter() - start < 2
    fewest = (sum(lengths) + sum(prompts[::16])) / 32768
    assert len(bins) <= 1.05 * fewest
