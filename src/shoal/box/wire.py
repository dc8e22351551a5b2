"""What passes between a box and who asked for it: frames of JSON, and plain Python values in JSON.

    frame = length (u32, little-endian), JSON in UTF-8
    value = null, true, "text", 1, 0.5, [..] as they are; {"t": [..]} tuple, {"d": [[key, value], ..]} dict,
            {"s": [..]} set, {"z": [..]} frozenset, {"i": "hex"} a long integer, {"b": "hex"} bytes, {"c": [re, im]}

Only these types cross: an object that equals everything arrives as nothing at all. Standard library only.
"""

import json
import os
import struct
from typing import Any

MAX_FRAME_BYTES = 4 << 20
MAX_DEPTH = 48
MAX_NODES = 100_000
_HEAD = struct.Struct("<I")
_SHORT = 1 << 53


class WireError(ValueError):
    """Bytes or values that do not cross."""


def pack_frame(message: Any) -> bytes:
    """A message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def read_size(head: bytes) -> int:
    """The length that a frame's first four bytes state."""
    (size,) = _HEAD.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size} bytes")
    return int(size)


def parse_body(body: bytes) -> Any:
    """The message of a frame."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("not JSON") from None


def send_frame(channel: int, message: Any) -> None:
    """Write a frame to a blocking descriptor."""
    view = memoryview(pack_frame(message))
    while view:
        view = view[os.write(channel, view) :]


def receive_frame(channel: int) -> Any:
    """Read a frame from a blocking descriptor; None at its end."""
    head = _read_exactly(channel, _HEAD.size)
    return None if head is None else parse_body(_read_exactly(channel, read_size(head)) or b"")


def _read_exactly(channel: int, size: int) -> bytes | None:
    pieces, left = [], size
    while left:
        piece = os.read(channel, left)
        if not piece:
            return None
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def encode_value(value: Any) -> Any:
    """A plain value as JSON; WireError for any other."""
    return _encode(value, MAX_DEPTH, [MAX_NODES])


def _encode(value: Any, depth: int, budget: list[int]) -> Any:
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        raise WireError("too much to send")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -_SHORT < value < _SHORT else {"i": format(value, "x")}
    if isinstance(value, float):
        return float(value)
    return _encode_more(value, depth - 1, budget)


def _encode_more(value: Any, depth: int, budget: list[int]) -> Any:
    match value:
        case list():
            return [_encode(part, depth, budget) for part in value]
        case tuple():
            return {"t": [_encode(part, depth, budget) for part in value]}
        case dict():
            return {"d": [[_encode(key, depth, budget), _encode(part, depth, budget)] for key, part in value.items()]}
        case set():
            return {"s": [_encode(part, depth, budget) for part in value]}
        case frozenset():
            return {"z": [_encode(part, depth, budget) for part in value]}
        case bytes() | bytearray():
            return {"b": value.hex()}
        case complex():
            return {"c": [value.real, value.imag]}
    raise WireError(f"a value of type {type(value).__name__[:40]}")


def decode_value(data: Any) -> Any:
    """The value that `encode_value` was given; for the inside of a box: its cost is not bounded by its size alone."""
    match data:
        case list():
            return [decode_value(part) for part in data]
        case {"t": list(parts)}:
            return tuple(decode_value(part) for part in parts)
        case {"d": list(pairs)}:
            return {decode_value(key): decode_value(part) for key, part in pairs}
        case {"s": list(parts)}:
            return {decode_value(part) for part in parts}
        case {"z": list(parts)}:
            return frozenset(decode_value(part) for part in parts)
        case {"i": str(digits)}:
            return int(digits, 16)
        case {"b": str(digits)}:
            return bytes.fromhex(digits)
        case {"c": [real, imag]}:
            return complex(real, imag)
        case dict():
            raise WireError("a value of no known kind")
    return data
