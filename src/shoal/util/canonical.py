"""Canonical JSON: exactly one encoding for each value, so that a value can be hashed and signed.

Invariants:
- values are null, booleans, integers with |n| < 2**63, strings, lists, and objects with string keys; no floats;
- keys are sorted by code point, there is no whitespace between tokens, text is UTF-8 in normal form C, and only what
  JSON requires is escaped, in its short form if there is one;
- containers are nested at most 16 deep;
- `decode_canonical` returns a value whose encoding is exactly the bytes it was given, or raises `CanonicalError`. Time
  and memory are linear in the length, which is bounded before anything is read.

Changing breaks: every hash and signature in every ledger.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn
from unicodedata import is_normalized

MAX_DEPTH = 16
MAX_INTEGER = (1 << 63) - 1

_MAX_DIGITS = 19
# An unterminated string matches up to the end of the text; otherwise each quote in it would be tried as a beginning.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_NEUTRAL = bytes(set(range(256)) - set(b'[]{}"'))


class CanonicalError(ValueError):
    """A value without a canonical form, or bytes that are not the canonical form of any value."""


def encode_canonical(value: Any) -> bytes:
    """The canonical encoding of a value."""
    _check_value(value, MAX_DEPTH)
    return _ENCODER.encode(value).encode()


def decode_canonical(data: bytes, *, max_bytes: int) -> Any:
    """Decode bytes of at most `max_bytes`; they must be the canonical encoding of their value."""
    if len(data) > max_bytes:
        raise CanonicalError(f"{len(data)} bytes, more than the {max_bytes} allowed")
    _check_nesting(data)
    try:
        value = _DECODER.decode(data.decode())
    except UnicodeDecodeError:
        raise CanonicalError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise CanonicalError(f"not JSON ({error.msg} at character {error.pos})") from None
    # Covers whitespace, order, repeated keys, escapes and numbers, because each value has only one encoding.
    if encode_canonical(value) != data:
        raise CanonicalError("JSON, but not in its canonical form")
    return value


def _check_value(value: Any, depth: int) -> None:
    match value:
        case dict():
            _check_keys(value)
            _check_items(value.values(), depth)
        case list():
            _check_items(value, depth)
        case str():
            _check_text(value)
        case int():  # includes booleans
            if abs(value) > MAX_INTEGER:
                raise CanonicalError(f"an integer of {value.bit_length()} bits, more than the 63 allowed")
        case None:
            pass
        case _:
            raise CanonicalError(f"a value of type {type(value).__name__}, which has no canonical form")


def _check_items(items: Iterable[Any], depth: int) -> None:
    """Check the items of a container. Short strings and numbers, the most frequent items, are checked inline."""
    if depth == 0:
        raise _refuse_depth()
    for item in items:
        kind = type(item)
        if kind is str:
            if not item.isascii():
                _check_text(item)
        elif kind is not int or not -MAX_INTEGER <= item <= MAX_INTEGER:
            _check_value(item, depth - 1)


def _check_keys(value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise CanonicalError(f"a key of type {type(key).__name__}; keys are strings")
        if not key.isascii():
            _check_text(key)


def _check_text(text: str) -> None:
    if text.isascii():
        return
    if not is_normalized("NFC", text):
        raise CanonicalError("a string that is not in normal form C")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CanonicalError("a string with a lone surrogate") from None


def _check_nesting(data: bytes) -> None:
    """Reject deep nesting before parsing, because the parser recurses."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    if b"\\" not in data:
        # Every quote begins or ends a string. Adjacent pairs can be dropped: what is inside strings stays inside.
        data = data.translate(None, _NEUTRAL).replace(b'""', b"")
    depth = 0
    for token in _TOKEN.findall(data):
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise _refuse_depth()
        elif token in (b"]", b"}"):
            depth -= 1


def _refuse_depth() -> CanonicalError:
    return CanonicalError(f"nested more than {MAX_DEPTH} deep")


def _parse_int(text: str) -> int:
    if len(text.removeprefix("-")) > _MAX_DIGITS:
        raise CanonicalError(f"an integer of {len(text)} characters")
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise CanonicalError(f"{text[:40]}: a number that is not an integer")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_refuse_number, parse_constant=_refuse_number)
