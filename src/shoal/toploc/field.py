"""Arithmetic in the prime field of 65497 elements, for the polynomials of many chunks at once.

Shapes: B chunks, n points of each, k coefficients in ascending order.
- An element is a float64 that holds an integer and represents its residue. `reduce` brings it to at most `REACH` in
  magnitude; a product of two such is at most 2^30, and float64 holds the sum of 2^22 of those exactly. Matrix products
  of field elements are therefore exact, whatever the order of summation: no result depends on threads or batch.
- Powers of a point are two short lists, x^(16 a + b) = (x^16)^a x^b, so a polynomial of 128 coefficients costs 22
  multiplications with reduction per point, and the rest is a matrix product.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.float64]

P = 65497
"""The prime, 0xFFD9. Changing breaks: every proof."""
REACH = 2**15
"""Bound on the magnitude of a reduced element."""
LAZY = 128
"""Products of three reduced elements, at most 2^45 each, that can be summed without intermediate reduction."""
SHORT = 16
"""Entries in the list of low powers; the other list has k / 16."""
BLOCK = 8
"""Coefficients per row of a matrix product that multiplies polynomials."""


def reduce(x: Elements) -> Elements:
    """x - P round(x / P), in place, for |x| <= 2^52: P times the quotient is exact, and the rest is within `REACH`."""
    quotient = x * (1 / P)
    np.rint(quotient, out=quotient)
    quotient *= P
    x -= quotient
    return x


def to_canonical(x: Elements) -> NDArray[np.uint16]:
    """Reduced elements as integers 0 .. P - 1."""
    return np.where(x < 0, x + P, x).astype(np.uint16)


def invert(x: Elements) -> Elements:
    """1 / x of reduced elements, by table; a negative index counts from the table's end, at P - |x|."""
    return _inverses()[x.astype(np.intp)]


def raise_power(x: Elements, exponent: int) -> Elements:
    """x^exponent by squaring."""
    result = np.ones_like(x)
    while exponent:
        if exponent & 1:
            result = reduce(result * x)
        x = reduce(x * x)
        exponent >>= 1
    return result


def list_powers(x: Elements, count: int) -> Elements:
    """x^0 .. x^(count-1) along a new first axis; each round multiplies all known powers by the highest."""
    powers = np.empty((count, *x.shape))
    powers[0] = 1
    powers[1:2] = x
    known = 2
    while known < count:
        more = min(known - 1, count - known)
        fresh = powers[known : known + more]
        np.multiply(powers[1 : 1 + more], powers[known - 1], out=fresh)
        reduce(fresh)
        known += more
    return powers


class Vandermonde:
    """The matrices V[i, j] = x_i^j (j < k) of each chunk's points (B, n), as factors: V[i, 16 a + b] = high low."""

    def __init__(self, points: Elements, k: int) -> None:
        self._k = k
        points = reduce(points.copy())
        self._low = list_powers(points, SHORT)  # (16, B, n)
        step = reduce(self._low[-1] * points)
        self._high = list_powers(step, -(-k // SHORT))  # (k / 16, B, n)

    def evaluate(self, coefficients: Elements) -> Elements:
        """V c: the values (B, n) of the polynomials with reduced coefficients (B, k)."""
        rows, chunks = len(self._high), len(coefficients)
        padded = np.zeros((chunks, rows * SHORT))
        padded[:, : self._k] = coefficients
        blocks = np.empty_like(self._high)
        np.matmul(padded.reshape(chunks, rows, SHORT), self._low.transpose(1, 0, 2), out=blocks.transpose(1, 0, 2))
        if self._k > LAZY:
            reduce(blocks)
        blocks *= self._high
        return reduce(blocks.sum(axis=0))

    def sum_powers(self, weights: Elements) -> Elements:
        """V^T w: the sums over i of w_i x_i^j, (B, k), for reduced weights (B, n)."""
        high = self._high * weights
        if weights.shape[1] > LAZY:
            reduce(high)
        sums = np.matmul(high.transpose(1, 0, 2), self._low.transpose(1, 2, 0))
        return reduce(sums.reshape(len(sums), -1)[:, : self._k].copy())


def expand_roots(points: Elements) -> Elements:
    """Coefficients (B, k + 1) of the products over i of (x - x_i), as a tree: factors, pairs, pairs of pairs."""
    chunks, k = points.shape
    padding = (1 << (k - 1).bit_length()) - k
    # A root at 0 only shifts the coefficients by one, so any number of factors can be padded to a power of two.
    factors = np.zeros((k + padding, chunks, 1))
    factors[:k, :, 0] = -points.T
    while len(factors) > 1:
        half, degree = len(factors) // 2, factors.shape[2]
        pairs = factors.reshape(2, half * chunks, degree)
        factors = _multiply_monic(*pairs).reshape(half, chunks, 2 * degree)
    return np.concatenate((factors[0, :, padding:], np.ones((chunks, 1))), axis=1)


def interpolate(points: Elements, values: Elements) -> Elements:
    """Coefficients (B, k) of the polynomials of degree < k through k points each, all distinct within a chunk.

    With M = product of (x - x_i) and w_i = y_i / M'(x_i), Lagrange's F = sum of w_i M / (x - x_i). Dividing by
    x - x_i is multiplying by the series 1/x + x_i/x^2 + x_i^2/x^3 + ..., so F is the polynomial part of M times
    S_0/x + S_1/x^2 + ..., where S_j is the sum of w_i x_i^j.
    """
    k = points.shape[1]
    master = expand_roots(points)
    powers = Vandermonde(points, k)
    slope = powers.evaluate(reduce(master[:, 1:] * np.arange(1, k + 1)))
    weights = reduce(values * invert(slope))
    # Read from the highest power down, the polynomial part is the beginning of a product.
    return reduce(multiply(master[:, :0:-1], powers.sum_powers(weights))[:, k - 1 :: -1])


def multiply(a: Elements, b: Elements) -> Elements:
    """Products (B, m + n) of polynomials with m and n coefficients, not reduced."""
    return _multiply_short(a, b) if b.shape[1] < 2 * BLOCK else _multiply_long(a, b)


def _multiply_short(a: Elements, b: Elements) -> Elements:
    """One coefficient of b at a time, over all polynomials at once."""
    m, n = a.shape[1], b.shape[1]
    a, b = a.T.copy(), b.T.copy()
    product = np.zeros((m + n, a.shape[1]))
    term = np.empty_like(a)
    for power in range(n):
        np.multiply(a, b[power], out=term)
        product[power : power + m] += term
    return product.T


def _multiply_long(a: Elements, b: Elements) -> Elements:
    """Blocks of b times a matrix of a, shifted by 0, 1, 2, ..: one matrix product per polynomial."""
    (rows, m), n = a.shape, b.shape[1]
    blocks = -(-n // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK))
    padded[:, :n] = b
    shifted = np.zeros((BLOCK, rows, m + BLOCK))
    for shift in range(BLOCK):
        shifted[shift, :, shift : shift + m] = a
    parts = np.empty((blocks, rows, m + BLOCK))
    np.matmul(padded.reshape(rows, blocks, BLOCK), shifted.transpose(1, 0, 2), out=parts.transpose(1, 0, 2))
    product = np.zeros((rows, m + blocks * BLOCK))
    for block, part in enumerate(parts):
        product[:, block * BLOCK : block * BLOCK + m + BLOCK] += part
    return product[:, : m + n]


def _multiply_monic(a: Elements, b: Elements) -> Elements:
    """(x^d + a)(x^d + b) = x^2d + x^d (a + b) + a b, of each without its leading 1."""
    degree = a.shape[1]
    product = multiply(a, b)
    product[:, degree:] += a
    product[:, degree:] += b
    return reduce(product)


@cache
def _inverses() -> Elements:
    return raise_power(np.arange(P, dtype=np.float64), P - 2)
