"""Whether the output of a job is the expected one; compared outside the sandbox, where no untrusted code runs.

Values are compared in their encoded form (sandbox/frames.py) and never built: building a set of chosen numbers can take
quadratic time. Floats are equal within `TOLERANCE`, absolute below 1 and relative above: the last bits of a sine differ
between libraries, and scores must not.
"""

import json
import math
from typing import Any

TOLERANCE = 1e-6
"""Changing breaks: scores; raise the verifier's version."""
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
        if isinstance(found, float) or isinstance(wanted, float):
            return _is_short(found) and _is_short(wanted) and is_close(float(found), float(wanted))
        return found == wanted
    return type(found) is type(wanted) and bool(found == wanted)


def _is_short(number: float) -> bool:
    """Whether it fits into a float: a job may send whole numbers that do not."""
    return isinstance(number, float) or number.bit_length() <= _MAX_BITS


def is_close(found: float, wanted: float) -> bool:
    """Equality of floats; nothing equals a value that is not finite."""
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return False
    return abs(found - wanted) <= TOLERANCE * max(1.0, abs(wanted))


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
    return is_close(float(found), float(wanted))


def _is_decimal(word: str) -> bool:
    digits = word.removeprefix("-").replace(".", "", 1)
    return len(word) <= 64 and digits.isascii() and digits.isdigit()
