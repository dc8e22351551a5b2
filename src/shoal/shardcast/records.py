"""The lines of a manifest, as bytes and as objects.

    {"body":{...},"sig":"<128 hex>"}

The one form of a line: keys sorted, no spaces, ASCII, integers only. So the signed bytes can be cut out of a line
without parsing it, and nothing is parsed that the publisher did not sign. A signature covers the format, the head the
line belongs to, and the body with its number `n`: no line can be moved to another place or another version.

What is not exactly such a line raises `ManifestError`, whatever it is. All bounds are checked before anything is
allocated from the numbers they bound.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from shoal.keys import Key, verify_signature
from shoal.runname import RUN
from shoal.shardcast.errors import ManifestError
from shoal.shardcast.hashing import HASH_BYTES
from shoal.shardcast.layout import File, count_shards
from shoal.shardcast.names import check_name

FORMAT = 1
"""Changing breaks: every peer of another version."""
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
class Head:
    """The first line: which version this is and which files it has."""

    run: str
    version: int
    serial: int
    """grows with every publish of the run; of two heads with one version the larger wins"""
    shard_size: int
    files: tuple[File, ...]
    parent: int | None
    """version that a delta record will build on; None if there will be none"""
    anchor: bool


@dataclass(frozen=True, slots=True)
class Hashes:
    """Hashes of shards `first`, `first` + 1, ... of the full blob."""

    first: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The delta blob: all its hashes, and the root of what it must be applied to."""

    size: int
    parent_root: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NoDelta:
    """There will be no delta, though the head has a parent."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line: the roots of both blobs."""

    root: bytes
    delta_root: bytes | None


Record = Head | Hashes | Delta | NoDelta | End


def strip_newline(line: bytes) -> bytes:
    """A line without the one newline it may end with."""
    return line[:-1] if line.endswith(b"\n") else line


def sign_record(key: Key, digest: str, number: int, record: Record) -> bytes:
    """Line `number` of the manifest whose head has this digest (empty for the head itself)."""
    body = encode_body(number, record)
    signature = key.sign(_frame_body(digest, body))
    return b'{"body":' + body + b',"sig":"' + signature.hex().encode() + b'"}'


def open_line(line: bytes, publisher: str, digest: str) -> bytes:
    """The body of a line that the publisher signed for this head."""
    if len(line) > MAX_LINE_BYTES:
        raise ManifestError(f"a line of {len(line)} bytes, more than the {MAX_LINE_BYTES} allowed")
    match = _LINE.fullmatch(line)
    if match is None:
        raise ManifestError("not the form of a manifest line")
    body = match[1]
    if not verify_signature(publisher, _frame_body(digest, body), bytes.fromhex(match[2].decode())):
        raise ManifestError("not signed by this publisher for this version")
    return body


def digest_head(body: bytes) -> str:
    """The name of a manifest: the hash of its head's body, in hex."""
    return blake3(body).hexdigest()


def encode_body(number: int, record: Record) -> bytes:
    """The one form of a record as line `number`."""
    return _encode_json({"n": number, **_RECORD_FIELDS[type(record)](record)})


def decode_body(body: bytes) -> tuple[int, Record]:
    """Number and record of a body in its one form; ManifestError for any other bytes."""
    try:
        fields = json.loads(body.decode("ascii"))
        canonical = _encode_json(fields)
    except (ValueError, RecursionError):
        raise ManifestError("a body that is no JSON we accept") from None
    if canonical != body or type(fields) is not dict:
        raise ManifestError("a body that is not in its one form")
    number = _take_int(fields, "n", 0, MAX_NUMBER)
    kind = fields.pop("kind", None)
    decode = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise ManifestError("a record of an unknown kind")
    record = decode(fields)
    if fields:
        raise ManifestError(f"a {kind} record with {len(fields)} fields too many")
    return number, record


def _frame_body(digest: str, body: bytes) -> bytes:
    return _CONTEXT + digest.encode() + b"\n" + body


def _encode_json(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _hex_list(hashes: tuple[bytes, ...]) -> list[str]:
    return [part.hex() for part in hashes]


def _head_fields(record: Head) -> dict[str, Any]:
    return {
        "kind": "head",
        "format": FORMAT,
        "run": record.run,
        "version": record.version,
        "serial": record.serial,
        "shard_size": record.shard_size,
        "files": [{"name": file.name, "size": file.size} for file in record.files],
        "parent": record.parent,
        "anchor": record.anchor,
    }


def _hashes_fields(record: Hashes) -> dict[str, Any]:
    return {"kind": "hashes", "first": record.first, "hashes": _hex_list(record.hashes)}


def _delta_fields(record: Delta) -> dict[str, Any]:
    return {
        "kind": "delta",
        "size": record.size,
        "parent_root": record.parent_root.hex(),
        "hashes": _hex_list(record.hashes),
    }


def _no_delta_fields(record: NoDelta) -> dict[str, Any]:
    return {"kind": "no_delta", "reason": record.reason}


def _end_fields(record: End) -> dict[str, Any]:
    delta_root = None if record.delta_root is None else record.delta_root.hex()
    return {"kind": "end", "root": record.root.hex(), "delta_root": delta_root}


_RECORD_FIELDS: dict[type, Any] = {
    Head: _head_fields,
    Hashes: _hashes_fields,
    Delta: _delta_fields,
    NoDelta: _no_delta_fields,
    End: _end_fields,
}


def _decode_head(fields: dict[str, Any]) -> Head:
    if _take_int(fields, "format", 0, MAX_NUMBER) != FORMAT:
        raise ManifestError(f"a format other than {FORMAT}, which is all this version reads")
    version = _take_int(fields, "version", 0, MAX_NUMBER)
    shard_size = _take_int(fields, "shard_size", MIN_SHARD_BYTES, MAX_SHARD_BYTES)
    head = Head(
        run=_take_match(fields, "run", RUN),
        version=version,
        serial=_take_int(fields, "serial", 0, MAX_NUMBER),
        shard_size=shard_size,
        files=_take_files(fields),
        # Smaller than the version, so every chain of parents ends.
        parent=_take_int(fields, "parent", 0, version - 1) if fields.get("parent", 0) is not None else None,
        anchor=_take_bool(fields, "anchor"),
    )
    if head.parent is None:
        fields.pop("parent")
    if sum(file.size for file in head.files) > MAX_TOTAL_BYTES:
        raise ManifestError(f"more than the {MAX_TOTAL_BYTES} bytes allowed")
    if sum(count_shards(file.size, shard_size) for file in head.files) > MAX_SHARDS:
        raise ManifestError(f"more than the {MAX_SHARDS} shards allowed")
    return head


def _decode_hashes(fields: dict[str, Any]) -> Hashes:
    return Hashes(_take_int(fields, "first", 0, MAX_SHARDS), _take_hashes(fields))


def _decode_delta(fields: dict[str, Any]) -> Delta:
    size = _take_int(fields, "size", 1, MAX_TOTAL_BYTES)
    return Delta(size, _take_hash(fields, "parent_root"), _take_hashes(fields))


def _decode_no_delta(fields: dict[str, Any]) -> NoDelta:
    return NoDelta(_take_match(fields, "reason", _REASON))


def _decode_end(fields: dict[str, Any]) -> End:
    root = _take_hash(fields, "root")
    if fields.get("delta_root", 0) is not None:
        return End(root, _take_hash(fields, "delta_root"))
    fields.pop("delta_root")
    return End(root, None)


_DECODERS: dict[str, Any] = {
    "head": _decode_head,
    "hashes": _decode_hashes,
    "delta": _decode_delta,
    "no_delta": _decode_no_delta,
    "end": _decode_end,
}


def _take_int(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields.pop(name, None)
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        raise ManifestError(f"{name} is not a whole number from {low} to {high}")
    return value


def _take_bool(fields: dict[str, Any], name: str) -> bool:
    value = fields.pop(name, None)
    if type(value) is not bool:
        raise ManifestError(f"{name} is neither true nor false")
    return value


def _take_match(fields: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields.pop(name, None)
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise ManifestError(f"{name} is not a text of its form")
    return value


def _take_hash(fields: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(_take_match(fields, name, _HEX))


def _take_hashes(fields: dict[str, Any]) -> tuple[bytes, ...]:
    values = fields.pop("hashes", None)
    if type(values) is not list or not values or not all(type(value) is str and len(value) == 64 for value in values):
        raise ManifestError("hashes is not a list of hashes")
    text = "".join(values)
    if _HEX_RUN.fullmatch(text) is None:
        raise ManifestError("hashes is not a list of hashes")
    raw = bytes.fromhex(text)
    return tuple(raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES))


def _take_files(fields: dict[str, Any]) -> tuple[File, ...]:
    values = fields.pop("files", None)
    if type(values) is not list or not 1 <= len(values) <= MAX_FILES:
        raise ManifestError(f"files is not a list of 1 to {MAX_FILES} files")
    files = tuple(_decode_file(value) for value in values)
    if len({file.name for file in files}) < len(files):
        raise ManifestError("two files of one name")
    return files


def _decode_file(value: Any) -> File:
    if type(value) is not dict or value.keys() != {"name", "size"} or type(value["name"]) is not str:
        raise ManifestError("a file that is not a name and a size")
    try:
        name = check_name(value["name"])
    except ValueError:
        raise ManifestError("a file with a name that is refused") from None
    return File(name, _take_int(value, "size", 0, MAX_TOTAL_BYTES))
