"""Positions of elements: valid safetensors files, and files that only look like one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shoal.shardcast.delta.tensors import ElementSpan, plan_spans
from shoal.util.tensors import MAX_HEAD_BYTES, read_tensors


@contextmanager
def open_bytes(data: bytes | None) -> Iterator[int | None]:
    if data is None:
        yield None
        return
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def plan(old: bytes | None, new: bytes) -> list[ElementSpan]:
    with open_bytes(old) as base, open_bytes(new) as source:
        assert source is not None
        return plan_spans(base, source)


def read(data: bytes) -> Any:
    with open_bytes(data) as source:
        assert source is not None
        return read_tensors(source)


def write_file(head: object, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def describe(begin: int, end: int, shape: list[int], dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def head_bytes(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_tensors_are_found_with_their_widths() -> None:
    arrays = {
        "a": np.zeros((3, 5), np.float16),
        "b": np.zeros((), np.float32),
        "c": np.zeros((0, 4), np.float32),
        "d": np.zeros(7, np.int64),
        "e": np.zeros(3, np.uint8),
    }
    data = save(arrays)
    tensors = {tensor.name: tensor for tensor in read(data)}
    assert {name: (tensor.shape, tensor.size) for name, tensor in tensors.items()} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    assert {name: tensors[name].width for name in "abde"} == {"a": 2, "b": 4, "d": 8, "e": 1}
    assert min(tensor.offset for tensor in tensors.values()) == head_bytes(data)


def test_elements_that_are_not_whole_bytes_are_taken_as_bytes() -> None:
    (four_bits,) = read(write_file({"w": describe(0, 6, [4, 3], "F4")}, bytes(6)))
    assert four_bits.width == 1
    (wide,) = read(write_file({"w": describe(0, 48, [3], "C128")}, bytes(48)))
    assert wide.width == 1
    (uneven,) = read(write_file({"w": describe(0, 7, [3], "F20")}, bytes(7)))
    assert uneven.width == 1


def test_metadata_is_no_tensor() -> None:
    data = write_file({"__metadata__": {"step": "7"}, "w": describe(0, 4, [2])}, bytes(4))
    assert [tensor.name for tensor in read(data)] == ["w"]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1234567", id="shorter than a length"),
        pytest.param(b'{"model_type": "qwen3", "hidden_size": 128}', id="a config"),
        pytest.param(write_file({"w": describe(0, 4, [2])}, bytes(3)), id="data too short"),
        pytest.param(write_file({"w": describe(0, 4, [2])}, bytes(5)), id="data too long"),
        pytest.param(write_file({"w": describe(1, 5, [2])}, bytes(5)), id="a hole before"),
        pytest.param(write_file({"v": describe(0, 4, [2]), "w": describe(2, 6, [2])}, bytes(6)), id="an overlap"),
        pytest.param(write_file({"w": describe(4, 0, [2])}), id="an end before its beginning"),
        pytest.param(write_file({"w": describe(0, 4, [-2])}, bytes(4)), id="a negative length"),
        pytest.param(write_file({"w": describe(0, True, [1])}, bytes(1)), id="a bool as a number"),  # type: ignore[arg-type]
        pytest.param(write_file({"w": {"dtype": 5, "shape": [], "data_offsets": [0, 0]}}), id="no dtype"),
        pytest.param(write_file({"w": {"dtype": "F32", "data_offsets": [0, 0]}}), id="no shape"),
        pytest.param(write_file({"w": {"dtype": "F32", "shape": [], "data_offsets": [0]}}), id="one offset"),
        pytest.param(write_file({"w": [0, 4]}, bytes(4)), id="no object"),
        pytest.param(write_file([]), id="a list"),
        pytest.param(write_file(b"[" * 100_000), id="nested without end"),
        pytest.param(write_file(b'{"w": ' + b"9" * 10_000 + b"}"), id="a number of ten thousand digits"),
        pytest.param(write_file(b"\xff\xfe{}"), id="no text"),
        pytest.param((1 << 63).to_bytes(8, "little") + b"{}", id="a header of exabytes"),
    ],
)
def test_what_is_not_a_safetensors_file_is_bytes(data: bytes) -> None:
    assert read(data) is None
    assert plan(None, data) == ([ElementSpan(1, len(data))] if data else [])
    assert plan(data, data) == ([ElementSpan(1, len(data), 0)] if data else [])


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(write_file(b"{}".ljust(MAX_HEAD_BYTES + 1)))
    with path.open("rb") as file:
        assert read_tensors(file.fileno()) is None


@given(st.binary(max_size=80), st.integers(0, 90))
def test_any_bytes_are_covered_by_spans(tail: bytes, length: int) -> None:
    data = length.to_bytes(8, "little") + tail
    assert sum(span.size for span in plan(data, data)) == len(data)


def test_neighbours_of_one_width_are_one_span() -> None:
    arrays = {f"w{i}": np.zeros((i, 3), np.float16) for i in range(6)} | {"x": np.zeros(5, np.float32)}
    data = save(arrays)
    head = head_bytes(data)
    assert plan(data, data) == [ElementSpan(1, head, 0), ElementSpan(4, 5, head), ElementSpan(2, 45, head + 20)]
    assert plan(None, data) == [ElementSpan(1, head), ElementSpan(4, 5), ElementSpan(2, 45)]


def test_a_header_of_another_length_moves_the_parents_and_has_none_itself() -> None:
    old = write_file({"w": describe(0, 8, [4])}, bytes(8))
    new = write_file({"__metadata__": {"step": "7"}, "w": describe(0, 8, [4])}, bytes(8))
    assert plan(old, new) == [ElementSpan(1, head_bytes(new)), ElementSpan(2, 4, head_bytes(old))]


def test_tensors_find_their_parents_by_name_type_and_shape() -> None:
    def file(*tensors: tuple[str, list[int], str]) -> bytes:
        head, end = {}, 0
        for name, shape, dtype in tensors:
            size = 2 * int(np.prod(shape))
            head[name] = describe(end, end + size, shape, dtype)
            end += size
        return write_file(head, bytes(end))

    old = file(("a", [2], "BF16"), ("b", [3], "BF16"), ("c", [4], "BF16"), ("d", [2, 3], "BF16"))
    new = file(("c", [4], "BF16"), ("new", [5], "BF16"), ("b", [3], "F16"), ("d", [3, 2], "BF16"), ("a", [2], "BF16"))
    start = head_bytes(old)
    assert plan(old, new)[1:] == [ElementSpan(2, 4, start + 10), ElementSpan(2, 14), ElementSpan(2, 2, start)]


def test_tensors_that_change_places_keep_their_parents() -> None:
    old = write_file({"a": describe(0, 4, [2]), "b": describe(4, 10, [3])}, bytes(10))
    new = write_file({"b": describe(0, 6, [3]), "a": describe(6, 10, [2])}, bytes(10))
    start = head_bytes(old)
    assert plan(old, new)[1:] == [ElementSpan(2, 3, start + 4), ElementSpan(2, 2, start)]


def test_bytes_of_another_length_have_no_parent() -> None:
    assert plan(b"abc", b"abcd") == [ElementSpan(1, 4)]
    assert plan(b"abcde", b"abcd") == [ElementSpan(1, 4)]


def test_a_parent_that_is_no_safetensors_file_is_no_parent() -> None:
    new = save({"w": np.zeros(4, np.float32)})
    assert [span.base for span in plan(bytes(len(new)), new)] == [None, None]
