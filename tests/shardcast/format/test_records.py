"""Lines of a manifest: one form, bounded, signed for one place, and nothing else is read."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity.keys import Key
from shoal.shardcast.errors import ManifestError
from shoal.shardcast.format.layout import File, check_name
from shoal.shardcast.format.records import (
    MAX_FILES,
    MAX_LINE_BYTES,
    MAX_NUMBER,
    MAX_SHARDS,
    MAX_TOTAL_BYTES,
    Delta,
    End,
    Hashes,
    ManifestHead,
    NoDelta,
    Record,
    decode_body,
    digest_head,
    encode_body,
    open_line,
    sign_record,
)

KEY = Key.generate()
HEAD = ManifestHead("reef", 7, 5, 1 << 20, (File("a", 10), File("b", 0)), 6, False)
DIGEST = "d" * 64

hashes = st.binary(min_size=32, max_size=32)
names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
heads = st.builds(
    ManifestHead,
    run=st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True),
    version=st.integers(1, MAX_NUMBER),
    serial=st.integers(0, MAX_NUMBER),
    shard_size=st.integers(1 << 16, 1 << 26),
    files=st.lists(
        st.builds(File, names, st.integers(0, 1 << 32)), min_size=1, max_size=5, unique_by=lambda f: f.name
    ).map(tuple),
    parent=st.none() | st.just(0),
    anchor=st.booleans(),
)
records = st.one_of(
    heads,
    st.builds(Hashes, st.integers(0, MAX_SHARDS), st.lists(hashes, min_size=1, max_size=9).map(tuple)),
    st.builds(Delta, st.integers(1, MAX_TOTAL_BYTES), hashes, st.lists(hashes, min_size=1, max_size=9).map(tuple)),
    st.builds(NoDelta, st.from_regex(r"[ -~]{1,200}", fullmatch=True)),
    st.builds(End, hashes, st.none() | hashes),
)


def dump(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def fields_of(record: Record, number: int = 0) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_body(number, record))
    return fields


@given(st.integers(0, MAX_NUMBER), records)
def test_every_record_survives_its_canonical_encoding(number: int, record: Record) -> None:
    body = encode_body(number, record)
    assert decode_body(body) == (number, record)
    assert body == dump(json.loads(body))


def test_the_forms_are_as_published() -> None:
    one, two = bytes(32), b"\xff" * 32
    head = ManifestHead("r", 2, 9, 65536, (File("a", 1),), 1, True)
    assert encode_body(0, head) == (
        b'{"anchor":true,"files":[{"name":"a","size":1}],"format":1,"kind":"head","n":0,"parent":1,"run":"r",'
        b'"serial":9,"shard_size":65536,"version":2}'
    )
    zeros, ones = b"0" * 64, b"f" * 64
    assert encode_body(1, Hashes(3, (one, two))) == (
        b'{"first":3,"hashes":["' + zeros + b'","' + ones + b'"],"kind":"hashes","n":1}'
    )
    assert encode_body(2, Delta(5, two, (one,))) == (
        b'{"hashes":["' + zeros + b'"],"kind":"delta","n":2,"parent_root":"' + ones + b'","size":5}'
    )
    assert encode_body(2, NoDelta("no")) == b'{"kind":"no_delta","n":2,"reason":"no"}'
    assert encode_body(3, End(one, None)) == b'{"delta_root":null,"kind":"end","n":3,"root":"' + zeros + b'"}'


def test_a_signature_covers_the_format_the_head_and_the_body() -> None:
    body = encode_body(1, NoDelta("no"))
    signature = KEY.sign(b"shoal-shardcast-1\n" + DIGEST.encode() + b"\n" + body).hex().encode()
    assert sign_record(KEY, DIGEST, 1, NoDelta("no")) == b'{"body":' + body + b',"sig":"' + signature + b'"}'


@given(records, st.data())
def test_a_line_changed_anywhere_is_refused(record: Record, data: st.DataObject) -> None:
    line = bytearray(sign_record(KEY, DIGEST, 3, record))
    assert decode_body(open_line(bytes(line), KEY.public, DIGEST)) == (3, record)
    line[data.draw(st.integers(0, len(line) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ManifestError):
        open_line(bytes(line), KEY.public, DIGEST)


def test_a_line_of_another_key_or_head_is_refused() -> None:
    line = sign_record(KEY, DIGEST, 1, NoDelta("no"))
    for public, digest in ((Key.generate().public, DIGEST), (KEY.public, ""), (KEY.public, "e" * 64)):
        with pytest.raises(ManifestError, match="not signed"):
            open_line(line, public, digest)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_other_bytes_are_neither_a_line_nor_a_body(data: bytes) -> None:
    with pytest.raises(ManifestError):
        open_line(data, KEY.public, DIGEST)
    with pytest.raises(ManifestError):
        decode_body(data)


@pytest.mark.parametrize("length", [1, 2])
def test_a_line_is_as_long_as_allowed_and_no_longer(length: int) -> None:
    body = b'{"' + b"x" * (MAX_LINE_BYTES - 146 - 6 + length - 1) + b'":1}'
    line = b'{"body":' + body + b',"sig":"' + KEY.sign(b"shoal-shardcast-1\n\n" + body).hex().encode() + b'"}'
    if len(line) <= MAX_LINE_BYTES:
        assert open_line(line, KEY.public, "") == body
    else:
        with pytest.raises(ManifestError, match="exceeds"):
            open_line(line, KEY.public, "")
    assert len(line) == MAX_LINE_BYTES + length - 1


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"n":' + b"9" * 5000 + b"}",
        b'{"kind":"end","n":NaN}',
        b'{"n":1e400}',
        b'{"n":0,"n":0}',
        b"\xff{}",
        b"null",
        b'"head"',
        b"3",
        b"{}",
        b'{"kind":["head"],"n":0}',
        b'{"kind":"tail","n":0}',
    ],
)
def test_odd_json_is_a_manifest_error(body: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_body(body)


def test_the_same_json_in_another_form_is_refused() -> None:
    fields = fields_of(HEAD)
    for other in (
        json.dumps(fields).encode(),
        json.dumps(fields, sort_keys=True, indent=0).encode(),
        dump(fields) + b" ",
        json.dumps(dict(reversed(fields.items())), separators=(",", ":")).encode(),
        dump(fields).replace(b'"reef"', b'"\\u0072eef"'),
        dump(fields).replace(b'"version":7', b'"version":7.0'),
        dump(fields).replace(b'"version":7', b'"version":07'),
    ):
        with pytest.raises(ManifestError):
            decode_body(other)


@given(records, st.data())
def test_a_missing_or_added_field_is_refused(record: Record, data: st.DataObject) -> None:
    fields = fields_of(record)
    left_out = data.draw(st.sampled_from(sorted(fields)))
    lacking = {name: fields[name] for name in fields if name != left_out}
    for other in (lacking, fields | {"extra": 1}, fields | {"": None}):
        with pytest.raises(ManifestError):
            decode_body(dump(other))


WRONG: list[Any] = [None, True, -1, 1 << 63, 0.5, "1", "x", [], {}, [1], "\0", [None], "a" * 63, "A" * 64]


@given(records, st.data())
def test_a_value_of_another_kind_is_refused(record: Record, data: st.DataObject) -> None:
    fields = fields_of(record)
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(st.sampled_from(WRONG))
    allowed = {"anchor": [True], "parent": [None], "delta_root": [None], "reason": ["1", "x", "a" * 63, "A" * 64]}
    allowed["run"] = ["1", "x", "a" * 63]
    if value in allowed.get(name, []) and type(value) in map(type, allowed.get(name, [])):
        decode_body(dump(fields | {name: value}))
        return
    with pytest.raises(ManifestError):
        decode_body(dump(fields | {name: value}))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/etc/passwd",
        "a\0",
        "\0",
        "a" * 10_000,
        "a\n",
        ".hidden",
        "C:\\a",
        "\ud800",
        "\u00e9",
        " a",
    ],
)
def test_names_that_could_be_a_path_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="invalid file name"):
        decode_body(dump(fields_of(HEAD) | {"files": [{"name": name, "size": 1}]}))


@given(st.text(max_size=12))
def test_a_name_is_taken_exactly_if_the_check_passes_it(name: str) -> None:
    body = dump(fields_of(HEAD) | {"files": [{"name": name, "size": 1}]})
    try:
        check_name(name)
    except ValueError:
        with pytest.raises(ManifestError):
            decode_body(body)
    else:
        decode_body(body)


@pytest.mark.parametrize(
    "files",
    [
        [],
        [{"name": "a", "size": 1}] * 2,
        [{"name": f"f{number}", "size": 0} for number in range(MAX_FILES + 1)],
        [{"name": "a", "size": -1}],
        [{"name": "a", "size": MAX_TOTAL_BYTES + 1}],
        [{"name": "a", "size": (MAX_SHARDS << 20) + 1}],
        [{"name": "a"}],
        [{"name": "a", "size": 1, "mode": 7}],
        [["a", 1]],
        {"a": 1},
    ],
)
def test_too_many_too_large_or_odd_files_are_refused(files: Any) -> None:
    with pytest.raises(ManifestError):
        decode_body(dump(fields_of(HEAD) | {"files": files}))


def test_files_that_are_too_large_only_together_are_refused() -> None:
    files = (File("a", MAX_TOTAL_BYTES), File("b", 1))
    with pytest.raises(ManifestError, match="exceeds the maximum"):
        decode_body(encode_body(0, replace(HEAD, files=files, shard_size=1 << 26)))


def test_the_largest_allowed_heads_are_taken() -> None:
    many = tuple(File(f"f{number}", 0) for number in range(MAX_FILES))
    for head in (
        replace(HEAD, files=many),
        replace(HEAD, files=(File("a", MAX_SHARDS << 20),)),
        replace(HEAD, files=(File("a", MAX_TOTAL_BYTES),), shard_size=1 << 24),
    ):
        assert decode_body(encode_body(0, head)) == (0, head)


@pytest.mark.parametrize(("version", "parent"), [(0, 0), (7, 7), (7, 8), (7, -1)])
def test_a_parent_is_a_smaller_version(version: int, parent: int) -> None:
    with pytest.raises(ManifestError, match="parent"):
        decode_body(dump(fields_of(HEAD) | {"version": version, "parent": parent}))


@pytest.mark.parametrize("size", [0, (1 << 16) - 1, (1 << 26) + 1])
def test_shard_sizes_are_bounded(size: int) -> None:
    with pytest.raises(ManifestError, match="shard_size"):
        decode_body(dump(fields_of(HEAD) | {"shard_size": size}))


def test_another_format_is_refused() -> None:
    with pytest.raises(ManifestError, match="unsupported format"):
        decode_body(dump(fields_of(HEAD) | {"format": 2}))


def test_heads_that_differ_have_other_digests() -> None:
    digests = {
        digest_head(encode_body(0, head)) for head in (HEAD, replace(HEAD, serial=6), replace(HEAD, anchor=True))
    }
    assert len(digests) == 3 and all(len(digest) == 64 for digest in digests)
