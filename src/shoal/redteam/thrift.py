"""Thrift's compact protocol, as far as Parquet uses it: taken apart, changed, and put together again.

A struct is {number of the field: [type, value]}, a list is [type of its elements, values]. Nothing is checked: this is
for files of our own, and for making bad ones of them.
"""

from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
Struct = dict[int, list[Any]]

_SHORT_LIST = 15
_SHORT_STEP = 16


class Source:
    """Bytes that are read from a place on."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.place += count
        return self.data[self.place - count : self.place]

    def take_struct(self) -> Struct:
        """The struct that begins here."""
        fields: Struct = {}
        last = 0
        while head := self.take(1)[0]:
            last = last + (head >> 4) if head >> 4 else self._take_value(I16)
            fields[last] = [head & 15, self._take_value(head & 15)]
        return fields

    def _take_value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self.take(1)[0]
        if kind in (I16, I32, I64):
            raw = self._take_varint()
            return (raw >> 1) ^ -(raw & 1)
        if kind == DOUBLE:
            return self.take(8)
        if kind == BINARY:
            return self.take(self._take_varint())
        if kind in (LIST, SET):
            head = self.take(1)[0]
            count = head >> 4 if head >> 4 < _SHORT_LIST else self._take_varint()
            return [head & 15, [self._take_value(head & 15) for _ in range(count)]]
        assert kind == STRUCT, f"type {kind} is not needed"
        return self.take_struct()

    def _take_varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def put_varint(value: int) -> bytes:
    """A number in as many bytes as it needs."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_struct(fields: Struct) -> bytes:
    """The bytes of a struct."""
    out, last = [], 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - last
        out.append(bytes([step << 4 | kind]) if 0 < step < _SHORT_STEP else bytes([kind]) + _put_value(I16, number))
        out.append(_put_value(kind, value))
        last = number
    return b"".join(out) + b"\0"


def _put_value(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE):
        return b""
    if kind == BYTE:
        return bytes([value & 255])
    if kind in (I16, I32, I64):
        return put_varint(((value << 1) ^ (value >> 63)) & (2**64 - 1))
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return put_varint(len(value)) + bytes(value)
    if kind in (LIST, SET):
        inner, values = value
        return put_list(inner, len(values)) + b"".join(_put_value(inner, item) for item in values)
    return put_struct(value)


def put_list(inner: int, count: int) -> bytes:
    """What stands before the elements of a list."""
    if count < _SHORT_LIST:
        return bytes([count << 4 | inner])
    return bytes([_SHORT_LIST << 4 | inner]) + put_varint(count)
