"""What happens inside a box with expressions that strangers wrote: are two of them equal? Needs mpmath, and no more.

Both are evaluated at `NUM_POINTS` fixed points of their variables with `DIGITS` digits; equal is what agrees to
`AGREED` digits wherever either is defined. Two expressions of this size that differ agree so by accident in one of
10^40 cases, and nobody can try so many. A proof by rewriting would say no more in practice, takes a time that nobody
can foretell, and depends on the version of whoever rewrites.

Every step is bounded before it is taken: no power, exponential or factorial beyond 2^MAX_BITS is computed, so the
limits of the box are never met by 10^10^10 or by anything else; they are there if this is wrong.
"""

import hashlib
from fractions import Fraction
from typing import Any

import mpmath

from shoal.box.wire import send_frame
from shoal.box.zygote import Work

DIGITS, AGREED, NOISE = 120, 50, 100
"""significant digits of the work, those that must agree, and places beyond which a difference is but rounding"""
NUM_POINTS = 6
MAX_BITS = 20_000
_MAX_FACTORIAL = 1000
_MAX_ANGLE = 1 << 20
PRELOAD = ("mpmath",)

_FUNCTIONS = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sqrt")},
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "abs": mpmath.fabs,
    "ln": mpmath.log,
    "log": mpmath.log10,
}


class TooLargeError(Exception):
    """A step whose result would be too large to be an answer."""


def run_compare(channel: int, job: Any) -> None:
    """Answer whether the two trees of a job are equal."""
    answer: dict[str, Any]
    try:
        answer = {"equal": compare_trees(job["left"], job["right"], sorted(job["symbols"]))}
    except TooLargeError:
        answer = {"refused": "too large"}
    send_frame(channel, answer)


def compare_trees(left: Any, right: Any, symbols: list[str]) -> bool:
    """Whether two trees agree at all points, and are defined at one at least."""
    with mpmath.workdps(DIGITS):
        defined = 0
        for number in range(NUM_POINTS if symbols else 1):
            point = {name: pick_value(name, number) for name in symbols}
            mine, theirs = _try_value(left, point), _try_value(right, point)
            if mine is None and theirs is None:
                continue
            if mine is None or theirs is None or not _is_near(mine, theirs):
                return False
            defined += 1
    return defined > 0


def pick_value(name: str, number: int) -> Any:
    """The value of a variable at a point: a fraction of 32 bits below 4, negative at every third point."""
    digest = hashlib.sha256(f"{name} {number}".encode()).digest()
    value = Fraction(int.from_bytes(digest[:4], "big") | 1, 1 << 30)
    return mpmath.mpf(value.numerator) / value.denominator * (-1 if number % 3 == 2 else 1)


def _is_near(left: Any, right: Any) -> bool:
    if not (mpmath.isfinite(left) and mpmath.isfinite(right)):
        return False
    ten = mpmath.mpf(10)
    return bool(abs(left - right) <= max(max(abs(left), abs(right)) * ten**-AGREED, ten**-NOISE))


def _try_value(tree: Any, point: dict[str, Any]) -> Any:
    """The value, or None where there is none."""
    try:
        return _check_size(_find_value(tree, point))
    except (ZeroDivisionError, ValueError):
        return None


def _find_value(tree: Any, point: dict[str, Any]) -> Any:
    kind, *parts = tree
    if kind == "number":
        whole, _, part = parts[0].partition(".")
        return mpmath.mpf(int((whole or "0") + part)) / 10 ** len(part)
    if kind == "symbol":
        return point[parts[0]]
    if kind == "constant":
        return {"pi": +mpmath.pi, "e": +mpmath.e}[parts[0]]
    if kind == "function":
        return _apply(parts[0], _check_size(_find_value(parts[1], point)))
    return _combine(kind, [_check_size(_find_value(part, point)) for part in parts])


def _combine(kind: str, values: list[Any]) -> Any:
    match kind, values:
        case "add", [left, right]:
            return left + right
        case "mul", [left, right]:
            return left * right
        case "div", [left, right]:
            return left / right
        case "neg", [value]:
            return -value
        case "pow", [base, power]:
            return _raise(base, power)
        case "factorial", [value]:
            if not mpmath.isint(value) or value < 0 or value > _MAX_FACTORIAL:
                raise TooLargeError
            return mpmath.factorial(value)
    raise ValueError(f"no such step: {kind}")


def _raise(base: Any, power: Any) -> Any:
    if base == 0:
        if not mpmath.im(power) == 0 or power <= 0:
            raise ZeroDivisionError
        return mpmath.mpf(0)
    if abs(power) * (abs(mpmath.log(abs(base), 2)) + 8) > MAX_BITS:
        raise TooLargeError
    return mpmath.power(base, power)


def _apply(name: str, value: Any) -> Any:
    if name == "exp":
        return _raise(+mpmath.e, value)
    if name not in ("sqrt", "abs", "ln", "log") and abs(value) > _MAX_ANGLE:
        raise TooLargeError
    return _FUNCTIONS[name](value)


def _check_size(value: Any) -> Any:
    if abs(value) > mpmath.ldexp(1, MAX_BITS):
        raise TooLargeError
    return value


WORKS = {"compare": Work(run_compare)}
