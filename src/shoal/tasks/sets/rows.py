"""Rows of files: JSONL, Parquet and Hugging Face `datasets`, each with its location.

Invariants:
- sizes are bounded before anything is parsed, and files are read in pieces;
- every problem is a `SetError` of one sentence that names the file and the line or row;
- nothing is executed: Parquet and JSON are data, and of a hub dataset only its data files are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.tasks.sets.record import MAX_LINE_BYTES, RecordError, parse_row
from shoal.tasks.sets.taskset import MAX_TASKS, SetError
from shoal.util.extras import import_extra

MAX_FILE_BYTES = 2 << 30
_SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_ROWS = 64
_LAYOUT = "a task set has one JSON object per line, or is Parquet (a script for CSV is in docs/tutorial.md)"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row, and where it is."""

    place: str
    """file and line, for errors"""
    number: int
    """1, 2, ... within its file"""
    values: dict[str, Any]


def read_rows(place: str) -> Iterator[SourceRow]:
    """The rows of a file, or of all data files in a folder, by name."""
    path = Path(place).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise SetError(f"{path}: has no file that ends in {', '.join(_SUFFIXES)}")
    else:
        files = [path]
    for file in files:
        try:
            size = file.stat().st_size
        except OSError as error:
            raise SetError(f"{file}: cannot be read ({error.strerror})") from None
        if size > MAX_FILE_BYTES:
            raise SetError(f"{file}: has {size} bytes, allowed are {MAX_FILE_BYTES}")
        yield from _limit_rows(_read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file), str(file))


def read_hub(name: str) -> Iterator[SourceRow]:
    """The rows of a dataset on the hub or in a folder; `NAME#SPLIT` for a split other than train."""
    name, _, split = name.partition("#")
    datasets = import_extra("datasets", "tasks.set")
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SetError(f"hf:{name}: cannot be loaded ({reason})") from None
    rows = (SourceRow(f"hf:{name}, row {number}", number, dict(values)) for number, values in enumerate(table, 1))
    yield from _limit_rows(rows, f"hf:{name}")


def _limit_rows(rows: Iterator[SourceRow], name: str) -> Iterator[SourceRow]:
    for row in rows:
        if row.number > MAX_TASKS:
            raise SetError(f"{name}: has more than {MAX_TASKS} rows")
        yield row


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 2):
                number += 1
                if not line.strip():
                    continue
                try:
                    yield SourceRow(f"{path}, line {number}", number, parse_row(line.rstrip(b"\r\n")))
                except RecordError as error:
                    raise SetError(f"{path}, line {number}: {error}; {_LAYOUT}") from None
    except OSError as error:
        raise SetError(f"{path}: cannot be read ({error.strerror})") from None


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    import pyarrow as pa  # imported lazily: most sets are read without it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            held = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
            if held > MAX_FILE_BYTES or file.metadata.num_rows > MAX_TASKS:
                raise SetError(f"{path}: {file.metadata.num_rows} rows of {held} bytes exceed the limits")
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield SourceRow(f"{path}, row {number}", number, values)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SetError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SetError(f"{path}: not a readable Parquet file ({reason})") from None
