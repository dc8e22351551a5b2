"""Signing requests: what goes out, and one correction of the clock."""

import hashlib

import pytest

from shoal.errors import ConfigError
from shoal.identity.keys import Key, verify_signature
from shoal.identity.signatures import RequestHead, format_digest, read_head
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError
from shoal.util.clock import read_clock

KEY, SERVER = Key.generate(), Key.generate()
NOW_MS = 1_800_000_000_123


def make_signer() -> RequestSigner:
    return RequestSigner(KEY, "run-1", SERVER.public, clock_ms=lambda: NOW_MS)


def read(headers: list[tuple[str, str]], method: str = "POST", target: str = "/v1/a") -> RequestHead:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return read_head(method, target, raw, "run-1", SERVER.public)


def test_a_signed_request_verifies() -> None:
    head = read(make_signer().sign_request("POST", "/v1/a", b"body"))
    assert verify_signature(KEY.public, head.base, head.signature)
    assert head.created_s == NOW_MS // 1000
    assert (head.length, head.digest) == (4, hashlib.sha256(b"body").digest())


def test_a_streamed_body_is_signed_by_length_and_digest() -> None:
    digest = hashlib.sha256(b"body").digest()
    headers = make_signer().sign_stream("PUT", "/v1/a", 4, digest)
    assert dict(headers)["Content-Length"] == "4"
    assert dict(headers)["Content-Digest"] == format_digest(digest)
    head = read(headers, "PUT")
    assert verify_signature(KEY.public, head.base, head.signature)


def test_every_request_has_its_own_nonce() -> None:
    signer = make_signer()
    assert len({read(signer.sign_request("POST", "/v1/a")).nonce for _ in range(50)}) == 50


def test_the_clock_is_corrected_once_until_a_request_goes_through() -> None:
    signer = make_signer()
    refusal = ApiError(401, "clock", "late", server_time_ms=NOW_MS + 300_000)
    assert signer.correct_clock(refusal)
    assert read(signer.sign_request("POST", "/v1/a")).created_s == NOW_MS // 1000 + 300
    further = ApiError(401, "clock", "late", server_time_ms=NOW_MS + 10**9)
    assert not signer.correct_clock(further)
    assert signer.offset_ms == 300_000
    signer.note_success()
    assert signer.correct_clock(further)
    assert signer.offset_ms == 10**9


def test_a_refusal_without_a_time_corrects_nothing() -> None:
    signer = make_signer()
    assert not signer.correct_clock(ApiError(401, "signature", "no"))
    assert signer.offset_ms == 0
    assert signer.correct_clock(ApiError(401, "clock", "late", server_time_ms=NOW_MS + 5))


def test_a_wrong_run_or_audience_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="run"):
        RequestSigner(KEY, "Run 1", SERVER.public)
    with pytest.raises(ConfigError):
        RequestSigner(KEY, "run-1", "coordinator.example.org")


def test_a_target_with_a_line_break_is_not_signed() -> None:
    with pytest.raises(ApiError):
        make_signer().sign_request("GET", "/a\n/b")


def test_the_clock_counts_milliseconds_since_1970() -> None:
    assert 1_700_000_000_000 < read_clock() < 10**13
