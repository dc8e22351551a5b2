"""Rows of files: JSONL, Parquet and Hugging Face `datasets`, each with the place it stands at.

Invariants:
- sizes are bounded before anything is parsed, and files are read in pieces;
- whatever is wrong is a `SetError` of one sentence that names the file and the line or row;
- nothing is executed: Parquet and JSON are data, and of a dataset of the hub only its data files are read.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.tasks.sets.record import MAX_LINE_BYTES, RecordError, parse_row
from shoal.tasks.sets.taskset import MAX_TASKS, SetError

MAX_FILE_BYTES = 2 << 30
_SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    place: str
    """file and line, for errors"""
    number: int
    """1, 2, ... within its file"""
    values: dict[str, Any]


def read_rows(place: str) -> Iterator[Row]:
    """The rows of a file, or of all files with rows in a folder, by name."""
    path = Path(place).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise SetError(f"{path}: holds no file that ends in {', '.join(_SUFFIXES)}")
    else:
        files = [path]
    for file in files:
        _check_size(file)
        yield from _limit_rows(_read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file), str(file))


def read_hub(name: str) -> Iterator[Row]:
    """The rows of a dataset of the hub, or of a folder of one; `NAME#SPLIT` for another split than train."""
    name, _, split = name.partition("#")
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise SetError('tasks.set: datasets is not installed; pip install "shoal[datasets]"') from None
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SetError(f"hf:{name}: cannot be loaded ({reason})") from None
    rows = (Row(f"hf:{name}, row {number}", number, dict(values)) for number, values in enumerate(table, 1))
    yield from _limit_rows(rows, f"hf:{name}")


def _limit_rows(rows: Iterator[Row], name: str) -> Iterator[Row]:
    for row in rows:
        if row.number > MAX_TASKS:
            raise SetError(f"{name}: has more than the {MAX_TASKS} rows allowed")
        yield row


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SetError(f"{path}: cannot be read ({error.strerror})") from None
    if size > MAX_FILE_BYTES:
        raise SetError(f"{path}: has {size} bytes, allowed are {MAX_FILE_BYTES}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 2):
                number += 1
                if not line.strip():
                    continue
                try:
                    yield Row(f"{path}, line {number}", number, parse_row(line.rstrip(b"\r\n")))
                except RecordError as error:
                    raise SetError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise SetError(f"{path}: cannot be read ({error.strerror})") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # here, for most sets are read without it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            held = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
            if held > MAX_FILE_BYTES or file.metadata.num_rows > MAX_TASKS:
                raise SetError(f"{path}: holds {file.metadata.num_rows} rows of {held} bytes, more than is allowed")
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", number, values)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SetError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SetError(f"{path}: is no Parquet file that can be read ({reason})") from None
