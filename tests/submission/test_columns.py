"""The table of columns: schema, limits and the arrays that a parser sends all follow from it."""

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shoal.sandbox.pool import JobOutputError
from shoal.submission.columns import (
    ARRAYS,
    COLUMNS,
    SCHEMA,
    Column,
    count_bytes,
    dump_columns,
    encode_file,
    find_excess,
    limit_bytes,
    limit_file,
    measure_columns,
    view_columns,
)
from shoal.submission.limits import FormError, SubmissionLimits
from shoal.submission.parse import parse_submission
from shoal.submission.read import ParserPoolError, read_sizes


def place_of(name: str) -> int:
    """The position of an array in the order sent: `column`, or `column/level`."""
    column, _, level = name.partition("/")
    return next(
        place
        for place, spec in enumerate(ARRAYS)
        if spec.column.name == column and spec.level == (int(level) if level else len(spec.column.lengths))
    )


def test_columns_come_back_from_their_bytes(good, bounds):
    columns = parse_submission(good, bounds)
    sizes = read_sizes({"sizes": measure_columns(columns)}, bounds)
    back = view_columns(bytearray(b"".join(dump_columns(columns))), sizes)
    for spec in ARRAYS:
        array = back[spec.column.name][spec.level]
        assert array.dtype == spec.dtype
        assert array.flags.aligned
        assert array.tolist() == columns[spec.column.name][spec.level].tolist()


def test_an_error_blames_the_file_and_a_fault_blames_nobody(bounds):
    with pytest.raises(FormError, match=r"^not a file$"):
        read_sizes({"error": "not a file"}, bounds)
    with pytest.raises(FormError, match=r"^\\u200b$"):
        read_sizes({"error": "\u200b"}, bounds)
    with pytest.raises(ParserPoolError, match="the disk"):
        read_sizes({"fault": "the disk"}, bounds)


def sizes_of(good, bounds, **changes: int) -> dict[str, list[int]]:
    sizes = measure_columns(parse_submission(good, bounds))
    for name, size in changes.items():
        sizes[place_of(name)] = size
    return {"sizes": sizes}


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 0},
        {"group": 17},
        {"seed": 5},
        {"reason/0": 3},
        {"token_ids": 4 * 64 + 1},
        {"token_ids": -1},
        {"logprobs": 2**62},
        {"prompt_ids": 4 * 32 + 1},
        {"proofs/1": 9},
        {"proofs": 8 * 258 + 1},
        {"task_id": 4 * 128 + 1},
        {"finish": 4 * 8 + 1},
        {"reason": 4 * 256 + 1},
        {f"{spec.column.name}/{spec.level}": 17 for spec in ARRAYS if spec.level == 0},
        {f"{spec.column.name}/{spec.level}": 0 for spec in ARRAYS},
    ],
)
def test_sizes_beyond_the_limits_are_refused_before_anything_is_taken(good, bounds, changes):
    with pytest.raises(JobOutputError):
        read_sizes(sizes_of(good, bounds, **changes), bounds)


def test_sizes_that_are_too_much_together_are_refused(good, bounds):
    sizes = read_sizes(sizes_of(good, bounds), bounds)
    total = count_bytes(sizes)
    assert read_sizes(sizes_of(good, bounds), replace(bounds, decoded_bytes=total)) == sizes
    with pytest.raises(JobOutputError, match="when decoded"):
        read_sizes(sizes_of(good, bounds), replace(bounds, decoded_bytes=total - 1))


def test_the_maximum_size_of_an_answer_is_known_beforehand(bounds):
    most = limit_bytes(bounds)
    per_row = 5 * 8 + 8 * 4 + 4 * (32 + 64 + 64 + 2) + 128 + 8 + 256 + 2 * 258
    assert most == 16 * per_row
    assert limit_bytes(replace(bounds, max_tokens=2**31)) == bounds.decoded_bytes


@pytest.mark.parametrize(
    "head",
    [
        None,
        [],
        {},
        {"sizes": 1},
        {"sizes": []},
        {"sizes": [1.0]},
        {"error": 1},
        {"sizes": [True] * len(ARRAYS)},
        {"sizes": [4.0] * len(ARRAYS)},
        {"sizes": [float("nan")] * len(ARRAYS)},
        {"sizes": [1e9] * len(ARRAYS)},
    ],
)
def test_other_answers_are_refused(bounds, head):
    with pytest.raises(JobOutputError):
        read_sizes(head, bounds)


def test_the_schema_is_that_of_the_table():
    assert [(field.name, field.type, field.nullable) for field in SCHEMA] == [
        (column.name, column.kind, False) for column in COLUMNS
    ]
    assert len(ARRAYS) == 21
    assert {spec.column.name for spec in ARRAYS} == {column.name for column in COLUMNS}


def fill_columns(limits: SubmissionLimits) -> dict[str, list[Any]]:
    """A file in which everything is as long as it may be, and nothing can be compressed."""
    source, rows = np.random.default_rng(0), range(limits.max_rollouts)

    def make(column: Column) -> Any:
        sizes = [length.most(limits) for length in column.lengths]
        if column.name == "proofs":
            return [source.bytes(sizes[1]) for _ in range(sizes[0])]
        if column.kind == pa.string():
            return "".join(map(chr, source.integers(0x20, 0x7F, sizes[0])))
        return np.frombuffer(source.bytes(column.dtype.itemsize * prod(sizes)), column.dtype)[
            slice(None) if sizes else 0
        ]

    return {column.name: [make(column) for _ in rows] for column in COLUMNS}


@pytest.mark.parametrize(("rollouts", "tokens", "prompt"), [(1, 1, 1), (8, 512, 4096), (64, 64, 16), (16, 4096, 256)])
def test_the_largest_file_is_no_larger_than_its_limit_and_not_much_smaller(rollouts, tokens, prompt):
    limits = SubmissionLimits(
        max_rollouts=rollouts, group_size=1, max_tokens=tokens, vocab_size=1, max_prompt_tokens=prompt
    )
    size, most = len(encode_file(fill_columns(limits))), limit_file(limits)
    assert size <= most
    assert most - size < 30_000 + size // 3


def test_an_excess_is_described_in_singular_and_plural(bounds: SubmissionLimits) -> None:
    narrow = replace(bounds, max_rollouts=2, max_prompt_tokens=1)
    sizes = [int(spec.level == 0) for spec in ARRAYS]
    sizes[place_of("prompt_ids/1")] = 2
    assert find_excess(sizes, narrow) == "2 elements of prompt_ids at level 1, allowed are 1 in 1 rollout"
    assert find_excess([3 * (spec.level == 0) for spec in ARRAYS], narrow) == "3 rollouts, allowed are 1 to 2"
