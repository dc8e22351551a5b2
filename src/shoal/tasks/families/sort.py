"""Sorting: `5391=` is answered by `1359`, `40 7 23=` by `7 23 40`.

Reversal: `shoal=` is answered by `laohs`.
"""

import random
import string
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.tasks.base import Task, build_task
from shoal.tasks.options import STRICT, AnswerFamily

_ITEMS = {
    "digits": list(string.digits),
    "letters": list(string.ascii_lowercase),
    "numbers": [str(number) for number in range(100)],
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sort(AnswerFamily):
    """Sort digits, letters or numbers in ascending order; duplicates are kept."""

    name: ClassVar[str] = "sort"
    alphabet: ClassVar[str] = string.digits + string.ascii_lowercase + " ="

    items: Literal["digits", "letters", "numbers"] = "digits"
    """what is sorted: digits, lower-case letters, or numbers from 0 to 99"""
    min_length: Annotated[int, Field(ge=1, le=64)] = 4
    """fewest items"""
    max_length: Annotated[int, Field(ge=1, le=64)] = 8
    """most items"""

    def make_task(self, rng: random.Random) -> Task:
        length = rng.randint(self.min_length, self.max_length)
        items = [rng.choice(_ITEMS[self.items]) for _ in range(length)]
        # The list above is ascending, so its index sorts both letters and numbers.
        ordered = sorted(items, key=_ITEMS[self.items].index)
        # Single characters need no separator, and half the tokens means twice the speed.
        gap = " " if self.items == "numbers" else ""
        answer = gap.join(ordered)
        return build_task(self.name, f"{gap.join(items)}=", {"answer": answer}, kin=answer)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reverse(AnswerFamily):
    """Write a string of lower-case letters backwards."""

    name: ClassVar[str] = "reverse"
    alphabet: ClassVar[str] = string.ascii_lowercase + "="

    min_length: Annotated[int, Field(ge=1, le=256)] = 4
    """fewest letters"""
    max_length: Annotated[int, Field(ge=1, le=256)] = 8
    """most letters"""
    letters: Annotated[int, Field(ge=2, le=26)] = 26
    """how many letters of the alphabet are used, starting with a"""

    def make_task(self, rng: random.Random) -> Task:
        length = rng.randint(self.min_length, self.max_length)
        text = "".join(rng.choice(string.ascii_lowercase[: self.letters]) for _ in range(length))
        return build_task(self.name, f"{text}=", {"answer": text[::-1]})
