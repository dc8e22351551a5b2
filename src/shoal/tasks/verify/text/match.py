"""Exact match: 1 or 0. Fuzzy match: 1 - distance / length, where distance is the number of characters to insert, delete
or replace and length that of the longer text; one division of whole numbers, so its bits are the same everywhere.

Only the text after the thoughts counts, without surrounding blanks.
"""

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.verify.base import Info, Verifier
from shoal.tasks.verify.extract import drop_thoughts

MAX_ANSWER_CHARS = 65_536
MAX_FUZZY_CHARS = 4096
"""longer texts score 0 unread: time grows with the product of both lengths (bit-parallel)"""
_KEY, _CASE, _LEAST = "answer", "ignore_case", "least"


class ExactVerifier(Verifier):
    """Exact match; `info`: answer, and optionally ignore_case."""

    name = "text_exact"
    version = 1

    def check_info(self, info: Info) -> None:
        _check_answer(info, MAX_ANSWER_CHARS)

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        found, wanted = _read_pair(info, completion)
        return Score(1.0, "correct") if found == wanted else Score(0.0, "another text")


class FuzzyVerifier(Verifier):
    """Match by edit distance; `info`: answer, ignore_case, and least, a share below which the score is 0."""

    name = "text_fuzzy"
    version = 1

    def check_info(self, info: Info) -> None:
        _check_answer(info, MAX_FUZZY_CHARS)
        least = info.get(_LEAST, 0)
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise ConfigError(f"{_LEAST} = {least!r}: must be a number from 0 to 1")

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        found, wanted = _read_pair(info, completion)
        longer = max(len(found), len(wanted))
        if longer > MAX_FUZZY_CHARS:
            return Score(0.0, "too long")
        distance = measure_distance(found, wanted)
        value = (longer - distance) / longer
        return Score(value if value >= info.get(_LEAST, 0) else 0.0, f"{distance} of {longer} letters differ")


def measure_distance(left: str, right: str) -> int:
    """Levenshtein distance, one column of the table at a time (Myers 1999, in Hyyro's form).

    Bit i of `up` and `down` means that the table rises or falls by one from row i to i + 1 of the current column.
    """
    if not left or not right:
        return len(left) + len(right)
    places: dict[str, int] = {}
    for row, letter in enumerate(left):
        places[letter] = places.get(letter, 0) | 1 << row
    full, last = (1 << len(left)) - 1, 1 << (len(left) - 1)
    up, down, distance = full, 0, len(left)
    for letter in right:
        equal = places.get(letter, 0)
        diagonal = (((equal & up) + up) ^ up) | equal | down
        rises, falls = down | (full & ~(diagonal | up)), diagonal & up
        distance += bool(rises & last) - bool(falls & last)
        rises, falls = rises << 1 | 1, falls << 1
        up, down = (falls | ~(diagonal | rises)) & full, rises & diagonal & full
    return distance


def _check_answer(info: Info, most: int) -> None:
    answer = info.get(_KEY)
    if not isinstance(answer, str) or not answer.strip() or len(answer) > most:
        raise ConfigError(f"info of a text task: needs {_KEY}, a text of 1 to {most} characters")
    if not isinstance(info.get(_CASE, False), bool):
        raise ConfigError(f"{_CASE}: must be true or false")


def _read_pair(info: Info, completion: str) -> tuple[str, str]:
    found, wanted = drop_thoughts(completion).strip(), info[_KEY].strip()
    return (found.lower(), wanted.lower()) if info.get(_CASE, False) else (found, wanted)
