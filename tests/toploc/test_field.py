"""Field algebra against plain integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.toploc.field import (
    REACH,
    P,
    Vandermonde,
    expand_roots,
    interpolate,
    invert,
    list_powers,
    multiply,
    raise_power,
    reduce,
    to_canonical,
)

SIZES = [1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 64, 100, 127, 128, 200]


def residues(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int64) % P


def draw_points(chunks: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(P, k, replace=False) for _ in range(chunks)]).astype(np.float64)


def draw_elements(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, P, shape).astype(np.float64)


def horner(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % P
    return value


def multiply_plain(a: list[int], b: list[int]) -> list[int]:
    product = [0] * (len(a) + len(b) - 1)
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            product[i + j] += left * right
    return [value % P for value in product]


def test_the_modulus_is_the_prime_of_the_published_format() -> None:
    assert P == 0xFFD9
    assert all(P % divisor for divisor in range(2, 256))


@given(st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=50))
def test_reduced_elements_are_small_and_congruent(values: list[int]) -> None:
    reduced = reduce(np.array(values, dtype=np.float64))
    assert all(abs(int(r)) <= REACH and (int(r) - v) % P == 0 for r, v in zip(reduced, values, strict=True))


@pytest.mark.parametrize("quotient", [0, 1, 2, 1000, 2**36, 68_759_000_000])
@pytest.mark.parametrize("offset", [-P // 2, -P // 2 - 1, -1, 0, 1, P // 2, P // 2 + 1])
def test_reduction_holds_next_to_multiples_and_halves(quotient: int, offset: int) -> None:
    value = quotient * P + offset
    assert abs(value) <= 2**52
    reduced = int(reduce(np.array([float(value)]))[0])
    assert abs(reduced) <= REACH
    assert (reduced - value) % P == 0


def test_the_largest_sum_of_products_is_exact() -> None:
    """What the module's docstring claims: 2^22 products of the largest magnitude."""
    terms = np.full(2**22, float(REACH))
    assert int(reduce(np.array([terms @ terms]))[0]) % P == 2**22 * REACH**2 % P


def test_reduction_works_in_place() -> None:
    x = np.array([float(P + 5)])
    assert reduce(x) is x
    assert x.tolist() == [5.0]


def test_canonical_integers_lie_below_the_prime() -> None:
    assert to_canonical(np.array([-1.0, 0.0, 1.0, -32748.0, 32748.0])).tolist() == [P - 1, 0, 1, 32749, 32748]


def test_every_element_times_its_inverse_is_one() -> None:
    x = reduce(np.arange(1, P, dtype=np.float64))
    assert set(residues(x * invert(x)).tolist()) == {1}


@given(st.integers(0, P - 1), st.integers(0, 2**20))
def test_powers_by_squaring_equal_pythons(base: int, exponent: int) -> None:
    x = reduce(np.array([float(base)]))
    assert residues(raise_power(x, exponent)).tolist() == [pow(base, exponent, P)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 15, 16, 17])
def test_a_list_of_powers_starts_at_one_and_grows_by_the_base(count: int) -> None:
    bases = [[0, 1, 2], [P - 1, 40000, 65496]]
    powers = residues(list_powers(np.array(bases, dtype=np.float64), count))
    assert powers.tolist() == [[[pow(base, e, P) for base in row] for row in bases] for e in range(count)]


@pytest.mark.parametrize("k", SIZES)
def test_evaluation_equals_horner(k: int) -> None:
    points, coefficients = draw_elements(3, 11), reduce(draw_elements(3, k, seed=2))
    values = residues(Vandermonde(points, k).evaluate(coefficients))
    plain = [
        [horner(c, x) for x in row]
        for row, c in zip(points.astype(int).tolist(), coefficients.astype(int).tolist(), strict=True)
    ]
    assert values.tolist() == plain


@pytest.mark.parametrize("k", SIZES)
def test_power_sums_equal_their_definition(k: int) -> None:
    points, weights = draw_elements(2, 9), reduce(draw_elements(2, 9, seed=3))
    sums = residues(Vandermonde(points, k).sum_powers(weights))
    for row in range(2):
        pairs = list(zip(points[row].astype(int).tolist(), weights[row].astype(int).tolist(), strict=True))
        assert sums[row].tolist() == [sum(w * pow(x, j, P) for x, w in pairs) % P for j in range(k)]


@pytest.mark.parametrize("k", SIZES)
def test_expanded_roots_equal_the_product_of_factors(k: int) -> None:
    points = draw_points(2, k)
    expanded = residues(expand_roots(points))
    for row in range(2):
        plain = [1]
        for root in points[row].astype(int).tolist():
            plain = multiply_plain(plain, [-root, 1])
        assert expanded[row].tolist() == plain


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("n", [1, 2, 8, 15, 16, 17, 40, 128])
def test_products_equal_plain_products(m: int, n: int) -> None:
    a, b = draw_elements(2, m, seed=4), draw_elements(2, n, seed=5)
    product = residues(reduce(multiply(a, b)))
    for row in range(2):
        plain = multiply_plain(a[row].astype(int).tolist(), b[row].astype(int).tolist())
        assert product[row].tolist() == [*plain, 0]


@pytest.mark.parametrize("k", SIZES)
def test_an_interpolated_polynomial_passes_through_its_points(k: int) -> None:
    points, values = draw_points(3, k), draw_elements(3, k, seed=6)
    coefficients = residues(interpolate(points, values)).tolist()
    for row in range(3):
        assert [horner(coefficients[row], int(x)) for x in points[row]] == values[row].astype(int).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 140), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_interpolation_recovers_any_polynomial_in_any_order_of_points(k: int, seed: int, random) -> None:  # type: ignore[no-untyped-def]
    coefficients = reduce(draw_elements(1, k, seed=seed))
    points = draw_points(1, k, seed=seed + 1)
    values = Vandermonde(points, k).evaluate(coefficients)
    order = list(range(k))
    random.shuffle(order)
    found = interpolate(points[:, order], values[:, order])
    assert residues(found).tolist() == residues(coefficients).tolist()


def test_a_chunks_polynomial_does_not_depend_on_the_batch() -> None:
    points, values = draw_points(300, 128), draw_elements(300, 128)
    together = interpolate(points, values)
    alone = interpolate(points[123:124], values[123:124])
    assert np.array_equal(residues(together[123:124]), residues(alone))


def test_a_point_at_zero_is_a_point_like_any_other() -> None:
    points = np.array([[0.0, 5.0, P - 1.0]])
    coefficients = residues(interpolate(points, np.array([[7.0, 8.0, 9.0]])))[0].tolist()
    assert [horner(coefficients, x) for x in (0, 5, P - 1)] == [7, 8, 9]
