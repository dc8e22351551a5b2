import json
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.util.canonical import MAX_DEPTH, MAX_INTEGER, CanonicalError, decode_canonical, encode_canonical

LIMIT = 1 << 16

integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
texts = st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: normalize("NFC", text))
values = st.recursive(
    st.none() | st.booleans() | integers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(values)
def test_every_value_comes_back_from_its_bytes(value: Any) -> None:
    data = encode_canonical(value)
    back = decode_canonical(data, max_bytes=LIMIT)
    assert back == value
    assert encode_canonical(back) == data


@given(values)
def test_the_bytes_are_json_to_any_parser(value: Any) -> None:
    assert json.loads(encode_canonical(value)) == value


@given(values, st.sampled_from([{"indent": 1}, {"separators": (", ", ":")}, {"separators": (",", ": ")}]))
def test_spaces_are_refused(value: Any, style: dict[str, Any]) -> None:
    data = json.dumps(value, sort_keys=True, ensure_ascii=False, **style).encode()
    if data != encode_canonical(value):
        with pytest.raises(CanonicalError):
            decode_canonical(data, max_bytes=LIMIT)


@given(st.dictionaries(texts, integers, min_size=2, max_size=5))
def test_keys_in_another_order_are_refused(value: dict[str, int]) -> None:
    turned = dict(sorted(value.items(), reverse=True))
    with pytest.raises(CanonicalError, match="canonical form"):
        decode_canonical(json.dumps(turned, ensure_ascii=False, separators=(",", ":")).encode(), max_bytes=LIMIT)


@given(values, st.integers(0, 200), st.integers(0, 255))
def test_any_other_bytes_are_another_value_or_refused(value: Any, place: int, byte: int) -> None:
    data = bytearray(encode_canonical(value))
    data[place % len(data)] = byte
    try:
        other = decode_canonical(bytes(data), max_bytes=LIMIT)
    except CanonicalError:
        return
    assert encode_canonical(other) == bytes(data)


@given(st.binary(max_size=60))
def test_noise_is_refused_or_canonical(data: bytes) -> None:
    try:
        value = decode_canonical(data, max_bytes=LIMIT)
    except CanonicalError:
        return
    assert encode_canonical(value) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"1\n",
        b"\xef\xbb\xbf1",
        b"01",
        b"-0",
        b"+1",
        b"1.0",
        b"1e3",
        b"1E3",
        b"0.5",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"True",
        b"'a'",
        b"9223372036854775808",
        b"-9223372036854775808",
        b"1" * 5000,
        b"[1,]",
        b"[,1]",
        b"[1 ,2]",
        b'{"a":1,}',
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1}',
        b'{"a" :1}',
        b"{1:2}",
        b'"\\u0061"',
        b'"\\/"',
        b'"\\u000a"',
        b'"\\u001F"',
        b'"\\u00e9"',
        b'"\\ud83d\\ude00"',
        b'"\\ud800"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\n"',
        b'"\x00"',
        b'"a',
        '"e\u0301"'.encode(),
        '{"e\u0301":1}'.encode(),
        b"[1]x",
        b"[1][1]",
        b"null null",
        b"// c\n1",
    ],
)
def test_what_is_not_the_one_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(CanonicalError):
        decode_canonical(data, max_bytes=LIMIT)


def test_the_spelling_is_the_shortest() -> None:
    value = {"b": [True, None, -1], "a": 'q"\\\n\x01\x7f/\u00e9', "\U0001f600": "", "\uffff": {}}
    expected = '{"a":"q\\"\\\\\\n\\u0001\x7f/\u00e9","b":[true,null,-1],"\uffff":{},"\U0001f600":""}'
    assert encode_canonical(value) == expected.encode()


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        float("nan"),
        b"x",
        (1, 2),
        {1: 2},
        {None: 1},
        {"a": {2.0}},
        1 << 63,
        -(1 << 63),
        "e\u0301",
        "\ud800",
        object(),
    ],
)
def test_a_value_without_a_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(CanonicalError):
        encode_canonical(value)


def test_the_largest_integers_are_taken() -> None:
    assert decode_canonical(b"[9223372036854775807,-9223372036854775807]", max_bytes=100) == [MAX_INTEGER, -MAX_INTEGER]


def test_nesting_ends_at_its_limit_both_ways() -> None:
    deepest = encode_canonical(nest(MAX_DEPTH))
    assert decode_canonical(deepest, max_bytes=100) == nest(MAX_DEPTH)
    with pytest.raises(CanonicalError, match="deep"):
        encode_canonical(nest(MAX_DEPTH + 1))
    with pytest.raises(CanonicalError, match="deep"):
        decode_canonical(b"[" + deepest + b"]", max_bytes=100)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CanonicalError, match="deep"):
        encode_canonical(value)


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b'{"a":' * 12_000, b'["' + b'\\"' * 30_000, b'"' * 60_001, b"]" * 60_000]
)
def test_hostile_nesting_and_quotes_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(CanonicalError):
        decode_canonical(data, max_bytes=LIMIT)


def test_a_megabyte_of_quotes_costs_no_more_than_its_length() -> None:
    """If the scan backtracked, each quote would be tried as the beginning of a string, for hours."""
    data = b"[]" * (MAX_DEPTH + 1) + b'"' + b'\\"' * 500_000
    with pytest.raises(CanonicalError):
        decode_canonical(data, max_bytes=1 << 21)


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    value = ["[[[[{{{{" * 10, '"[', {"]": "\\["}]
    assert decode_canonical(encode_canonical(value), max_bytes=LIMIT) == value


def test_too_long_is_refused_before_it_is_read() -> None:
    assert decode_canonical(b'"abc"', max_bytes=5) == "abc"
    with pytest.raises(CanonicalError, match="more than the 5 allowed"):
        decode_canonical(b"\xff" * 6, max_bytes=5)


@pytest.mark.parametrize(
    "value",
    [["[{"] * 30, {f"k{number}": '"' for number in range(30)}, [["", "]", "[", ""]] * 30, ["\\[", '\\"['] * 30],
)
def test_brackets_and_quotes_in_texts_are_no_nesting(value: object) -> None:
    data = encode_canonical(value)
    assert decode_canonical(data, max_bytes=len(data)) == value


@pytest.mark.parametrize("text", ["", "]", '"]', "\\]"])
def test_texts_hide_no_nesting(text: str) -> None:
    shown = json.dumps(text).encode()
    data = (b"[" + shown + b",") * 17 + shown + b"]" * 17
    with pytest.raises(CanonicalError, match="nested more than 16 deep"):
        decode_canonical(data, max_bytes=len(data))
