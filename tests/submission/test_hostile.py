"""Files made to harm their reader: each is refused with an error, and the next honest one is read as usual."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.redteam.behaviours.bad_files import squeeze_zeros
from shoal.submission.limits import FormError

HONEST = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "store_schema": False}
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def load(good: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(good))


def save(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **HONEST | options)
    return buffer.getvalue()


def put_column(table: pa.Table, name: str, values: Any, kind: pa.DataType, *, nullable: bool = False) -> pa.Table:
    """The table with different values, possibly of a different type, in a column."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, pa.field(name, kind, nullable=nullable), pa.array(values, kind))


def rewrite(good: bytes) -> bytes:
    """The starting point of the tests below is itself a good file."""
    return save(load(good))


def test_a_file_written_by_another_library_is_accepted(reader, good, groups, make_proofs, is_same):
    assert is_same(reader.read(rewrite(good)), groups, make_proofs(groups))


def test_a_file_without_compression_is_accepted(reader, good, groups, make_proofs, is_same):
    assert is_same(reader.read(save(load(good), compression="none")), groups, make_proofs(groups))


def test_a_file_decoded_and_encoded_again_is_accepted(reader, footer, good, groups, make_proofs, is_same):
    assert footer.build() == good
    footer.graft("token_ids", [footer.page("token_ids")], honest=True)
    assert is_same(reader.read(footer.build()), groups, make_proofs(groups))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a Parquet file"),
        (b"PAR1", "not a Parquet file"),
        (b"PAR1PAR1", "not a Parquet file"),
        (b"\x00" * 100, "not a Parquet file"),
        (b"PAR1" + b"\0\0\0\0" + b"PAR1", "not a readable"),
        (b"PAR1" + b"\xff\xff\xff\xff" + b"PAR1", "a footer of 4294967295 bytes"),
        (b"PAR1" + b"\0" * 20_000 + (20_000).to_bytes(4, "little") + b"PAR1", "a footer of 20000 bytes"),
        (b"PAR1" + b"\x15" * 100 + (100).to_bytes(4, "little") + b"PAR1", "not a readable"),
        (b"PAR1" + b"\x1c" * 8000 + (8000).to_bytes(4, "little") + b"PAR1", "not a readable"),
        (b"PAR1" + b"\x19\xfc\xff\xff\xff\xff\x0f" + (7).to_bytes(4, "little") + b"PAR1", "not a readable"),
        (b"PAR1" + b"\0" * 8 + (100).to_bytes(4, "little") + b"PAR1", "not a readable"),
        (b"PK\x03\x04" + b"\0" * 100, "not a Parquet file"),
    ],
)
def test_files_that_are_not_parquet_are_refused(reader, data, words):
    with pytest.raises(FormError, match=words):
        reader.read(data)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_truncated_file_is_refused(reader, good, share):
    with pytest.raises(FormError):
        reader.read(good[: int(len(good) * share)])


def test_a_file_with_its_middle_missing_is_refused(reader, good):
    with pytest.raises(FormError):
        reader.read(good[:200] + good[400:])


def test_encrypted_files_are_refused(reader, footer):
    with pytest.raises(FormError, match="encrypted"):
        reader.read(footer.build()[:-4] + b"PARE")
    data = bytearray(footer.build())
    data[:4] = b"PARE"
    with pytest.raises(FormError, match="encrypted"):
        reader.read(bytes(data))


@pytest.mark.parametrize("codec", ["snappy", "gzip", "brotli", "lz4"])
def test_other_codecs_are_refused_unread(reader, good, codec):
    with pytest.raises(FormError, match="column group: compressed by"):
        reader.read(save(load(good), compression=codec))


@pytest.mark.parametrize("codec", ["snappy", "gzip", "brotli", "zstd"])
def test_a_column_of_zeros_that_unpacks_to_much_is_refused_by_its_footer(reader, good, codec):
    table = put_column(load(good), "token_ids", [[0] * 10**6] * 4, load(good).schema.field("token_ids").type)
    data = save(table, compression=dict.fromkeys(table.column_names, "zstd") | {"token_ids.list.element": codec})
    assert len(data) < 1 << 20
    with pytest.raises(FormError, match="column token_ids: "):
        reader.read(data)


@pytest.mark.parametrize("codec", [2, 4, 0, 1, 7, 99, -1])
def test_a_footer_that_lies_about_the_codec_is_refused(reader, footer, codec):
    for column in ("group", "proofs"):
        footer.meta(column)[4][1] = codec
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_dictionaries_are_refused(reader, good):
    with pytest.raises(FormError, match=r"column group: encoded by .*DICTIONARY"):
        reader.read(save(load(good), use_dictionary=True))


@pytest.mark.parametrize("encoding", ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"])
def test_other_encodings_are_refused(reader, good, encoding):
    with pytest.raises(FormError, match=f"column group: encoded by .*{encoding}"):
        reader.read(save(load(good), column_encoding={"group": encoding}))


def test_an_encoding_that_only_the_page_names_is_refused_or_read_within_limits(reader, footer):
    for encoding in (2, 3, 5, 6, 7, 8, 9, 100, -1):
        header, body = footer.page("token_ids")
        header[5][1][2][1] = encoding
        footer.graft("token_ids", [(header, body)])
        with pytest.raises(FormError):
            reader.read(footer.build())


def test_a_dictionary_page_behind_the_footers_back_is_refused(reader, footer):
    """Ten million entries of a dictionary that no value uses."""
    size = 4 * 10**7
    page = {1: [5, 2], 2: [5, size], 3: [5, len(squeeze_zeros(size))], 7: [12, {1: [5, 10**7], 2: [5, 0]}]}
    footer.graft("token_ids", [(page, squeeze_zeros(size)), footer.page("token_ids")])
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_pages_of_the_second_kind_are_refused_or_read(reader, good, groups, make_proofs, is_same):
    assert is_same(reader.read(save(load(good), data_page_version="2.0")), groups, make_proofs(groups))


def test_a_file_without_rows_is_refused(reader, good):
    with pytest.raises(FormError, match="0 rollouts, allowed are 1 to 16"):
        reader.read(save(load(good).slice(0, 0)))


@pytest.mark.parametrize("num_rows", [0, -1, 10**7, MAX_INT32, MAX_INT64, -(2**63)])
def test_a_footer_with_any_number_of_rows_is_refused(reader, footer, num_rows):
    footer.fields[3][1] = num_rows
    with pytest.raises(FormError):
        reader.read(footer.build())
    footer.row_group[3][1] = num_rows
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_ten_million_rows_are_refused_unread(reader, good):
    rows = 10**7
    table = pa.table({"group": pa.array(np.zeros(rows, np.int64))})
    with pytest.raises(FormError, match=r"10000000 rollouts|row groups"):
        reader.read(save(table, row_group_size=rows))


def test_several_row_groups_are_refused(reader, good):
    with pytest.raises(FormError, match="2 row groups"):
        reader.read(save(load(good), row_group_size=2))


def test_columns_in_another_order_are_refused(reader, good):
    table = load(good)
    with pytest.raises(FormError, match=r"column 0 is 'proofs\.list\.element', expected group"):
        reader.read(save(table.select(table.column_names[::-1])))


def test_columns_of_other_names_are_refused(reader, good):
    table = load(good)
    for name in ("Group", "", "x" * 3000, "gr\u00f6\u00dfe", "a.b", "\x00", "group "):
        with pytest.raises(FormError, match=r"column 0 is|not a readable"):
            reader.read(save(table.rename_columns([name, *table.column_names[1:]])))


def test_names_that_are_not_text_are_refused(reader, footer):
    footer.schema[1][4][1] = b"\xff\xfe\xff"
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_columns_that_are_missing_or_twice_or_surplus_are_refused(reader, good):
    table = load(good)
    for other in (
        table.drop_columns(["reason"]),
        table.append_column("reason", table.column("reason")),
        table.append_column("more", table.column("reason")),
        table.select(["group"]),
    ):
        with pytest.raises(FormError, match=r"\d+ columns, a submission has 13"):
            reader.read(save(other))
    twice = table.rename_columns(["group", "group", *table.column_names[2:]])
    with pytest.raises(FormError, match="column 1 is 'group', expected sample"):
        reader.read(save(twice))


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("group", pa.int32(), 3),
        ("group", pa.uint64(), 3),
        ("group", pa.float64(), 3.0),
        ("group", pa.string(), "3"),
        ("group", pa.timestamp("us"), 3),
        ("group", pa.date64(), 86_400_000),
        ("group", pa.decimal128(10, 0), 3),
        ("group", pa.bool_(), True),
        ("seed", pa.int64(), 3),
        ("seed", pa.binary(8), b"12345678"),
        ("task_id", pa.binary(), b"sort"),
        ("task_id", pa.list_(pa.string()), ["sort"]),
        ("reward", pa.float32(), 1.0),
        ("reward", pa.float16(), np.float16(1.0)),
        ("token_ids", pa.list_(pa.int64()), [3]),
        ("token_ids", pa.list_(pa.list_(pa.int32())), [[3]]),
        ("token_ids", pa.struct([("element", pa.int32())]), {"element": 3}),
        ("token_ids", pa.map_(pa.string(), pa.int32()), [("a", 3)]),
        ("token_ids", pa.int32(), 3),
        ("proofs", pa.list_(pa.string()), ["a"]),
        ("proofs", pa.binary(), b"a"),
    ],
)
def test_columns_of_other_types_are_refused(reader, good, name, kind, value):
    table = put_column(load(good), name, [value] * 4, kind)
    with pytest.raises(FormError, match=rf"column {name}: not of the format's type|columns, a sub|column \d+ is"):
        reader.read(save(table))


def test_values_that_may_be_missing_are_refused(reader, good):
    table = load(good)
    for name in ("group", "reward", "reason", "token_ids"):
        column = table.column(name).to_pylist()
        with pytest.raises(FormError, match=f"column {name}: not of the format's type"):
            reader.read(save(put_column(table, name, column, table.schema.field(name).type, nullable=True)))
        with pytest.raises(FormError, match=f"column {name}: not of the format's type"):
            reader.read(
                save(put_column(table, name, [None, *column[1:]], table.schema.field(name).type, nullable=True))
            )
    with pytest.raises(FormError, match="column token_ids: not of the format's type"):
        reader.read(save(put_column(table, "token_ids", [[None]] * 4, pa.list_(pa.int32()))))


def test_lists_within_lists_are_refused_however_deep(reader, good):
    kind: pa.DataType = pa.int32()
    value: Any = 1
    for _ in range(60):
        kind, value = pa.list_(kind), [value]
    with pytest.raises(FormError):
        reader.read(save(put_column(load(good), "token_ids", [value] * 4, kind)))


def test_a_schema_nested_a_thousand_deep_is_refused(reader, footer):
    leaf = footer.schema[1]
    group = {3: [5, 0], 4: [8, b"n"], 5: [5, 1]}
    footer.schema[1:2] = [*([group] * 1000), leaf]
    with pytest.raises(FormError):
        reader.read(footer.build())


@pytest.mark.parametrize("children", [0, -1, 5, 2**20, MAX_INT32])
def test_a_schema_that_counts_its_columns_wrongly_is_refused(reader, footer, children):
    footer.schema[0][5][1] = children
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_metadata_of_any_kind_is_refused(reader, good, footer):
    with pytest.raises(FormError, match="metadata besides the columns"):
        reader.read(save(load(good), store_schema=True))
    footer.fields[5] = [9, [12, [{1: [8, b"note"], 2: [8, b"x"]}]]]
    with pytest.raises(FormError, match="metadata besides the columns"):
        reader.read(footer.build())


def test_an_arrow_schema_that_contradicts_the_columns_is_refused(reader, good, take_apart):
    """Readers trust it: it turns strings into dictionaries, numbers into extension types."""
    other = put_column(load(good), "group", [3] * 4, pa.int64()).cast(
        pa.schema(
            [
                pa.field("group", pa.duration("s"), nullable=False),
                *list(load(good).schema)[1:],
            ]
        )
    )
    lie = take_apart(save(other, store_schema=True))
    honest = take_apart(good)
    honest.fields[5] = lie.fields[5]
    with pytest.raises(FormError, match="metadata besides the columns"):
        reader.read(honest.build())


def test_extension_types_are_refused(reader, good):
    kind = pa.fixed_shape_tensor(pa.int32(), [2])
    values = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2]] * 4, pa.list_(pa.int32(), 2)))
    table = load(good)
    table = table.set_column(4, pa.field("token_ids", kind, nullable=False), values)
    with pytest.raises(FormError, match=r"metadata besides|not of the format's type"):
        reader.read(save(table, store_schema=True))


@pytest.mark.parametrize("number", [5, 6, 7, 9])
@pytest.mark.parametrize("value", [-1, -(2**63), MAX_INT32, 2**40, MAX_INT64])
def test_impossible_sizes_and_offsets_are_refused(reader, good, take_apart, number, value):
    """5: values, 6: bytes unpacked, 7: bytes, 9: where they are."""
    words = {5: f"{value} values", 6: f"{value} bytes uncompressed", 7: "lies outside", 9: "outside|not a readable"}
    for column in ("group", "token_ids", "proofs"):
        footer = take_apart(good)
        footer.meta(column)[number][1] = value
        with pytest.raises(FormError, match=words[number]):
            reader.read(footer.build())


def test_a_column_in_another_file_is_refused(reader, footer):
    footer.chunk("reward")[1] = [8, b"/etc/passwd"]
    with pytest.raises(FormError, match="column reward: in another file"):
        reader.read(footer.build())


def test_a_column_at_the_place_of_another_is_refused(reader, footer):
    footer.meta("reason")[9][1] = footer.meta("proofs")[9][1]
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_a_huge_text_is_refused(reader, good):
    for name in ("task_id", "finish", "reason"):
        table = put_column(load(good), name, ["x" * 10**7] * 4, pa.string())
        with pytest.raises(FormError, match=f"column {name}: "):
            reader.read(save(table))


def test_a_text_of_a_length_that_is_not_there_is_refused(reader, footer):
    header, _ = footer.page("reason")
    for length in (2**31 - 1, 2**32 - 1, 10**6):
        raw = length.to_bytes(4, "little") * 4
        body = pa.compress(raw, codec="zstd", asbytes=True)
        header[2][1], header[3][1] = len(raw), len(body)
        footer.graft("reason", [(header, body)])
        with pytest.raises(FormError):
            reader.read(footer.build())


def test_text_that_is_not_utf8_is_refused(reader, good, footer):
    header, _ = footer.page("reason")
    raw = b"".join((2).to_bytes(4, "little") + text for text in (b"ok", b"\xc3\x28", b"ok", b"ok"))
    body = pa.compress(raw, codec="zstd", asbytes=True)
    header[2][1], header[3][1] = len(raw), len(body)
    footer.graft("reason", [(header, body)])
    with pytest.raises(FormError):
        reader.read(footer.build())


def test_after_all_this_an_honest_file_is_read(reader, good, groups, make_proofs, is_same):
    assert is_same(reader.read(good), groups, make_proofs(groups))
