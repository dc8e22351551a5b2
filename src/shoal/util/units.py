"""Counts, bytes and rates in human-readable form.

Also the names allowed for a run, which occur in signatures, folders and requests.
"""

import re

from shoal.errors import ConfigError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(
    r"(?P<number>\d{1,15}(\.\d{1,6})?) ?(?P<prefix>[kmgt]?)(?P<binary>i?)(?P<unit>b|bit)?", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Parse `500MB`, `2 GiB` or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] or "").lower() == "bit" or (match["binary"] and not match["prefix"]):
        raise ConfigError(f"invalid number of bytes {text!r}, expected e.g. 500MB or 2GiB")
    return round(_scale(match))


def parse_rate(text: str) -> float:
    """Parse `200Mbit` or `25MB`, both per second, as bytes per second."""
    match = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if match is None or (match["binary"] and not match["prefix"]) or not _scale(match):
        raise ConfigError(f"invalid rate {text!r}, expected e.g. 200Mbit or 25MB (per second)")
    return _scale(match) / (8 if (match["unit"] or "").lower() == "bit" else 1)


def format_bytes(count: float) -> str:
    """Three digits and a decimal prefix: `1.07 GB`."""
    for prefix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def count_things(number: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _scale(match: re.Match[str]) -> float:
    factors = _BINARY if match["binary"] else _FACTORS
    return float(match["number"]) * factors[match["prefix"].lower()]


RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def check_run(text: str) -> str:
    """Check the name of a run; ConfigError if it is invalid."""
    if RUN.fullmatch(text) is None:
        raise ConfigError(
            f"invalid run name {text[:80]!r}: expected 1 to 64 of the characters a-z 0-9 -, not starting with -"
        )
    return text
