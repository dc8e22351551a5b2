"""Refusals: they survive encoding and decoding, and nothing a server sends crashes its client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.api_error import ApiError


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(401, "clock", "your clock is late", server_time_ms=5),
        ApiError(429, "too_many", "wait", retry_after_s=0),
        ApiError(401, "signature", "no"),
    ],
)
def test_a_refusal_is_read_as_it_was_written(refusal: ApiError) -> None:
    read = ApiError.from_bytes(refusal.status, refusal.to_bytes())
    assert read is not None
    assert vars(read) == vars(refusal)


@given(st.binary(max_size=100) | st.sampled_from([b"{}", b'{"code":1,"text":"a"}', b"[]", b"<html>", b'{"code":"a"}']))
def test_other_answers_are_no_refusal(data: bytes) -> None:
    assert ApiError.from_bytes(401, data) is None


def test_invalid_times_are_left_out() -> None:
    for value in (b"-1", b'"5"', b"true", b"null"):
        read = ApiError.from_bytes(401, b'{"code":"clock","server_time_ms":' + value + b',"text":"t"}')
        assert read is not None
        assert read.server_time_ms is None


def test_an_endless_answer_is_not_read() -> None:
    assert ApiError.from_bytes(401, ApiError(401, "a", "b" * 5000).to_bytes()) is None
