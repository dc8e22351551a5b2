"""Whether the output of a job is the expected one; compared outside the sandbox, where no untrusted code runs.

Values are compared in their encoded form (sandbox/frames.py) and never built: building a set of chosen numbers can take
quadratic time. The right value decides how exact a comparison is:

    whole number    exactly the same number; a float that equals it is one
    float           within `TOLERANCE` of it, because the last bits of a sine differ between libraries, and data sets
                    round. Within `WHOLE_TOLERANCE` if it is a whole number, which nobody rounded
    printed text    character by character; a word with a decimal point like a float, but a tolerance below 1e-6 is not
                    asked for, because that is what programs print
    not finite      the same infinity; nothing equals NaN
"""

import json
import math
from typing import Any

TOLERANCE, WHOLE_TOLERANCE = 1e-6, 1e-9
"""relative to the right value. Changing breaks: scores; raise the verifier's version."""
_OF_ZERO, _LEAST = 1e-12, 1e-15
"""what rounding leaves of a wanted zero, and of any other number: 5.6e-17 is such a zero, 5e-13 is not"""
_PRINTED = 1e-6
_MAX_BITS = 1023


def match_values(found: Any, wanted: Any) -> bool:
    """Equality of two encoded values; a tuple equals a list, because JSON has no tuples."""
    found, wanted = _open_tuple(found), _open_tuple(wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(match_values, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return _match_tagged(found, wanted)
    return _match_scalars(found, wanted)


def _open_tuple(value: Any) -> Any:
    return value["t"] if isinstance(value, dict) and isinstance(value.get("t"), list) else value


def _match_tagged(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    if found.keys() != wanted.keys() or len(wanted) != 1:
        return False
    (tag,) = wanted
    mine, theirs = found[tag], wanted[tag]
    if tag == "d":
        return _match_pairs(mine, theirs)
    if tag in ("s", "z"):
        return isinstance(mine, list) and match_values(sorted(mine, key=json.dumps), sorted(theirs, key=json.dumps))
    return bool(mine == theirs)


def _match_pairs(found: Any, wanted: Any) -> bool:
    if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        return False
    if all(isinstance(key, str) for key, _ in wanted):
        # A whole number as a key equals its text, because keys in JSON are texts.
        found = [[str(key) if type(key) is int else key, value] for key, value in found]
    return match_values(sorted(found, key=_spell_key), sorted(wanted, key=_spell_key))


def _spell_key(pair: list[Any]) -> str:
    return json.dumps(pair[0])


def _match_scalars(found: Any, wanted: Any) -> bool:
    numbers = (int, float)
    if isinstance(found, numbers) and isinstance(wanted, numbers):
        if isinstance(found, bool) != isinstance(wanted, bool):
            return False
        if isinstance(wanted, float):
            return _is_short(found) and is_close(float(found), wanted)
        return found == wanted  # exact, also for a float
    return type(found) is type(wanted) and bool(found == wanted)


def _is_short(number: float) -> bool:
    """Whether it fits into a float: a job may send whole numbers that do not."""
    return isinstance(number, float) or number.bit_length() <= _MAX_BITS


def is_close(found: float, wanted: float, least: float | None = None) -> bool:
    """Whether a float is the right one; `least` is the smallest difference that counts."""
    least = least if least is not None else _LEAST if wanted else _OF_ZERO
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return found == wanted
    tolerance = WHOLE_TOLERANCE if wanted.is_integer() else TOLERANCE
    return abs(found - wanted) <= max(tolerance * abs(wanted), least)


def is_finite(value: Any) -> bool:
    """Whether an encoded value contains neither infinity nor NaN."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return all(map(is_finite, parts))


def match_output(found: str, wanted: str) -> bool:
    """Equality of printed texts: line by line without surrounding blanks, and decimal numbers within tolerance."""
    mine, theirs = _split_lines(found), _split_lines(wanted)
    return len(mine) == len(theirs) and all(map(_match_lines, mine, theirs))


def _split_lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n").split("\n")


def _match_lines(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    mine, theirs = found.split(), wanted.split()
    return len(mine) == len(theirs) and all(map(_match_words, mine, theirs))


def _match_words(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if "." not in wanted or not (_is_decimal(found) and _is_decimal(wanted)):
        return False
    digits = len(wanted.partition(".")[2])
    return is_close(float(found), float(wanted), min(_PRINTED, 0.5 * 10.0**-digits))


def _is_decimal(word: str) -> bool:
    digits = word.removeprefix("-").replace(".", "", 1)
    return len(word) <= 64 and digits.isascii() and digits.isdigit()
