"""The program that compares two untrusted expressions for equality. Needs only mpmath.

Integers and rationals are computed exactly, as fractions: sums, products, quotients, whole powers, factorials, and
roots of perfect powers. Two exact values are equal if they are the same. Everything else is computed with `PRECISION`
bits, and two such values are equal if they differ by less than 2^-`AGREED`, relative to their size. An answer cannot
add a term that is too small to be seen: values that are not exact, and exact ones that are combined with them, are
refused below 2^-`MAX_REAL_BITS` and above 2^`MAX_REAL_BITS`; without variables also exact ones whose numerator or
denominator is longer than that, since two shorter fractions differ by more than 2^-`AGREED`.

Expressions with variables are compared at `NUM_POINTS` points of different sizes. The points follow from both
expressions: nobody can write an answer that equals the right one at chosen points only. A symbolic proof would add
nothing in practice, takes an unpredictable time, and depends on the version of the library.

Every step is bounded before it is taken: no power, exponential or factorial beyond 2^MAX_BITS is computed, so 10^10^10
or the like does not reach the limits of the job. The limits apply if this is wrong.
"""

import hashlib
import json
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from shoal.sandbox.forkserver import Program, ProgramSet
from shoal.sandbox.frames import send_frame
from shoal.sandbox.isolate import RUN_CODE

PRECISION, AGREED, MAX_REAL_BITS = 12_288, 6_144, 3_072
"""Changing breaks: scores; raise the verifier's version."""
MAX_BITS = 32_768
"""size of exact numbers"""
MAX_FUNCTIONS = 64
"""applications of functions in both expressions: each takes milliseconds"""
SCALES = (0, 0, 5, -6, 30, 300)
"""sizes of the variables at the points, as powers of two; negative at every second point"""
NUM_POINTS = len(SCALES)
_MAX_FACTORIAL = 1000
_MAX_ANGLE = 1 << 20
_MAX_CONSTANT_BITS = 280
_ZERO = 11_264
"""no step has a result below 2^-_ZERO, given values above 2^-MAX_REAL_BITS: what is smaller is rounding, as sin(pi)"""

_FUNCTIONS = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "log": mpmath.log10,
}


class TooLargeError(Exception):
    """The result of a step would be too large, or too small to tell from zero."""


def run_compare(channel: int, job: Any) -> None:
    """Answer whether the two trees of a job are equal."""
    answer: dict[str, Any]
    try:
        answer = {"equal": compare_trees(job["left"], job["right"], sorted(job["symbols"]))}
    except TooLargeError:
        answer = {"refused": "too large"}
    send_frame(channel, answer)


def compare_trees(left: Any, right: Any, symbols: list[str]) -> bool:
    """Whether an answer agrees with the right expression at all points where that can be computed, one or more."""
    if _count_functions(left) + _count_functions(right) > MAX_FUNCTIONS:
        raise TooLargeError
    seed = json.dumps([left, right])
    with mpmath.workprec(PRECISION):
        if symbols and not _has_usual_constants(left):
            raise TooLargeError
        defined = 0
        for number in range(NUM_POINTS if symbols else 1):
            point = {name: pick_value(seed, name, number) for name in symbols}
            try:
                theirs = _try_value(right, point)
            except TooLargeError:
                continue
            mine = _try_value(left, point)
            if mine is None and theirs is None:
                continue
            if mine is None or theirs is None or not _is_same(mine, theirs):
                return False
            defined += 1
    return defined > 0


def pick_value(seed: str, name: str, number: int) -> Fraction:
    """The value of a variable at a point, with 64 random bits."""
    digest = hashlib.sha256(f"{seed} {name} {number}".encode()).digest()
    value = Fraction(int.from_bytes(digest[:8], "big") | 1, 1 << 63) * Fraction(2) ** SCALES[number]
    return -value if number % 2 else value


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _approximate(left), _approximate(right)
    if not (mpmath.isfinite(left) and mpmath.isfinite(right)):
        return False
    return bool(abs(left - right) <= mpmath.ldexp(max(abs(left), abs(right)), -AGREED))


def _has_usual_constants(tree: Any) -> bool:
    """Whether the constants of an expression are within the sizes of the points. Beyond them, |x - c| is c - x at every
    point, and an expression that is another one only beyond all points would pass."""
    if _has_symbol(tree):
        return all(_has_usual_constants(part) for part in tree[1:] if isinstance(part, list) and part[0] != "symbol")
    value = _try_value(tree, {})
    if value is None or value == 0:
        return True
    return bool(abs(mpmath.log(abs(_approximate(value)), 2)) <= _MAX_CONSTANT_BITS)


def _has_symbol(tree: Any) -> bool:
    return isinstance(tree, list) and (tree[0] == "symbol" or any(map(_has_symbol, tree[1:])))


def _count_functions(tree: Any) -> int:
    return (tree[0] in ("function", "pow")) + sum(map(_count_functions, tree[1:])) if isinstance(tree, list) else 0


def _approximate(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _make_real(value: Any, max_bits: int) -> Any:
    """A value that is combined with a real one: nothing of it may be lost by that."""
    real = _approximate(value)
    if isinstance(value, Fraction) and value != 0:
        is_long = max(value.numerator.bit_length(), value.denominator.bit_length()) > max_bits
        if is_long or not _is_usual(real):
            raise TooLargeError
    return real


def _try_value(tree: Any, point: dict[str, Fraction]) -> Any:
    """The value, or None if undefined."""
    try:
        return _check_size(_find_value(tree, point))
    except (ZeroDivisionError, ValueError):
        return None


def _find_value(tree: Any, point: dict[str, Fraction]) -> Any:
    """An exact fraction, or a real or complex number."""
    kind, *parts = tree
    max_bits = MAX_BITS if point else MAX_REAL_BITS
    if kind == "number":
        return Fraction(parts[0])
    if kind == "symbol":
        return point[parts[0]]
    if kind == "constant":
        return {"pi": +mpmath.pi, "e": +mpmath.e}[parts[0]]
    if kind == "function":
        return _apply(parts[0], _check_size(_find_value(parts[1], point)), max_bits)
    values = [_check_size(_find_value(part, point)) for part in parts]
    if kind in _ARITHMETIC:
        is_exact = all(isinstance(value, Fraction) for value in values)
        return _ARITHMETIC[kind](*(values if is_exact else (_make_real(value, max_bits) for value in values)))
    if kind == "factorial":
        return _find_factorial(*values)
    base, power = values
    return _raise(base, power, max_bits)


def _add(left: Any, right: Any) -> Any:
    total = left + right
    if isinstance(total, Fraction) or abs(total) > mpmath.ldexp(max(abs(left), abs(right)), -AGREED):
        return total
    return Fraction(0)  # what rounding leaves of a difference of equals


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": _add,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
}


def _find_factorial(value: Any) -> Fraction:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= _MAX_FACTORIAL:
        raise TooLargeError
    return Fraction(math.factorial(value.numerator))


def _raise(base: Any, power: Any, max_bits: int) -> Any:
    if base == 0:
        if not isinstance(power, Fraction) or power <= 0:
            raise ZeroDivisionError
        return Fraction(0)
    if isinstance(base, Fraction) and isinstance(power, Fraction):
        if abs(power) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError
        if power.denominator <= MAX_BITS and (root := _find_root(base, power.denominator)) is not None:
            return root**power.numerator
    base, power = _make_real(base, max_bits), _make_real(power, max_bits)
    if abs(power) * (abs(mpmath.log(abs(base), 2)) + 8) > MAX_REAL_BITS:
        raise TooLargeError
    return mpmath.power(base, power)


def _find_root(value: Fraction, degree: int) -> Fraction | None:
    """The root of a positive perfect power."""
    if degree == 1:
        return value
    if value < 0:
        return None
    roots = [_find_whole_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if roots[0] is None or roots[1] is None else Fraction(roots[0], roots[1])


def _find_whole_root(value: int, degree: int) -> int | None:
    """The root of a perfect power, by Newton's method from above."""
    root = 1 << -(-value.bit_length() // degree)
    while (lower := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
        root = lower
    return root if root**degree == value else None


def _apply(name: str, value: Any, max_bits: int) -> Any:
    if name == "sqrt":
        return value if value == 0 else _raise(value, Fraction(1, 2), max_bits)
    if name == "abs":
        return abs(value)
    if name == "exp":
        return _raise(+mpmath.e, value, max_bits)
    if name not in ("ln", "log") and abs(value) > _MAX_ANGLE:
        raise TooLargeError
    return _FUNCTIONS[name](_make_real(value, max_bits))


def _check_size(value: Any) -> Any:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError
    elif abs(value) < mpmath.ldexp(1, -_ZERO):
        return Fraction(0)
    elif not _is_usual(value):
        raise TooLargeError
    return value


def _is_usual(value: Any) -> bool:
    return bool(mpmath.ldexp(1, -MAX_REAL_BITS) <= abs(value) <= mpmath.ldexp(1, MAX_REAL_BITS))


def warm_up() -> None:
    """Compare two expressions once: modules that mpmath imports lazily cannot be loaded in a job."""
    compare_trees(["number", "1"], ["function", "sqrt", ["number", "1"]], [])


PROGRAMS = ProgramSet(programs={"compare": Program(run_compare)}, profile=RUN_CODE, warm_up=warm_up)
