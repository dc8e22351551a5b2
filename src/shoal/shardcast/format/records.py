"""The lines of a manifest, as bytes and as objects.

    {"body":{...},"sig":"<128 hex>"}

A line has exactly one encoding: keys sorted, no spaces, ASCII, integers only. So the signed bytes can be cut out of a
line without parsing it, and nothing is parsed that the publisher did not sign.

Invariants:
- a signature covers the format, the head the line belongs to, and the body with its number `n`: no line can be moved to
  another position or another version;
- anything that is not exactly such a line raises `ManifestError`. All bounds are checked before anything is allocated
  from the numbers they bound;
- the lines of a version with 2^20 shards are 70 MB, and only a peer that reads the manifest needs them. So they stay in
  their file (`LineBuffer`), which begins with exactly these lines; a line is written there before it is appended.
"""

import errno
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.identity.keys import Key, verify_signature
from shoal.shardcast.errors import ManifestError
from shoal.shardcast.format.hashing import HASH_BYTES
from shoal.shardcast.format.layout import File, check_name, count_shards
from shoal.util.units import RUN

FORMAT = 1
"""Changing breaks: every peer of a different format version."""
MAX_LINE_BYTES = 1 << 18
MAX_FILES = 1 << 12
MAX_SHARDS = 1 << 20
MAX_TOTAL_BYTES = 1 << 44
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1 << 16, 1 << 26
MAX_NUMBER = (1 << 63) - 1
MAX_REASON_CHARS = 200

_CONTEXT = b"shoal-shardcast-1\n"
_LINE = re.compile(rb'\{"body":(\{[\x20-\x7e]*\}),"sig":"([0-9a-f]{128})"\}')
_REASON = re.compile(rf"[\x20-\x7e]{{1,{MAX_REASON_CHARS}}}")
_HEX = re.compile(r"[0-9a-f]{64}")
_HEX_RUN = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """The first line: which version this is and which files it has."""

    run: str
    version: int
    serial: int
    """grows with every publish of the run; of two heads of the same version the larger wins"""
    shard_size: int
    files: tuple[File, ...]
    parent: int | None
    """version that a delta record will build on; None if there will be no delta"""
    anchor: bool


@dataclass(frozen=True, slots=True)
class Hashes:
    """Hashes of shards `first`, `first` + 1, ... of the full blob."""

    first: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The delta blob: all its hashes, and the root of the blob it applies to."""

    size: int
    parent_root: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NoDelta:
    """There will be no delta, although the head has a parent."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line: the roots of both blobs."""

    root: bytes
    delta_root: bytes | None


Record = ManifestHead | Hashes | Delta | NoDelta | End
_KINDS = {ManifestHead: "head", Hashes: "hashes", Delta: "delta", NoDelta: "no_delta", End: "end"}


def sign_record(key: Key, digest: str, number: int, record: Record) -> bytes:
    """Sign line `number` of the manifest whose head has this digest (empty for the head itself)."""
    body = encode_body(number, record)
    signature = key.sign(_frame_body(digest, body))
    return b'{"body":' + body + b',"sig":"' + signature.hex().encode() + b'"}'


def open_line(line: bytes, publisher: str, digest: str) -> bytes:
    """The body of a line that the publisher signed for this head."""
    if len(line) > MAX_LINE_BYTES:
        raise ManifestError(f"line of {len(line)} bytes exceeds the maximum of {MAX_LINE_BYTES}")
    match = _LINE.fullmatch(line)
    if match is None:
        raise ManifestError("malformed manifest line")
    body = match[1]
    if not verify_signature(publisher, _frame_body(digest, body), bytes.fromhex(match[2].decode())):
        raise ManifestError("not signed by this publisher for this version")
    return body


def digest_head(body: bytes) -> str:
    """The name of a manifest: the hash of its head's body, in hex."""
    return blake3(body).hexdigest()


def encode_body(number: int, record: Record) -> bytes:
    """The canonical encoding of a record as line `number`."""
    values = {field.name: _encode_value(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, ManifestHead):
        values["format"] = FORMAT
    return _encode_json({"n": number, "kind": _KINDS[type(record)], **values})


def decode_body(body: bytes) -> tuple[int, Record]:
    """Number and record of a body in canonical encoding; ManifestError for any other bytes."""
    try:
        values = json.loads(body.decode("ascii"))
        canonical = _encode_json(values)
    except (ValueError, RecursionError):
        raise ManifestError("invalid JSON in the body") from None
    if canonical != body or type(values) is not dict:
        raise ManifestError("body is not in canonical form")
    number = _take_int(values, "n", 0, MAX_NUMBER)
    kind = values.pop("kind", None)
    record = _decode_record(kind, values)
    if values:
        raise ManifestError(f"{kind} record with {len(values)} unknown fields")
    return number, record


def _frame_body(digest: str, body: bytes) -> bytes:
    return _CONTEXT + digest.encode() + b"\n" + body


def _encode_json(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _encode_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, File):
        return {"name": value.name, "size": value.size}
    return [_encode_value(part) for part in value] if isinstance(value, tuple) else value


def _decode_head(values: dict[str, Any]) -> ManifestHead:
    if _take_int(values, "format", 0, MAX_NUMBER) != FORMAT:
        raise ManifestError(f"unsupported format, expected {FORMAT}")
    version = _take_int(values, "version", 0, MAX_NUMBER)
    shard_size = _take_int(values, "shard_size", MIN_SHARD_BYTES, MAX_SHARD_BYTES)
    head = ManifestHead(
        run=_take_match(values, "run", RUN),
        version=version,
        serial=_take_int(values, "serial", 0, MAX_NUMBER),
        shard_size=shard_size,
        files=_take_files(values),
        # Smaller than the version, so every chain of parents ends.
        parent=None if _take_null(values, "parent") else _take_int(values, "parent", 0, version - 1),
        anchor=_take_bool(values, "anchor"),
    )
    if sum(file.size for file in head.files) > MAX_TOTAL_BYTES:
        raise ManifestError(f"total size exceeds the maximum of {MAX_TOTAL_BYTES} bytes")
    if sum(count_shards(file.size, shard_size) for file in head.files) > MAX_SHARDS:
        raise ManifestError(f"more than the maximum of {MAX_SHARDS} shards")
    return head


def _decode_record(kind: object, values: dict[str, Any]) -> Record:
    match kind:
        case "head":
            return _decode_head(values)
        case "hashes":
            return Hashes(_take_int(values, "first", 0, MAX_SHARDS), _take_hashes(values))
        case "delta":
            size = _take_int(values, "size", 1, MAX_TOTAL_BYTES)
            return Delta(size, _take_hash(values, "parent_root"), _take_hashes(values))
        case "no_delta":
            return NoDelta(_take_match(values, "reason", _REASON))
        case "end":
            root = _take_hash(values, "root")
            return End(root, None if _take_null(values, "delta_root") else _take_hash(values, "delta_root"))
    raise ManifestError("unknown kind of record")


def _take_int(values: dict[str, Any], name: str, low: int, high: int) -> int:
    value = values.pop(name, None)
    if type(value) is not int or not low <= value <= high:  # isinstance would accept a bool
        raise ManifestError(f"{name} is not an integer from {low} to {high}")
    return value


def _take_null(values: dict[str, Any], name: str) -> bool:
    """Whether a field is present and null; if so, it is consumed."""
    is_null = values.get(name, 0) is None
    if is_null:
        del values[name]
    return is_null


def _take_bool(values: dict[str, Any], name: str) -> bool:
    value = values.pop(name, None)
    if type(value) is not bool:
        raise ManifestError(f"{name} is not a boolean")
    return value


def _take_match(values: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = values.pop(name, None)
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise ManifestError(f"{name} is not a string of the expected form")
    return value


def _take_hash(values: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(_take_match(values, name, _HEX))


def _take_hashes(values: dict[str, Any]) -> tuple[bytes, ...]:
    found = values.pop("hashes", None)
    if type(found) is not list or not found or not all(type(value) is str and len(value) == 64 for value in found):
        raise ManifestError("hashes is not a list of hashes")
    text = "".join(found)
    if _HEX_RUN.fullmatch(text) is None:
        raise ManifestError("hashes is not a list of hashes")
    raw = bytes.fromhex(text)
    return tuple(raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES))


def _take_files(values: dict[str, Any]) -> tuple[File, ...]:
    found = values.pop("files", None)
    if type(found) is not list or not 1 <= len(found) <= MAX_FILES:
        raise ManifestError(f"files is not a list of 1 to {MAX_FILES} files")
    files = tuple(_decode_file(value) for value in found)
    if len({file.name for file in files}) < len(files):
        raise ManifestError("duplicate file name")
    return files


def _decode_file(value: Any) -> File:
    if type(value) is not dict or value.keys() != {"name", "size"} or type(value["name"]) is not str:
        raise ManifestError("a file entry is not a name and a size")
    try:
        name = check_name(value["name"])
    except ValueError:
        raise ManifestError("invalid file name") from None
    return File(name, _take_int(value, "size", 0, MAX_TOTAL_BYTES))


class LineBuffer:
    """Lines without their newlines."""

    def __init__(self) -> None:
        self._ends = array("Q")
        self._first = b""
        self._held = bytearray()
        self._path: Path | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[bytes]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> bytes:
        if not 0 <= number < len(self):
            raise IndexError(f"line {number} out of range, there are {len(self)} lines")
        return self._read_bytes(self._find_start(number), self._ends[number] - 1) if number else self._first

    @property
    def num_bytes(self) -> int:
        """Bytes of all lines with their newlines: the offset of the next one."""
        return self._ends[-1] if self._ends else 0

    def append(self, line: bytes) -> None:
        """Append the next line, which must already be in the file if there is one."""
        if not self._ends:
            self._first = line
        if self._path is None:
            self._held += line + b"\n"
        self._ends.append(self.num_bytes + len(line) + 1)

    def keep_in(self, path: Path) -> None:
        """Read from this file from now on; it must contain all lines so far."""
        self._path = path
        self._held = bytearray()

    def read_batch(self, first: int, num_bytes: int) -> tuple[bytes, int]:
        """Lines from `first` on, about `num_bytes` but at least one line, and the number of the next line."""
        if first >= len(self):
            return b"", first
        start = self._find_start(first)
        following = max(first + 1, bisect_right(self._ends, start + num_bytes))
        return self._read_bytes(start, self._ends[following - 1]), following

    def _find_start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _read_bytes(self, start: int, end: int) -> bytes:
        if self._path is None:
            return bytes(self._held[start:end])
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
        if len(data) < end - start:
            raise OSError(errno.EIO, "file is shorter than what was written", os.fspath(self._path))
        return data
