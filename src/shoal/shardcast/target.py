"""What a request asks for, taken apart by strict patterns, and the refusal of what fits none.

A target is a path of printable ASCII and a query of numbers. Nothing is decoded: no percent signs, no dots, no other
spelling of anything.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.shardcast.http import parse_count

MAX_TARGET_BYTES = 1024
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})?")


class RefusalError(Exception):
    """An answer that is no."""

    def __init__(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class Target:
    """A request's target, taken apart."""

    path: str
    query: Mapping[str, int]

    def read_query(self, **defaults: int) -> list[int]:
        """The numbers asked for, in the order of their defaults; another key is refused."""
        if not self.query.keys() <= defaults.keys():
            raise RefusalError(400, "unknown query")
        return [self.query.get(key, default) for key, default in defaults.items()]


def parse_target(target: bytes) -> Target:
    """A path of printable ASCII and a query of numbers, each key once; `RefusalError` otherwise."""
    if len(target) > MAX_TARGET_BYTES:
        raise RefusalError(414, "target too long")
    if not target.startswith(b"/") or not target.isascii():
        raise RefusalError(400, "a target here is a path")
    path, mark, text = target.decode("ascii").partition("?")
    query: dict[str, int] = {}
    for pair in text.split("&") if mark else ():
        key, _, digits = pair.partition("=")
        number = parse_count(digits)
        if number is None or key in query:
            raise RefusalError(400, "a query here is made of numbers")
        query[key] = number
    return Target(path, query)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of the part asked for; None for the whole, also where we do not know the kind of range."""
    match = _RANGE.fullmatch(header or "")
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        return None
    first = int(match[1])
    if first >= size:
        raise RefusalError(416, "beyond the end", ("Content-Range", f"bytes */{size}"))
    return first, size if match[2] is None else min(size, int(match[2]) + 1)
