"""Byte counts and rates as written on a command line."""

import pytest

from shoal.errors import ConfigError
from shoal.util.units import format_bytes, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1024", 1024),
        ("500MB", 500_000_000),
        ("2 GiB", 2**31),
        ("1.5k", 1500),
        ("8mib", 2**23),
        ("3T", 3 * 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e9", "5iB", "7Mbit", "1 0", "9" * 16, "10PB", "nan"])
def test_an_invalid_size_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "rate"), [("200Mbit", 25e6), ("25MB", 25e6), ("25MB/s", 25e6), ("8 bit/s", 1.0)])
def test_rates_are_bits_or_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0", "-2MB", "3MB/h"])
def test_an_invalid_rate_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2**30, "1.07 GB"),
        (999_600, "1 MB"),
        (62e9, "62 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_sizes_are_shown_in_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text
