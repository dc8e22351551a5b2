"""Messages between a job and its caller: frames of JSON, and plain Python values in JSON. Standard library only.

    frame = length (u32, little-endian), JSON in UTF-8; raw bytes may follow if the frame announces them
    value = null, true, "text", 1, 0.5, [..] as they are; {"t": [..]} tuple, {"d": [[key, value], ..]} dict,
            {"s": [..]} set, {"z": [..]} frozenset, {"i": "hex"} a long integer, {"b": "hex"} bytes, {"c": [re, im]}

Only these types are sent. In particular, an object whose `__eq__` always returns True cannot be.
"""

import json
import os
import struct
from typing import Any

MAX_FRAME_BYTES = 4 << 20
MAX_DEPTH = 48
MAX_NODES = 100_000
MAX_SENTENCE_CHARS = 300
_HEAD = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
_SHORT = 1 << 53


class ChannelError(ValueError):
    """Bytes or values that cannot be sent or parsed."""


def pack_frame(message: Any) -> bytes:
    """Encode a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def read_size(head: bytes | bytearray) -> int:
    """Parse the length of a frame from its first four bytes."""
    (size,) = _HEAD.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {size} bytes")
    return int(size)


def parse_body(body: bytes | bytearray) -> Any:
    """Parse the message of a frame."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ChannelError("not JSON") from None


def send_frame(channel: int, message: Any) -> None:
    """Write a frame to a blocking descriptor."""
    send_bytes(channel, pack_frame(message))


def send_bytes(channel: int, data: bytes) -> None:
    """Write all bytes to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]


def receive_frame(channel: int, head: bytes = b"") -> Any:
    """Read a frame from a blocking descriptor; None at its end. `head`: bytes of it that were read before."""
    head = _read_until(channel, head, HEAD_BYTES)
    return parse_body(_read_until(channel, b"", read_size(head))) if head else None


def _read_until(channel: int, data: bytes, size: int) -> bytes:
    """Read until there are `size` bytes in total; empty if the channel ends before."""
    pieces, left = [data], size - len(data)
    while left:
        piece = os.read(channel, left)
        if not piece:
            return b""
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def clean_sentence(text: str) -> str:
    """Reduce a text to printable ASCII of bounded length: parts of it may be untrusted."""
    shown = text if text.isascii() and text.isprintable() else ascii(text[: MAX_SENTENCE_CHARS + 1])[1:-1]
    return shown if len(shown) <= MAX_SENTENCE_CHARS else shown[:MAX_SENTENCE_CHARS] + "..."


def encode_value(value: Any) -> Any:
    """Encode a plain value as JSON; ChannelError for any other value."""
    return _encode(value, MAX_DEPTH, [MAX_NODES])


def _encode(value: Any, depth: int, budget: list[int]) -> Any:
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        raise ChannelError("too much to send")
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
    raise ChannelError(f"a value of type {type(value).__name__[:40]}")


def decode_value(data: Any) -> Any:
    """Decode what `encode_value` returned. Only for use inside a job: its cost is not bounded by its size alone."""
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
            raise ChannelError("a value of no known kind")
    return data
