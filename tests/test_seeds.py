"""Seeds and uniforms: known answers, and independence of everything but their arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.seeds import derive_seed, token_uniforms, uniform_rows

MASK = 2**32 - 1
words = st.integers(0, 2**64 - 1)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as in Salmon et al. 2011, one block at a time."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_to_compare_with_gives_random123s_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], block: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == block


@settings(max_examples=50)
@given(seed=words, start=st.integers(0, 2**40) | st.sampled_from([2**32 - 2, 63, 64]), count=st.integers(0, 5))
def test_a_uniform_is_the_top_53_bits_of_its_block(seed: int, start: int, count: int) -> None:
    blocks = [philox((t & MASK, t >> 32, 0, 0), (seed & MASK, seed >> 32)) for t in range(start, start + count)]
    expected = [((c0 << 32 | c1) >> 11) * 2.0**-53 for c0, c1, _, _ in blocks]
    assert token_uniforms(seed, start, count).tolist() == expected


def test_uniforms_are_the_published_generator() -> None:
    # Random123's known answer for philox4x32-10, counter 0 and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    bits = (0x6627E8D5 << 32 | 0xE169C58D) >> 11
    assert token_uniforms(0, 0, 1)[0] == bits * 2.0**-53


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    whole = token_uniforms(123, 0, 100)
    assert token_uniforms(123, 40, 5).tolist() == whole[40:45].tolist()
    rows = uniform_rows(np.array([5, 123, 2**64 - 1], dtype=np.uint64), np.array([9, 40, 0]), 5)
    assert rows[1].tolist() == whole[40:45].tolist()


def test_uniforms_are_uniform() -> None:
    values = np.concatenate([token_uniforms(seed, 0, 500) for seed in range(100)])
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 5000).max() < 350  # five standard deviations


@settings(max_examples=25)
@given(rows=st.lists(st.tuples(words, st.integers(0, 2**20)), min_size=1, max_size=6), count=st.integers(1, 70))
def test_rows_are_drawn_as_if_each_were_alone(rows: list[tuple[int, int]], count: int) -> None:
    seeds, starts = np.array([seed for seed, _ in rows], dtype=np.uint64), np.array([start for _, start in rows])
    together = uniform_rows(seeds, starts, count)
    for row, (seed, start) in zip(together, rows, strict=True):
        assert row.tolist() == token_uniforms(seed, start, count).tolist()


@settings(max_examples=50)
@given(
    one=st.lists(st.integers() | st.text(max_size=4), max_size=4),
    other=st.lists(st.integers() | st.text(max_size=4), max_size=4),
)
def test_seeds_are_equal_only_for_equal_tuples(one: list[int | str], other: list[int | str]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)
    assert 0 <= derive_seed(*one) < 2**64


def test_seeds_of_different_tuples_differ() -> None:
    tuples = [("a", "bc"), ("ab", "c"), ("a", 1), ("a", "1"), (1, 2), (2, 1), (12,), (1,), (), ("a",), (-1,), (2**70,)]
    assert len({derive_seed(*parts) for parts in tuples}) == len(tuples)


def test_seeds_stay_what_they_are() -> None:
    # Golden: every recorded rollout depends on it.
    assert derive_seed("beacon", 0, 1) == 6532224982931094518
    assert derive_seed() == 10443931324165736785
    assert derive_seed("init", -3, "\u00e9") == 639684144903117937
    assert token_uniforms(derive_seed("beacon", 0, 1), 63, 2).tolist() == [0.42431826942922335, 0.943559542817485]
