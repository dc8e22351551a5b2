"""Bytes and rates as people write them."""

import re

from shoal.errors import ConfigError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(
    r"(?P<number>\d{1,15}(\.\d{1,6})?) ?(?P<prefix>[kmgt]?)(?P<binary>i?)(?P<unit>b|bit)?", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """`500MB`, `2 GiB` or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["unit"] or "").lower() == "bit" or (match["binary"] and not match["prefix"]):
        raise ConfigError(f"{text!r}: is no number of bytes, e.g. 500MB or 2GiB")
    return round(_scale(match))


def parse_rate(text: str) -> float:
    """Bytes per second from `200Mbit` or `25MB`, both per second."""
    match = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if match is None or (match["binary"] and not match["prefix"]) or not _scale(match):
        raise ConfigError(f"{text!r}: is no rate, e.g. 200Mbit or 25MB (per second)")
    return _scale(match) / (8 if (match["unit"] or "").lower() == "bit" else 1)


def format_bytes(count: float) -> str:
    """Three digits and a decimal prefix: `1.07 GB`."""
    for prefix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def _scale(match: re.Match[str]) -> float:
    factors = _BINARY if match["binary"] else _FACTORS
    return float(match["number"]) * factors[match["prefix"].lower()]
