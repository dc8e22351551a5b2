"""Weights on disk: safetensors files that are read and written by rows, so that nothing needs their size in memory.

Weights are one file `model.safetensors`, or, above a largest size, several with an index. Names, order and bytes are
those of transformers' `save_pretrained`. A row is an element of a tensor's first dimension, so rows are contiguous in
the file: ranks that hold a model by rows write and read their own without talking to each other.

    one process    create_files
    any process    WeightsWriter: write_rows ... close_file -> the rows it wrote
    one process    finish_file, once all have closed it: checks that every row was written, and gives it its name

Invariants:
- a layout is a function of names, types, shapes and the largest size, so every process computes the same;
- a file appears under its name only when all of its rows are on disk;
- tensors are converted and moved in blocks of at most BLOCK_BYTES, or of one row if that is larger;
- names of files in an index are not trusted: only plain names of files in the same folder are opened.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from shoal.errors import ConfigError
from shoal.util.files import hash_file, sync_path, write_atomic
from shoal.util.tensors import LENGTH_BYTES, read_tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BLOCK_BYTES = 16 << 20
MAX_INDEX_BYTES = 32 << 20
"""Largest index that is parsed: about 300,000 tensors."""
_PATTERN = "model{suffix}.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_HEAD_MULTIPLE = 8
_TYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their name in a file, in the order in which safetensors writes them."""
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TYPE_ORDER = {dtype: order for order, dtype in enumerate(_TYPES.values())}

RowRange = tuple[str, int, int]
"""Rows of a tensor: its name, the first row and the one after the last."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values. A tensor without dimensions has one row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its place: the name of its file, and the byte there at which it begins."""

    spec: TensorSpec
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file to write."""

    name: str
    head: bytes
    tensors: tuple[StoredTensor, ...]
    """in order of offset, without gaps"""

    @property
    def size(self) -> int:
        return len(self.head) + sum(tensor.spec.size for tensor in self.tensors)


@dataclass(frozen=True)
class WeightsLayout:
    """The files to write for given tensors."""

    files: tuple[WeightsFile, ...]
    index: bytes
    """content of the index; empty if there is only one file"""

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name, in order of files and offsets."""
        return {tensor.spec.name: tensor for file in self.files for tensor in file.tensors}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all files in bytes, by name."""
        sizes = {file.name: file.size for file in self.files}
        return sizes | ({INDEX: len(self.index)} if self.index else {})


def is_weights(name: str) -> bool:
    """Whether a file of a policy's folder is part of its weights."""
    return name == INDEX or _FILE_NAME.fullmatch(name) is not None


def hash_weights(folder: Path) -> str:
    """SHA-256 of the weights in a folder: of the file, or over names and hashes of several."""
    if (folder / WEIGHTS).exists():
        return hash_file(folder / WEIGHTS)
    names = sorted({INDEX, *_read_index(folder / INDEX).values()})
    return hashlib.sha256("".join(f"{hash_file(folder / name)}  {name}\n" for name in names).encode()).hexdigest()


def describe_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Specs of tensors on any device, sharded or not; floating-point ones in `dtype`, if given."""
    return [
        TensorSpec(name, dtype if dtype and tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def plan_layout(specs: Iterable[TensorSpec], shard_bytes: int) -> WeightsLayout:
    """Divide tensors into files of at most `shard_bytes` of values; a larger tensor gets a file of its own."""
    by_name = {spec.name: spec for spec in specs}
    split = split_state_dict_into_shards_factory(
        by_name, get_storage_size=lambda spec: spec.size, filename_pattern=_PATTERN, max_shard_size=shard_bytes
    )
    files = tuple(
        _plan_file(file, [by_name[name] for name in names]) for file, names in split.filename_to_tensors.items()
    )
    index = b""
    if split.is_sharded:
        count = sum(math.prod(spec.shape) for spec in by_name.values())
        fields = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
        index = (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
    return WeightsLayout(files, index)


def create_files(folder: Path, layout: WeightsLayout) -> None:
    """Create the index, and all files at full size with their headers, under names that readers ignore."""
    for file in layout.files:
        descriptor = os.open(_part_path(folder, file.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(descriptor, file.size)
            _write_all(descriptor, memoryview(file.head), 0)
        finally:
            os.close(descriptor)
    if layout.index:
        write_atomic(folder / INDEX, layout.index)


class WeightsWriter:
    """Writes rows into files that `create_files` made. Any number of writers may write at the same time."""

    def __init__(self, folder: Path, layout: WeightsLayout) -> None:
        self._folder, self._layout = folder, layout
        self._descriptors: dict[str, int] = {}
        self._written: dict[str, list[RowRange]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def write_rows(self, name: str, first: int, rows: Tensor) -> None:
        """Write consecutive rows of a tensor, from any device and in any type, beginning with row `first`."""
        place = self._layout.tensors[name]
        spec, rows = place.spec, _as_rows(rows.detach())
        last = first + len(rows)
        assert rows.shape[1:] == spec.row_shape and 0 <= first <= last <= spec.num_rows, f"{name}: no such rows"
        assert rows.dtype == spec.dtype or (rows.is_floating_point() and spec.dtype.is_floating_point), f"{name}: type"
        descriptor = self._open(place.file)
        width = max(spec.dtype.itemsize, rows.dtype.itemsize)
        for begin, end in _cut_blocks(len(rows), math.prod(spec.row_shape) * width):
            block = rows[begin:end].to(device="cpu", dtype=spec.dtype).contiguous()
            _write_all(descriptor, _view_bytes(block), place.offset + (first + begin) * spec.row_bytes)
        self._written.setdefault(place.file, []).append((name, first, last))

    def close_file(self, file: str) -> list[RowRange]:
        """Sync and close a file after its last row from here; returns the rows written here."""
        if (descriptor := self._descriptors.pop(file, None)) is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return self._written.pop(file, [])

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(_part_path(self._folder, file), os.O_WRONLY | os.O_CLOEXEC)
        return self._descriptors[file]


def finish_file(folder: Path, file: WeightsFile, written: Iterable[RowRange]) -> None:
    """Give a file its name, once every process has closed it; `written` are the rows of all of them."""
    _check_complete(file, written)
    part = _part_path(folder, file.name)
    sync_path(part)  # the header, and the size
    part.rename(folder / file.name)
    sync_path(folder)


def write_weights(folder: Path, layout: WeightsLayout, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors from one process, file by file."""
    create_files(folder, layout)
    with WeightsWriter(folder, layout) as writer:
        for file in layout.files:
            for tensor in file.tensors:
                writer.write_rows(tensor.spec.name, 0, tensors[tensor.spec.name])
            finish_file(folder, file, writer.close_file(file.name))


class WeightsReader:
    """Reads rows of the tensors in a folder; ConfigError if its weights are not valid safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        try:
            self.tensors: Mapping[str, StoredTensor] = self._find_tensors()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Type and shape of every tensor, by name."""
        return {name: place.spec for name, place in self.tensors.items()}

    def read_rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows from `first` to before `last` (default: the end) as a new tensor in memory, in the type of the file."""
        place = self.tensors[name]
        spec = place.spec
        last = spec.num_rows if last is None else last
        assert 0 <= first <= last <= spec.num_rows, f"{name}: no such rows"
        rows = torch.empty((last - first, *spec.row_shape), dtype=spec.dtype, device="cpu")
        self._read_all(place.file, _view_bytes(rows), place.offset + first * spec.row_bytes)
        return rows if spec.shape else rows[0]

    def read_blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """All rows of a tensor in blocks, each with its first row; a tensor without dimensions is one row."""
        spec = self.tensors[name].spec
        for first, last in _cut_blocks(spec.num_rows, spec.row_bytes):
            yield first, _as_rows(self.read_rows(name, first, last))

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a whole tensor into one of the same shape, which may have another type or device."""
        assert tuple(target.shape) == self.tensors[name].spec.shape, f"{name}: another shape"
        rows = _as_rows(target.detach())
        for first, block in self.read_blocks(name):
            rows[first : first + len(block)].copy_(block)

    def is_equal(self, name: str, tensor: Tensor) -> bool:
        """Whether the file has exactly the values of a tensor after these are rounded to the file's type."""
        spec = self.tensors[name].spec
        if tuple(tensor.shape) != spec.shape:
            return False
        rows = _as_rows(tensor.detach())
        return all(
            torch.equal(rows[first : first + len(block)].to(device="cpu", dtype=spec.dtype), block)
            for first, block in self.read_blocks(name)
        )

    def _find_tensors(self) -> dict[str, StoredTensor]:
        if (self._folder / WEIGHTS).is_file():
            return self._read_head(WEIGHTS)
        weight_map = _read_index(self._folder / INDEX)
        heads = {file: self._read_head(file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in heads[file]:
                raise ConfigError(f"{self._folder / file}: has no tensor {name!r}, which the index says is there")
        return {name: heads[file][name] for name, file in weight_map.items()}

    def _read_head(self, file: str) -> dict[str, StoredTensor]:
        path = self._folder / file
        try:
            self._descriptors[file] = descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        found = {}
        for place in read_tensors(descriptor) or ():
            dtype = _TYPES.get(place.dtype)
            spec = TensorSpec(place.name, dtype or torch.uint8, place.shape)
            if dtype is None or spec.size != place.size:
                raise ConfigError(f"{path}: the tensor {place.name!r} has an unknown type or the wrong size")
            found[place.name] = StoredTensor(spec, file, place.offset)
        if not found:
            raise ConfigError(f"{path}: is not a valid safetensors file")
        return found

    def _read_all(self, file: str, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self._descriptors[file], [view], offset)
            if not count:
                raise ConfigError(f"{self._folder / file}: became shorter while it was read")
            view, offset = view[count:], offset + count


def _plan_file(name: str, specs: list[TensorSpec]) -> WeightsFile:
    """A file as safetensors writes it: larger types first, then by name; a header padded with spaces."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, offset = sorted(specs, key=lambda spec: (_TYPE_ORDER[spec.dtype], spec.name)), 0
    for spec in ordered:
        offsets = [offset, offset + spec.size]
        fields[spec.name] = {"dtype": _TYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.size
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    places = (StoredTensor(spec, name, len(head) + fields[spec.name]["data_offsets"][0]) for spec in ordered)
    return WeightsFile(name, head, tuple(places))


def _check_complete(file: WeightsFile, written: Iterable[RowRange]) -> None:
    """Assert that every row was written exactly once."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, first, last in written:
        ranges.setdefault(name, []).append((first, last))
    for tensor in file.tensors:
        spec, end = tensor.spec, 0
        for first, last in sorted(ranges.pop(spec.name, [])):
            assert first == end, f"{file.name}: rows of {spec.name} are missing or written twice at row {end}"
            end = last
        assert end == spec.num_rows or not spec.size, f"{file.name}: {spec.name} ends at row {end} of {spec.num_rows}"
    assert not ranges, f"{file.name}: {sorted(ranges)} are not in this file"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor names with the names of their files."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path.parent}: no file named {WEIGHTS} or {INDEX} ({error.strerror})") from None
    try:
        weight_map: Any = json.loads(data)["weight_map"] if len(data) <= MAX_INDEX_BYTES else None
    except (ValueError, RecursionError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: is not a valid index of safetensors files")
    for file in weight_map.values():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ConfigError(f"{path}: {str(file)[:80]!r} is not the plain name of a safetensors file")
    return weight_map


def _cut_blocks(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _view_bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _part_path(folder: Path, file: str) -> Path:
    return folder / f".{file}.part"
