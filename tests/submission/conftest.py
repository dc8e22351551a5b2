"""Submissions to write and to spoil, and a jail that reads them.

`Footer` takes the Thrift of a Parquet file apart and puts it together again, so that a test can change a number in it.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.submission.bounds import Bounds
from shoal.submission.claims import Contents
from shoal.submission.jail import Jail, Limits
from shoal.submission.layout import COLUMNS
from shoal.submission.read import read_submission

BOUNDS = Bounds(max_rollouts=16, group_size=2, max_tokens=64, vocab_size=50, max_prompt_tokens=32, file_bytes=1 << 20)


@pytest.fixture(scope="session")
def bounds() -> Bounds:
    return BOUNDS


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """Builds a group of rollouts of given lengths."""

    def make(index: int, lengths: tuple[int, ...] = (3, 40), seed: int = 0) -> Group:
        rng = np.random.default_rng([index, seed])
        rollouts = tuple(
            Rollout(
                id=f"g{index}.{sample}",
                prompt_ids=np.array([1, 5, index % 50], dtype=np.int32),
                token_ids=rng.integers(0, 50, length, dtype=np.int32),
                logprobs=-rng.random(length, dtype=np.float32),
                finish=Finish.LENGTH if sample % 2 else Finish.STOP,
                versions=(VersionRange(4, 0, length),),
                temperature=0.7,
                seed=2**64 - 1 - sample,
            )
            for sample, length in enumerate(lengths)
        )
        scores = tuple(Score(sample % 4 / 3, f"reason {sample}") for sample in range(len(lengths)))
        return Group(index=index, task_id=f"sort-{index}", rollouts=rollouts, scores=scores)

    return make


@pytest.fixture(scope="session")
def make_proofs() -> Callable[..., dict[str, list[bytes]]]:
    """Builds bytes that could be the proofs of groups."""

    def make(groups: list[Group]) -> dict[str, list[bytes]]:
        rng = np.random.default_rng(1)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return {rollout.id: [rng.bytes(258) for _ in range(-(-rollout.num_tokens // 32))] for rollout in rollouts}

    return make


@pytest.fixture(scope="session")
def groups(make_group: Callable[..., Group]) -> list[Group]:
    return [make_group(3), make_group(5, (64, 1))]


@pytest.fixture(scope="session")
def good(groups: list[Group], make_proofs: Callable[..., dict[str, list[bytes]]]) -> bytes:
    """The bytes of an honest file."""
    from shoal.submission.write import encode_groups

    return encode_groups(groups, make_proofs(groups))


@dataclass(frozen=True)
class Desk:
    """A jail with a loop of its own."""

    jail: Jail
    runner: asyncio.Runner
    folder: Path

    def read(self, data: bytes, bounds: Bounds = BOUNDS) -> Contents:
        """What a file with these bytes claims."""
        path = self.folder / "file"
        path.write_bytes(data)
        return self.runner.run(read_submission(self.jail, path, bounds))


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Readers shared by all tests."""
    with asyncio.Runner() as runner:
        jail = Jail(limits=Limits(cpu_s=2, wall_s=60.0))
        yield Desk(jail, runner, tmp_path_factory.mktemp("desk"))
        runner.run(jail.close())


@pytest.fixture
def open_desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Opens a jail with limits or a boot of a test's own."""
    with asyncio.Runner() as runner:
        desks: list[Desk] = []

        def open_one(**options: Any) -> Desk:
            desks.append(Desk(Jail(**options), runner, tmp_path))
            return desks[-1]

        yield open_one
        for desk in desks:
            runner.run(desk.jail.close())


def same_contents(one: Contents, other: list[Group], proofs: dict[str, list[bytes]]) -> bool:
    """Whether a file says these groups and proofs, to the bit."""
    return [_spell_group(group) for group in one.groups] == [_spell_group(group) for group in other] and one.proofs == {
        name: tuple(own) for name, own in proofs.items()
    }


def _spell_group(group: Group) -> Any:
    return (
        group.index,
        group.task_id,
        group.scores,
        [
            replace(rollout, prompt_ids=np.zeros(0), token_ids=np.zeros(0), logprobs=np.zeros(0)).__repr__()
            + "".join(
                f"{array.dtype}{array.tobytes().hex()}"
                for array in (rollout.prompt_ids, rollout.token_ids, rollout.logprobs)
            )
            for rollout in group.rollouts
        ],
    )


# Thrift, compact protocol: a struct is {field: [type, value]}, a list is [type of its elements, values].
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
Struct = dict[int, list[Any]]


class _Source:
    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, count: int) -> bytes:
        self.place += count
        return self.data[self.place - count : self.place]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def value(self, kind: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == TRUE
            case 3:
                return self.take(1)[0]
            case 4 | 5 | 6:
                raw = self.varint()
                return (raw >> 1) ^ -(raw & 1)
            case 7:
                return self.take(8)
            case 8:
                return self.take(self.varint())
            case 9 | 10:
                head = self.take(1)[0]
                count = head >> 4 if head >> 4 < 15 else self.varint()
                return [head & 15, [self.value(head & 15) for _ in range(count)]]
            case 12:
                return self.struct()
        raise AssertionError(f"type {kind} is not needed")

    def struct(self) -> Struct:
        fields: Struct = {}
        last = 0
        while head := self.take(1)[0]:
            last = last + (head >> 4) if head >> 4 else self.value(I16)
            fields[last] = [head & 15, self.value(head & 15)]
        return fields


def _put_varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _put_value(kind: int, value: Any) -> bytes:
    match kind:
        case 1 | 2:
            return b""
        case 3:
            return bytes([value & 255])
        case 4 | 5 | 6:
            return _put_varint(((value << 1) ^ (value >> 63)) & (2**64 - 1))
        case 7:
            return value
        case 8:
            return _put_varint(len(value)) + value
        case 9 | 10:
            inner, values = value
            head = bytes([len(values) << 4 | inner]) if len(values) < 15 else bytes([0xF0 | inner])
            head += b"" if len(values) < 15 else _put_varint(len(values))
            return head + b"".join(_put_value(inner, item) for item in values)
    return put_struct(value)


def put_struct(fields: Struct) -> bytes:
    """The bytes of a struct."""
    out = b""
    last = 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _put_value(I16, number)
        out += _put_value(kind, value)
        last = number
    return out + b"\0"


class Footer:
    """A Parquet file, taken apart."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[-8:-4], "little")
        self.pages = data[: -8 - length]
        self.fields = _Source(data, len(data) - 8 - length).struct()

    @property
    def schema(self) -> list[Struct]:
        return self.fields[2][1][1]

    @property
    def row_group(self) -> Struct:
        return self.fields[4][1][1][0]

    def chunk(self, column: str) -> Struct:
        """ColumnChunk of a column."""
        return self.row_group[1][1][1][COLUMNS.index(column)]

    def meta(self, column: str) -> Struct:
        """ColumnMetaData of a column."""
        return self.chunk(column)[3][1]

    def page(self, column: str) -> tuple[Struct, bytes]:
        """Header and body of the only page of a column."""
        source = _Source(self.pages, self.meta(column)[9][1])
        header = source.struct()
        return header, source.take(header[3][1])

    def graft(self, column: str, pages: list[tuple[Struct, bytes]], *, honest: bool = False) -> None:
        """Give a column other pages; the footer goes on saying what it said, unless it is to be honest."""
        meta = self.meta(column)
        start = len(self.pages)
        self.pages += b"".join(put_struct(header) + body for header, body in pages)
        meta[9][1] = start
        meta[7][1] = len(self.pages) - start
        if honest:
            meta[6][1] = sum(len(put_struct(header)) + header[2][1] for header, _ in pages)
            meta[5][1] = sum(header[5][1][1][1] for header, _ in pages)

    def build(self, magic: bytes = b"PAR1") -> bytes:
        """The file put together again."""
        footer = put_struct(self.fields)
        return self.pages + footer + len(footer).to_bytes(4, "little") + magic


def squeeze_zeros(count: int, block: int = 1 << 24) -> bytes:
    """That many zero bytes in zstd, made without having them all."""
    whole = pa.compress(b"\0" * block, codec="zstd", asbytes=True)
    rest = pa.compress(b"\0" * (count % block), codec="zstd", asbytes=True)
    return whole * (count // block) + rest


@pytest.fixture
def footer(good: bytes) -> Footer:
    """An honest file, taken apart anew for each test."""
    return Footer(good)


@pytest.fixture(scope="session")
def take_apart() -> Callable[[bytes], Footer]:
    return Footer


@pytest.fixture(scope="session")
def squeeze() -> Callable[..., bytes]:
    return squeeze_zeros


@pytest.fixture(scope="session")
def is_same() -> Callable[..., bool]:
    return same_contents
