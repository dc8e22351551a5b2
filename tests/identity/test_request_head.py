"""Heads of requests: what must be signed, and which heads are refused."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.identity.keys import Key
from shoal.identity.signatures import RequestHead, read_any_claim, read_claim, read_head
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError

KEY, SERVER = Key.generate(), Key.generate()
BODY = b"some body"
Raw = list[tuple[bytes, bytes]]


def sign(method: str = "POST", target: str = "/v1/leases?n=2", body: bytes = BODY) -> Raw:
    signer = RequestSigner(KEY, "run-1", SERVER.public)
    return [(name.encode(), value.encode()) for name, value in signer.sign_request(method, target, body)]


def read(headers: Raw, method: str = "POST", target: str = "/v1/leases?n=2") -> RequestHead:
    return read_head(method, target, headers, "run-1", SERVER.public)


def replace(headers: Raw, name: str, pattern: str, text: str) -> Raw:
    """Change one header's value by a pattern that must be there."""
    changed = [
        (key, re.sub(pattern.encode(), text.encode(), value) if key.decode().lower() == name else value)
        for key, value in headers
    ]
    assert changed != headers
    return changed


def refuse(headers: Raw, status: int = 400, method: str = "POST", target: str = "/v1/leases?n=2") -> str:
    with pytest.raises(ApiError) as caught:
        read(headers, method, target)
    assert caught.value.status == status
    return caught.value.text


def test_a_head_says_what_was_signed() -> None:
    head = read(sign())
    assert (head.node, head.length, head.work) == (KEY.public, len(BODY), "")
    lines = head.base.decode().split("\n")
    assert [line.split(":")[0] for line in lines] == [
        '"@method"',
        '"@path"',
        '"@query"',
        '"shoal-run"',
        '"shoal-audience"',
        '"content-digest"',
        '"content-length"',
        '"@signature-params"',
    ]
    assert lines[:5] == [
        '"@method": POST',
        '"@path": /v1/leases',
        '"@query": ?n=2',
        '"shoal-run": run-1',
        f'"shoal-audience": {SERVER.public}',
    ]


def test_a_request_without_a_body_needs_no_length() -> None:
    headers = sign("GET", "/v1/status", b"")
    assert not {b"Content-Length", b"Content-Digest"} & {name for name, _ in headers}
    for each in (headers, [*headers, (b"content-length", b"0")]):
        assert read(each, "GET", "/v1/status").length == 0
    text = refuse([*headers, (b"content-length", b"5")], method="GET", target="/v1/status")
    assert "body that its signature does not cover" in text


def test_order_is_free_and_both_ways_of_reading_agree() -> None:
    field = dict(sign())[b"Signature-Input"].decode()
    assert read_any_claim(field) == read_claim(field)
    components, parameters = re.fullmatch(r"shoal=\((.*)\);(.*)", field).groups()  # type: ignore[union-attr]
    turned = " ".join(reversed(components.split(" ")))
    other = f"shoal=({turned});" + ";".join(reversed(parameters.split(";")))
    claim, turned_claim = read_claim(field), read_claim(other)
    assert turned_claim.components == claim.components[::-1]
    assert turned_claim[3:] == claim[3:]


@settings(max_examples=200)
@given(data=st.data())
def test_the_short_way_of_reading_takes_nothing_that_the_general_one_refuses(data: st.DataObject) -> None:
    field = dict(sign())[b"Signature-Input"].decode()
    place = data.draw(st.integers(0, len(field) - 1))
    changed = field[:place] + data.draw(st.sampled_from('a0"; ()=-@\\')) + field[place + data.draw(st.integers(0, 1)) :]
    try:
        general = read_any_claim(changed)
    except ApiError:
        with pytest.raises(ApiError):
            read_claim(changed)
        return
    assert read_claim(changed) == general


@pytest.mark.parametrize(
    "name", ["signature-input", "signature", "shoal-run", "shoal-audience", "content-digest", "content-length"]
)
def test_a_header_is_there_once(name: str) -> None:
    headers = sign()
    others = [(key, value) for key, value in headers if key.decode().lower() != name]
    same = [(key, value) for key, value in headers if key.decode().lower() == name]
    assert "duplicate" in refuse(headers + same)
    refuse(others, 400 if name.startswith("content") else 401)


def test_a_request_for_another_run_or_audience_is_refused_with_the_reason() -> None:
    assert "this is run run-1" in refuse(replace(sign(), "shoal-run", "run-1", "run-2"), 421)
    text = refuse(replace(sign(), "shoal-audience", SERVER.public, KEY.public), 421)
    assert SERVER.public in text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('"@query" ', ""),
        (' "content-length"', ""),
        ('"@query"', '"@query" "date"'),
        (';alg="ed25519"', ""),
        (";created=[0-9]+", ""),
        ("ed25519", "hmac-sha256"),
        ("shoal-request-1", "shoal-lease-1"),
        (';tag="', ';expires=5;tag="'),
        ('nonce="..', 'nonce="'),
        ('nonce="..', 'nonce="AB'),
        ('keyid="..', 'keyid="'),
        ('keyid="..', 'keyid="AB'),
        ("^shoal=", "other="),
    ],
)
def test_another_signature_input_is_refused(pattern: str, text: str) -> None:
    refuse(replace(sign(), "signature-input", pattern, text))


@pytest.mark.parametrize(
    "target",
    ["", "v1", "/a?", "/a b", "/a#b", "/\u00e9", "/a\n", "//" + "a" * 1100, "http://x/a", "*", '/a"', "/a?b\\"],
)
def test_a_target_that_cannot_be_signed_is_refused(target: str) -> None:
    refuse(sign(), target=target)


@pytest.mark.parametrize("method", ["", "get", "CONNECT", "POST ", "P\nT"])
def test_other_methods_are_refused(method: str) -> None:
    refuse(sign(), method=method)


@pytest.mark.parametrize("length", ["-1", "+9", "09", "9.0", " ", "0x9", "1e1", "9" * 16])
def test_a_length_has_one_spelling(length: str) -> None:
    refuse(replace(sign(), "content-length", "^9$", length))


def test_chunks_and_floods_of_headers_are_refused() -> None:
    refuse([*sign(), (b"transfer-encoding", b"chunked")], 411)
    refuse([*sign(), *[(b"x", b"y")] * 64], 431)
    refuse([*sign(), (b"shoal-work", b"1" * 1025)], 431)
    refuse([*sign(), (b"shoal-work", b"\xff")])


def test_headers_that_do_not_matter_may_be_anything() -> None:
    assert read([*sign(), (b"cookie", b"\xff" * 5000), (b"cookie", b"")]).node == KEY.public


names = st.sampled_from(
    [b"signature-input", b"signature", b"shoal-run", b"shoal-audience", b"content-digest", b"content-length"]
)


@settings(max_examples=300)
@given(
    headers=st.lists(st.tuples(names | st.binary(max_size=10), st.binary(max_size=60)), max_size=8),
    signed=st.booleans(),
    method=st.sampled_from(["GET", "POST"]) | st.text(max_size=5),
    target=st.just("/a") | st.text(max_size=20),
)
def test_no_head_raises_anything_else(headers: Raw, signed: bool, method: str, target: str) -> None:
    known = {key.lower() for key, _ in headers}
    whole = headers + [(key, value) for key, value in sign() if signed and key.lower() not in known]
    try:
        head = read(whole, method, target)
    except ApiError:
        return
    assert signed
    assert head.node == KEY.public
