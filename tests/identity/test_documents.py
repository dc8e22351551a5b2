"""Purpose tags: a signature is valid for its purpose and for no other."""

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.identity.documents import (
    DocumentError,
    Tag,
    open_claimed,
    open_document,
    sign_bytes,
    sign_document,
    verify_bytes,
)
from shoal.identity.keys import Key
from shoal.identity.signatures import read_head
from shoal.identity.signer import RequestSigner
from shoal.util.canonical import decode_canonical, encode_canonical

KEY, OTHER = Key.generate(), Key.generate()
texts = st.text(st.characters(max_codepoint=0x7E), max_size=20)
bodies = st.dictionaries(texts, texts | st.integers(-(2**53), 2**53) | st.lists(texts, max_size=3), max_size=4)
tags = st.sampled_from(list(Tag))


@given(tag=tags, body=bodies)
def test_a_document_is_opened_by_its_signers_key(tag: Tag, body: dict[str, Any]) -> None:
    data = sign_document(KEY, tag, body)
    assert open_document(KEY.public, tag, data) == body
    assert open_claimed(tag, data) == (KEY.public, body)
    with pytest.raises(DocumentError, match="another key"):
        open_document(OTHER.public, tag, data)


@settings(max_examples=30)
@given(body=bodies, made=tags)
def test_no_signature_holds_under_another_tag(body: dict[str, Any], made: Tag) -> None:
    data = encode_canonical(body)
    signature = sign_bytes(KEY, made, data)
    assert [tag for tag in Tag if verify_bytes(KEY.public, tag, data, signature)] == [made]
    document = decode_canonical(sign_document(KEY, made, body), max_bytes=10_000)
    for tag in set(Tag) - {made}:
        with pytest.raises(DocumentError):
            open_document(KEY.public, tag, encode_canonical(document))
        with pytest.raises(DocumentError, match="invalid signature"):
            open_document(KEY.public, tag, encode_canonical({**document, "tag": tag.value}))


@settings(max_examples=50)
@given(one=tags, other=tags, head=st.binary(max_size=30), rest=st.binary(max_size=30))
def test_bytes_cannot_move_between_tag_and_body(one: Tag, other: Tag, head: bytes, rest: bytes) -> None:
    # A body that a peer gets signed can never be the frame of another purpose.
    signature = sign_bytes(KEY, one, head + rest)
    for data in (rest, head, one.value.encode() + b"\x00" + head + rest):
        if (one, head + rest) != (other, data):
            assert not verify_bytes(KEY.public, other, data, signature)


def test_a_request_is_no_document_and_a_document_no_request() -> None:
    signer = RequestSigner(KEY, "run", OTHER.public)
    headers = [(name.encode(), value.encode()) for name, value in signer.sign_request("GET", "/v1/status")]
    head = read_head("GET", "/v1/status", headers, "run", OTHER.public)
    for tag in Tag:
        assert not verify_bytes(KEY.public, tag, head.base, head.signature)
        assert sign_bytes(KEY, tag, head.base) != head.signature
    assert head.base.startswith(b'"')


@given(tag=tags, place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_document_with_one_other_bit_is_refused(tag: Tag, place: int, bit: int) -> None:
    data = bytearray(sign_document(KEY, tag, {"run": "r", "n": 7}))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(DocumentError):
        open_document(KEY.public, tag, bytes(data))


@given(st.binary(max_size=200) | bodies.map(encode_canonical))
def test_nothing_else_is_a_document(data: bytes) -> None:
    with pytest.raises(DocumentError):
        open_claimed(Tag.LEASE, data)


@pytest.mark.parametrize(
    "change",
    [
        {"body": []},
        {"body": None},
        {"signer": 5},
        {"signer": KEY.public.upper()},
        {"signer": "zz"},
        {"signature": None},
        {"signature": ""},
        {"signature": "zz" * 64},
        {"extra": 1},
    ],
)
def test_a_document_with_another_field_is_refused(change: dict[str, Any]) -> None:
    document = decode_canonical(sign_document(KEY, Tag.LEASE, {"a": 1}), max_bytes=10_000)
    with pytest.raises(DocumentError):
        open_claimed(Tag.LEASE, encode_canonical({**document, **change}))


def test_a_document_has_one_spelling() -> None:
    data = sign_document(KEY, Tag.LEASE, {"a": 1})
    document = decode_canonical(data, max_bytes=10_000)
    loud = encode_canonical({**document, "signature": document["signature"].upper()})
    assert hashlib.sha256(loud).digest() != hashlib.sha256(data).digest()
    for other in (loud, data + b"\n", data.replace(b":1", b": 1")):
        with pytest.raises(DocumentError):
            open_claimed(Tag.LEASE, other)


def test_a_document_too_long_is_not_read() -> None:
    data = sign_document(KEY, Tag.LEASE, {"a": "b" * 1000})
    assert open_document(KEY.public, Tag.LEASE, data, max_bytes=len(data))["a"] == "b" * 1000
    with pytest.raises(DocumentError):
        open_document(KEY.public, Tag.LEASE, data, max_bytes=len(data) - 1)


def test_tags_stay_what_they_are() -> None:
    # Golden: a changed tag or frame breaks every signature made before.
    seed = Key.generate()
    assert seed.sign(b"shoal-document-1\x00shoal-lease-1\x00{}") == sign_bytes(seed, Tag.LEASE, b"{}")
    assert len({tag.value for tag in Tag}) == len(Tag)
    assert all(tag.value.isascii() and "\x00" not in tag.value for tag in Tag)
