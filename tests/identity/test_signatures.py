"""Signatures of requests: the examples of RFC 9421, one spelling for each, and no way to crash the parser."""

import hashlib
import hmac
from base64 import b64decode, urlsafe_b64decode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.identity.keys import Key, verify_signature
from shoal.identity.signatures import (
    build_base,
    derive_components,
    format_input,
    format_signature,
    parse_input,
    parse_signature,
)
from shoal.net.api_error import ApiError

# RFC 9421, appendix B: the key test-key-ed25519 (B.1.4), the shared secret (B.1.5) and the message test-request (B.2)
SEED = urlsafe_b64decode("n4Ni-HpISpVObnQMW0wOhCKROaIKqKtW_2ZYb2p9KcU=")
PUBLIC = urlsafe_b64decode("JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs=").hex()
SECRET = b64decode("uzvJfB4u3N0Jy4T7NZ75MDVcr8zSTInedJtkgcu46YW4XByzNJjxBdtjUkdJPBtbmHhIDi6pcl8jsasjlTMtDQ==")
DIGEST = "sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7BNNyealdVLvRwEmTHWXvJwew==:"
REQUEST = {
    **derive_components("POST", "/foo?param=Value&Pet=dog"),
    "@authority": "example.com",
    "date": "Tue, 20 Apr 2021 02:07:55 GMT",
    "content-type": "application/json",
    "content-digest": DIGEST,
    "content-length": "18",
}
B26_INPUT = (
    'sig-b26=("date" "@method" "@path" "@authority" "content-type" "content-length")'
    ';created=1618884473;keyid="test-key-ed25519"'
)
B26_SIGNATURE = "sig-b26=:wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw==:"
B26_BASE = """\
"date": Tue, 20 Apr 2021 02:07:55 GMT
"@method": POST
"@path": /foo
"@authority": example.com
"content-type": application/json
"content-length": 18
"@signature-params": ("date" "@method" "@path" "@authority" "content-type" "content-length")\
;created=1618884473;keyid="test-key-ed25519"\
"""

names = st.from_regex(r"\A@?[a-z0-9][a-z0-9-]{0,12}\Z")
printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
integers = st.integers(-(10**15) + 1, 10**15 - 1)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "created": integers,
        "expires": integers,
        "nonce": printable,
        "alg": printable,
        "keyid": printable,
        "tag": printable,
    },
)


def test_the_rfcs_ed25519_example_is_signed_and_verified_as_printed() -> None:
    given_input = parse_input(B26_INPUT)
    base = build_base(given_input.components, REQUEST, given_input.text)
    assert base.decode() == B26_BASE
    key = Key(Ed25519PrivateKey.from_private_bytes(SEED))
    assert key.public == PUBLIC
    label, signature = parse_signature(B26_SIGNATURE)
    assert label == given_input.label == "sig-b26"
    assert verify_signature(PUBLIC, base, signature)
    assert format_signature("sig-b26", key.sign(base)) == B26_SIGNATURE


def test_the_rfcs_hmac_example_has_our_base() -> None:
    text = format_input(("date", "@authority", "content-type"), {"created": 1618884473, "keyid": "test-shared-secret"})
    base = build_base(("date", "@authority", "content-type"), REQUEST, text)
    expected = b64decode("pxcQw6G3AjtMBQjwo8XzkZf/bws5LelbaMk5rGIGtE8=")  # B.2.5
    assert hmac.digest(SECRET, base, hashlib.sha256) == expected


def test_the_rfcs_full_coverage_example_has_our_base() -> None:
    text = (
        '("date" "@method" "@path" "@query" "@authority" "content-type" "content-digest" "content-length")'
        ';created=1618884473;keyid="test-key-rsa-pss"'
    )
    given_input = parse_input(f"sig-b23={text}")
    lines = build_base(given_input.components, REQUEST, given_input.text).decode().split("\n")
    assert lines == [
        '"date": Tue, 20 Apr 2021 02:07:55 GMT',
        '"@method": POST',
        '"@path": /foo',
        '"@query": ?param=Value&Pet=dog',
        '"@authority": example.com',
        '"content-type": application/json',
        f'"content-digest": {DIGEST}',
        '"content-length": 18',
        f'"@signature-params": {text}',
    ]


def test_a_signature_over_nothing_has_one_line() -> None:
    field = 'sig-b21=();created=1618884473;keyid="test-key-rsa-pss";nonce="b3k2pp5k7z-50gnwp.yemd"'
    given_input = parse_input(field)
    assert given_input.components == ()
    assert build_base((), {}, given_input.text) == f'"@signature-params": {field[8:]}'.encode()


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/path?param=value&foo=bar&baz=bat%2Dman", "/path", "?param=value&foo=bar&baz=bat%2Dman"),
        ("/path?queryString", "/path", "?queryString"),
        ("/path", "/path", "?"),
        ("", "/", "?"),
        ("/a/../b?x=?y", "/a/../b", "?x=?y"),
    ],
)
def test_path_and_query_are_as_the_rfc_shows_them(target: str, path: str, query: str) -> None:
    assert derive_components("GET", target) == {"@method": "GET", "@path": path, "@query": query}


@given(components=st.lists(names, unique=True, max_size=6), values=parameters)
def test_what_is_written_is_read_back(components: list[str], values: dict[str, int | str]) -> None:
    text = format_input(components, values)
    given_input = parse_input(f"sig1={text}")
    assert given_input == ("sig1", tuple(components), values, text)
    assert list(given_input.parameters) == list(values)


@pytest.mark.parametrize(
    "field",
    [
        "",
        "sig1",
        'sig1=("a")x',
        'sig1=("a"  "b")',
        'sig1=( "a")',
        'sig1=("a") ;created=1',
        'sig1=("a"); created=1',
        'sig1=("a");created=01',
        'sig1=("a");created=-0',
        'sig1=("a");created=1.0',
        'sig1=("a");created=1234567890123456',
        'sig1=("a");created="1"',
        'sig1=("a");nonce=1',
        'sig1=("a");nonce',
        'sig1=("a");nonce=abc',
        'sig1=("a");nonce="a\\b"',
        'sig1=("a");nonce="\u00e9"',
        'sig1=("a");nonce="a\nb"',
        'sig1=("a");created=1;created=1',
        'sig1=("a");other=1',
        'sig1=("a" "a")',
        'sig1=("A")',
        'sig1=("a";sf)',
        'sig1=("@query-param";name="x")',
        'sig1=("a"),sig2=("b")',
        'Sig1=("a")',
        'sig1=("a");created=1\n',
        f'{"s" * 33}=("a")',
        'sig1=("a");nonce="' + "n" * 1024 + '"',
    ],
)
def test_other_spellings_are_refused(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_input(field)
    assert (caught.value.status, caught.value.code) == (400, "malformed")


@pytest.mark.parametrize(
    "field",
    [
        "",
        "sig1=::",
        f"sig1=:{'A' * 86}==",
        f"sig1=:{'A' * 86}:",
        f"sig1=:{'A' * 85}B==:",
        f"sig1=:{'A' * 85}-==:",
        f"sig1=:{'A' * 82}==:",
        f"sig1=:{'A' * 86}==:;x=1",
        f"sig1=:{'A' * 86}==:, sig2=:{'A' * 86}==:",
    ],
)
def test_a_signature_has_64_bytes_and_one_spelling(field: str) -> None:
    assert parse_signature(f"sig1=:{'A' * 86}==:") == ("sig1", bytes(64))
    with pytest.raises(ApiError):
        parse_signature(field)


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text('sig1=()"@a-;created0 \\:,A', max_size=60).map(lambda text: "s=(" + text))
def test_whatever_is_parsed_was_in_its_one_spelling(field: str) -> None:
    try:
        given_input = parse_input(field)
    except ApiError:
        return
    assert f"{given_input.label}={format_input(given_input.components, given_input.parameters)}" == field


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\u00e9", " a", "a ", "a\x00", "a\x7f", "\t"])
def test_a_value_cannot_break_out_of_its_line(value: str) -> None:
    with pytest.raises(ApiError):
        build_base(("a",), {"a": value}, '("a")')
    assert build_base(("a",), {"a": "x y"}, '("a")') == b'"a": x y\n"@signature-params": ("a")'


def test_a_component_that_is_not_there_is_refused() -> None:
    with pytest.raises(ApiError):
        build_base(("a", "b"), {"a": "1"}, '("a" "b")')
