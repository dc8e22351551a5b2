"""The frame between child and parent."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.submission.frame import (
    DTYPES,
    LENGTH_BYTES,
    MAX_HEAD_BYTES,
    NAMES,
    FrameError,
    clean_text,
    count_bytes,
    encode_columns,
    encode_error,
    limit_bytes,
    measure_columns,
    read_body,
    read_head,
)
from shoal.submission.parse import parse_submission


def split(pieces: list[bytes]) -> tuple[bytes, bytearray]:
    """Head and body of a frame."""
    data = b"".join(pieces)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    return data[LENGTH_BYTES : LENGTH_BYTES + length], bytearray(data[LENGTH_BYTES + length :])


def test_columns_come_back_from_their_frame(good, bounds):
    columns = parse_submission(good, bounds)
    head, body = split(encode_columns(columns))
    assert len(head) <= MAX_HEAD_BYTES
    back = read_body(body, read_head(head, bounds))
    for name, dtype in zip(NAMES, DTYPES, strict=True):
        assert getattr(back, name).dtype == dtype
        assert getattr(back, name).flags.aligned
        assert getattr(back, name).tolist() == getattr(columns, name).tolist()


def test_an_error_comes_back_from_its_frame(bounds):
    head, body = split(encode_error("not a file"))
    assert (read_head(head, bounds), body) == ("not a file", b"")


def sizes_of(good, bounds, **changes: int) -> bytes:
    sizes = measure_columns(parse_submission(good, bounds))
    for name, size in changes.items():
        sizes[NAMES.index(name)] = size
    return json.dumps({"sizes": sizes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 0},
        {"group": 17},
        {"seed": 5},
        {"reason_lengths": 3},
        {"token_ids": 4 * 64 + 1},
        {"token_ids": -1},
        {"logprobs": 2**62},
        {"prompt_ids": 4 * 32 + 1},
        {"proof_sizes": 9},
        {"proof_bytes": 8 * 258 + 1},
        {"task_bytes": 4 * 128 + 1},
        {"finish_bytes": 4 * 8 + 1},
        {"reason_bytes": 4 * 256 + 1},
        dict.fromkeys(NAMES[: NAMES.index("prompt_ids")], 17),
        dict.fromkeys(NAMES, 0),
    ],
)
def test_sizes_out_of_bounds_are_refused_before_anything_is_taken(good, bounds, changes):
    with pytest.raises(FrameError):
        read_head(sizes_of(good, bounds, **changes), bounds)


def test_sizes_that_are_too_much_together_are_refused(good, bounds):
    sizes = read_head(sizes_of(good, bounds), bounds)
    total = count_bytes(sizes)
    assert read_head(sizes_of(good, bounds), replace(bounds, decoded_bytes=total)) == sizes
    with pytest.raises(FrameError, match="when decoded"):
        read_head(sizes_of(good, bounds), replace(bounds, decoded_bytes=total - 1))


def test_the_most_of_a_frame_is_known_beforehand(bounds):
    most = limit_bytes(bounds)
    per_row = 5 * 8 + 8 * 4 + 4 * (32 + 64 + 64 + 2) + 128 + 8 + 256 + 2 * 258
    assert most == 16 * per_row
    assert limit_bytes(replace(bounds, max_tokens=2**31)) == bounds.decoded_bytes


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"sizes": 1}',
        b'{"sizes": []}',
        b'{"sizes": [1.0]}',
        b'{"error": 1}',
        b'{"sizes": [' + b"true," * 20 + b"true]}",
        b'{"sizes": [' + b"4.0," * 20 + b"4]}",
        b'{"sizes": [' + b"NaN," * 20 + b"4]}",
        b'{"sizes": [' + b"1e9," * 20 + b"4]}",
        b"\xff",
        b"[" * 2000,
        b"9" * 2000,
    ],
)
def test_other_heads_are_refused(bounds, head):
    with pytest.raises(FrameError):
        read_head(head, bounds)


@given(st.text(max_size=1000))
def test_a_sentence_is_printable_and_short_and_cleaned_once(text):
    clean = clean_text(text)
    assert clean.isascii() and clean.isprintable()
    assert len(clean) <= 303
    assert clean_text(clean)[:300] == clean[:300]


def test_the_largest_heads_fit(bounds):
    sizes = [2**53] * len(NAMES)
    assert len(json.dumps({"sizes": sizes})) < MAX_HEAD_BYTES
    assert len(split(encode_error("\U0001f600" * 1000))[0]) < MAX_HEAD_BYTES
    assert np.dtype(DTYPES[0]).itemsize == 8
