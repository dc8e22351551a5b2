"""A task set: records under one content hash, and what is kept of them.

Invariants:
- the canonical form is one line per record in its one spelling, in the order of ids, each line ended by a newline. Its
  SHA-256 is the set's hash: files in other formats, orders or spellings that say the same have the same hash;
- the canonical form read back is the same set. Bytes that come from elsewhere are checked against a hash first;
- ids are unique; sizes are bounded before anything is parsed;
- a filter takes away and never reorders, so the tasks that are kept follow from (hash, filter) alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.tasks.sets.record import MAX_LINE_BYTES, RecordError, TaskRecord, dump_record, parse_record

MAX_SET_BYTES = 256 << 20
"""of the canonical form"""
MAX_TASKS = 1 << 20


class SetError(ConfigError):
    """Files or bytes that are no task set, or not the one that is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFilter:
    """Which tasks of a set are used."""

    model: str = ""
    """whose pass rates count; empty: none do"""
    low: float = 0.0
    """lowest pass rate"""
    high: float = 1.0
    """highest pass rate"""
    max_chars: int = 0
    """longest prompt in characters; 0: any"""

    def keeps(self, record: TaskRecord) -> bool:
        """Whether a task is used; one whose pass rate was not measured is not."""
        if self.max_chars and len(record.text) > self.max_chars:
            return False
        if not self.model:
            return True
        rate = record.difficulty.get(self.model)
        return rate is not None and self.low <= rate <= self.high


class TaskSet:
    """Records in canonical order."""

    def __init__(self, records: Iterable[TaskRecord], *, name: str = "task set") -> None:
        self.records = tuple(sorted(records, key=lambda record: record.id))
        self.name = name
        if not self.records:
            raise SetError(f"{name}: holds no tasks")
        if len(self.records) > MAX_TASKS:
            raise SetError(f"{name}: holds {len(self.records)} tasks, allowed are {MAX_TASKS}")
        ids = [record.id for record in self.records]
        twice = next((one for one, other in pairwise(ids) if one == other), None)
        if twice is not None:
            raise SetError(f"{name}: two tasks have the id {twice}")

    @classmethod
    def from_bytes(cls, data: bytes, wanted: str, *, name: str = "task set") -> "TaskSet":
        """The set of canonical bytes, if they have the hash that is wanted."""
        if len(data) > MAX_SET_BYTES:
            raise SetError(f"{name}: has {len(data)} bytes, allowed are {MAX_SET_BYTES}")
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            raise SetError(f"{name}: has the hash {found[:16]}..., wanted is {wanted[:16]}...")
        records = []
        for number, line in enumerate(data.splitlines(), 1):
            try:
                records.append(parse_record(line))
            except RecordError as error:
                raise SetError(f"{name}, line {number}: {error}") from None
        return cls(records, name=name)

    @cached_property
    def data(self) -> bytes:
        """The canonical form."""
        lines = []
        for record in self.records:
            line = dump_record(record)
            if len(line) > MAX_LINE_BYTES:
                raise SetError(f"{self.name}: task {record.id} has {len(line)} bytes, allowed are {MAX_LINE_BYTES}")
            lines.append(line + b"\n")
        data = b"".join(lines)
        if len(data) > MAX_SET_BYTES:
            raise SetError(f"{self.name}: has {len(data)} bytes, allowed are {MAX_SET_BYTES}")
        return data

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def task_types(self) -> tuple[str, ...]:
        """All that occur, sorted."""
        return tuple(sorted({record.task_type for record in self.records}))

    def keep(self, wanted: SetFilter) -> dict[str, tuple[TaskRecord, ...]]:
        """The tasks that a filter leaves, by source; sources in order of their names."""
        kept: dict[str, list[TaskRecord]] = {}
        for record in self.records:
            if wanted.keeps(record):
                kept.setdefault(record.source, []).append(record)
        if not kept:
            raise SetError(f"tasks.filter: leaves none of the {len(self.records)} tasks of {self.name}")
        return {source: tuple(kept[source]) for source in sorted(kept)}

    def save(self, path: Path) -> None:
        """Write the canonical form."""
        write_atomic(path, self.data)


def weigh_sources(weights: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The weight of each source. Without any given it is the source's size, so that each task is as likely as any
    other; with some given, a source without one is not used."""
    if not weights:
        return dict(sizes)
    unknown = next((name for name in weights if name not in sizes), None)
    if unknown is not None:
        raise SetError(f"tasks.weights.{unknown}: no task of this source is left; there are {', '.join(sizes)}")
    used = {name: weights[name] for name in sizes if weights.get(name, 0) > 0}
    if not used:
        raise SetError("tasks.weights: at least one source needs a weight above 0")
    return used
