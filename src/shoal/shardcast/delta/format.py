"""The format of a delta file. A reader trusts nothing in it.

    magic, format version, length of the header         12 + 4 + 4 bytes; all integers are little-endian
    header      canonical JSON: {"files": [{"name", "parent", "size", "spans": [[width, count, base], ...]}, ...],
                "folder": true | false}; parent is the size of the file of the same name in the parent, or null; base
                the byte in it at which the elements' parents begin, or null
    blocks      of every span of every file in order: form (1 byte), checksum of the base (8), length of the payload
                (4), payload

Where blocks begin and end follows from the spans (`list_blocks`). Nothing follows the last block.

Invariants:
- every number is checked before it is used for an allocation, an offset or a file;
- each content has exactly one header: a header that is not canonical is refused.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from shoal.shardcast.delta.codec import MAX_PAYLOAD_BYTES, WIDTHS, BlockEncoding, block_elements
from shoal.shardcast.delta.tensors import ElementSpan
from shoal.shardcast.errors import DeltaError
from shoal.shardcast.format.layout import check_name

MAGIC = b"shoal-delta\n"
FORMAT = 1
"""Changing breaks: reading deltas of others."""
MAX_HEADER_BYTES = 2 << 20
"""Space for about 100,000 spans; a file of tensors that all have one type and parents needs two."""
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 48
_START = struct.Struct("<12sII")
_BLOCK = struct.Struct("<BQI")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the new checkpoint and how it is cut."""

    name: str
    size: int
    parent: int | None
    """size of the parent's file of that name; None if no span needs one"""
    spans: tuple[ElementSpan, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a delta's result."""

    folder: bool
    files: tuple[FileEntry, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Block:
    """Part of a span: its place in the new file and that of its base in the parent."""

    offset: int
    width: int
    count: int
    base: int | None

    @property
    def size(self) -> int:
        return self.width * self.count


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block as stored in the file. Its payload is read when it is decoded, so queued blocks take no memory."""

    form: int
    checksum: int
    """checksum of the base; 0 if there is no base"""
    offset: int
    """offset of the payload in the file"""
    length: int


def list_blocks(spans: tuple[ElementSpan, ...]) -> Iterator[Block]:
    """The blocks of a file, in order."""
    offset = 0
    for span in spans:
        step = block_elements(span.width)
        for first in range(0, span.count, step):
            skipped = first * span.width
            base = None if span.base is None else span.base + skipped
            yield Block(offset + skipped, span.width, min(step, span.count - first), base)
        offset += span.size


def count_blocks(spans: tuple[ElementSpan, ...]) -> int:
    """Number of blocks that `list_blocks` returns."""
    return sum(-(-span.count // block_elements(span.width)) for span in spans)


def write_header(out: BinaryIO, header: Header) -> int:
    """Write the beginning of a delta; returns its length in bytes."""
    data = _encode_header(header)
    if len(data) > MAX_HEADER_BYTES or len(header.files) > MAX_FILES:
        raise DeltaError("the checkpoint has too many files or tensors for a delta")
    out.write(_START.pack(MAGIC, FORMAT, len(data)) + data)
    return _START.size + len(data)


def read_header(delta: BinaryIO) -> Header:
    """Read and check the header of a delta."""
    magic, version, length = _START.unpack(read_exactly(delta, _START.size))
    if magic != MAGIC:
        raise DeltaError("not a delta file")
    if version != FORMAT:
        raise DeltaError(f"unsupported delta format {version}, expected {FORMAT}")
    if length > MAX_HEADER_BYTES:
        raise DeltaError("the delta is damaged: its header is too long")
    data = read_exactly(delta, length)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"the delta is damaged: its header cannot be read ({error})") from error
    header = _decode_header(fields)
    if _encode_header(header) != data:
        raise DeltaError("the delta is damaged: its header is not canonical")
    return header


def pack_block(form: BlockEncoding, checksum: int, length: int) -> bytes:
    """The bytes before a payload."""
    return _BLOCK.pack(form, checksum, length)


def read_block(delta: BinaryIO) -> BlockRecord:
    """Read the next block, skipping its payload."""
    form, checksum, length = _BLOCK.unpack(read_exactly(delta, _BLOCK.size))
    if length > MAX_PAYLOAD_BYTES:
        raise DeltaError("the delta is damaged: a block is too long")
    end = delta.seek(length, os.SEEK_CUR)
    return BlockRecord(form, checksum, end - length, length)


def read_payload(descriptor: int, record: BlockRecord) -> bytes:
    """The payload of a block of an open delta; thread-safe."""
    payload = os.pread(descriptor, record.length, record.offset)
    if len(payload) != record.length:
        raise DeltaError("the delta ends too early")
    return payload


def read_exactly(delta: BinaryIO, size: int) -> bytes:
    """Read the next bytes of a delta."""
    data = delta.read(size)
    if len(data) != size:
        raise DeltaError("the delta ends too early")
    return data


def _encode_header(header: Header) -> bytes:
    files = [
        {
            "name": file.name,
            "parent": file.parent,
            "size": file.size,
            "spans": [[span.width, span.count, span.base] for span in file.spans],
        }
        for file in header.files
    ]
    text = json.dumps({"files": files, "folder": header.folder}, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _decode_header(fields: Any) -> Header:
    _check(isinstance(fields, dict) and isinstance(fields.get("files"), list), "its header is not an object with files")
    _check(isinstance(fields.get("folder"), bool), "its header does not say whether it makes a folder")
    _check(len(fields["files"]) <= MAX_FILES, "it has too many files")
    header = Header(fields["folder"], tuple(_decode_file(file) for file in fields["files"]))
    names = [file.name for file in header.files]
    _check(names == sorted(set(names)), "its files are not sorted by name, or a name occurs twice")
    _check(header.folder or len(names) == 1, "a checkpoint that is not a folder must have one file")
    return header


def _decode_file(fields: Any) -> FileEntry:
    _check(isinstance(fields, dict) and isinstance(fields.get("spans"), list), "a file is not an object with spans")
    size, parent = fields.get("size"), fields.get("parent")
    _check(_is_count(size) and (parent is None or _is_count(parent)), "a file has an impossible size")
    spans = tuple(_decode_span(span, parent) for span in fields["spans"])
    _check(sum(span.size for span in spans) == size, "the spans of a file do not add up to its size")
    try:
        return FileEntry(check_name(fields.get("name")), size, parent, spans)
    except ValueError as error:
        raise DeltaError(f"the delta is damaged: {error}") from error


def _decode_span(fields: Any, parent: int | None) -> ElementSpan:
    _check(isinstance(fields, list) and len(fields) == 3, "a span is not three numbers")
    width, count, base = fields
    _check(type(width) is int and width in WIDTHS and _is_count(count) and count > 0, "a span has impossible sizes")
    span = ElementSpan(width, count, base)
    if base is not None:
        fits = _is_count(base) and parent is not None and base + span.size <= parent
        _check(fits, "a span lies outside its parent")
    return span


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_FILE_BYTES


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise DeltaError(f"the delta is damaged: {fault}")
