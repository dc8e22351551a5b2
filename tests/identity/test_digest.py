"""Digests of bodies: the published form, and bodies that differ from what was signed."""

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity.signatures import BodyChecker, format_digest, parse_digest
from shoal.net.api_error import ApiError

BODY = b'{"hello": "world"}'


def test_the_rfcs_body_has_the_rfcs_digest() -> None:
    field = format_digest(hashlib.sha256(BODY).digest())
    assert field == "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:"  # RFC 9530, appendix
    assert parse_digest(field) == hashlib.sha256(BODY).digest()


@pytest.mark.parametrize(
    "field",
    [
        "",
        "sha-256=::",
        "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPF=:",  # the same bytes, spelt with a stray bit
        "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE:",
        "SHA-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
        "sha-512=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
        "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:, sha-512=:AA==:",
        "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:\n",
    ],
)
def test_other_digests_are_refused(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_digest(field)
    assert caught.value.status == 400


@given(body=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_a_body_is_taken_in_any_pieces(body: bytes, cuts: list[int]) -> None:
    checker = BodyChecker(len(body), hashlib.sha256(body).digest())
    places = [0, *sorted(cuts), len(body)]
    for start, stop in pairwise(places):
        checker.feed(body[start:stop])
    checker.finish()


def test_a_body_fails_at_the_first_byte_too_many() -> None:
    checker = BodyChecker(len(BODY), hashlib.sha256(BODY).digest())
    checker.feed(BODY)
    with pytest.raises(ApiError, match="longer than the 18 bytes"):
        checker.feed(b"x")


def test_a_body_that_ends_early_is_refused() -> None:
    checker = BodyChecker(len(BODY), hashlib.sha256(BODY).digest())
    checker.feed(BODY[:-1])
    with pytest.raises(ApiError, match="after 17 of the 18 bytes"):
        checker.finish()


@given(index=st.integers(0, len(BODY) * 8 - 1))
def test_one_other_bit_is_refused(index: int) -> None:
    changed = bytearray(BODY)
    changed[index // 8] ^= 1 << index % 8
    checker = BodyChecker(len(BODY), hashlib.sha256(BODY).digest())
    checker.feed(bytes(changed))
    with pytest.raises(ApiError, match="does not match the signed digest"):
        checker.finish()
