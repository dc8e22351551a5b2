"""The program that compares two untrusted expressions for equality. Needs only mpmath.

Both are evaluated at `NUM_POINTS` fixed points of their variables with `DIGITS` digits. They are equal if they agree to
`AGREED` digits wherever either is defined. Two different expressions of this size agree by accident in one of 10^40
cases, which nobody can search. A symbolic proof would add nothing in practice, takes an unpredictable time, and depends
on the version of the library.

Every step is bounded before it is taken: no power, exponential or factorial beyond 2^MAX_BITS is computed, so 10^10^10
or the like does not reach the limits of the job. The limits apply if this is wrong.
"""

import hashlib
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from shoal.sandbox.forkserver import Program, ProgramSet
from shoal.sandbox.frames import send_frame
from shoal.sandbox.isolate import RUN_CODE

DIGITS, AGREED, NOISE = 120, 50, 100
"""working precision in digits, digits that must agree, and decimal places beyond which a difference is only rounding"""
NUM_POINTS = 6
MAX_BITS = 20_000
_MAX_FACTORIAL = 1000
_MAX_ANGLE = 1 << 20

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
    """The result of a step would be too large."""


def run_compare(channel: int, job: Any) -> None:
    """Answer whether the two trees of a job are equal."""
    answer: dict[str, Any]
    try:
        answer = {"equal": compare_trees(job["left"], job["right"], sorted(job["symbols"]))}
    except TooLargeError:
        answer = {"refused": "too large"}
    send_frame(channel, answer)


def compare_trees(left: Any, right: Any, symbols: list[str]) -> bool:
    """Whether two trees agree at all points, and are defined at one or more."""
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
    """The value of a variable at a point: a 32-bit fraction below 4, negative at every third point."""
    digest = hashlib.sha256(f"{name} {number}".encode()).digest()
    value = Fraction(int.from_bytes(digest[:4], "big") | 1, 1 << 30)
    return mpmath.mpf(value.numerator) / value.denominator * (-1 if number % 3 == 2 else 1)


def _is_near(left: Any, right: Any) -> bool:
    if not (mpmath.isfinite(left) and mpmath.isfinite(right)):
        return False
    ten = mpmath.mpf(10)
    return bool(abs(left - right) <= max(max(abs(left), abs(right)) * ten**-AGREED, ten**-NOISE))


def _try_value(tree: Any, point: dict[str, Any]) -> Any:
    """The value, or None if undefined."""
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
    return _STEPS[kind](*(_check_size(_find_value(part, point)) for part in parts))


def _find_factorial(value: Any) -> Any:
    if not mpmath.isint(value) or value < 0 or value > _MAX_FACTORIAL:
        raise TooLargeError
    return mpmath.factorial(value)


def _raise(base: Any, power: Any) -> Any:
    if base == 0:
        if not mpmath.im(power) == 0 or power <= 0:
            raise ZeroDivisionError
        return mpmath.mpf(0)
    if abs(power) * (abs(mpmath.log(abs(base), 2)) + 8) > MAX_BITS:
        raise TooLargeError
    return mpmath.power(base, power)


_STEPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "pow": _raise,
    "factorial": _find_factorial,
}


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


def warm_up() -> None:
    """Compare two expressions once: modules that mpmath imports lazily cannot be loaded in a job."""
    compare_trees(["number", "1"], ["function", "sqrt", ["number", "1"]], [])


PROGRAMS = ProgramSet(programs={"compare": Program(run_compare)}, profile=RUN_CODE, warm_up=warm_up)
