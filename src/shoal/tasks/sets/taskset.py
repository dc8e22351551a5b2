"""A task set: records under one content hash, and the filter over them.

Invariants:
- the canonical form is one line per record in its canonical encoding, in order of ids, each ended by a newline. Its
  SHA-256 is the set's hash: files in other formats, orders or encodings of the same tasks have the same hash;
- reading the canonical form gives the same set. Untrusted bytes are checked against a hash first;
- ids are unique; sizes are bounded before anything is parsed;
- a filter removes and never reorders, so the kept tasks follow from (hash, filter) alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from shoal.config.tasks import FilterConfig
from shoal.errors import ConfigError
from shoal.tasks.sets.record import MAX_LINE_BYTES, RecordError, TaskRecord, dump_record, parse_record
from shoal.util.files import write_atomic

MAX_SET_BYTES = 256 << 20
"""largest canonical form"""
MAX_TASKS = 1 << 20


class SetError(ConfigError):
    """Files or bytes that are not a task set, or not the expected one."""


def is_kept(record: TaskRecord, wanted: FilterConfig) -> bool:
    """Whether a filter keeps a task; without a measured pass rate it is dropped if the filter uses pass rates."""
    if wanted.max_chars and len(record.text) > wanted.max_chars:
        return False
    if not wanted.model:
        return True
    rate = record.difficulty.get(wanted.model)
    return rate is not None and wanted.min <= rate <= wanted.max


class TaskSet:
    """Records in canonical order."""

    def __init__(self, records: Iterable[TaskRecord], *, name: str = "task set") -> None:
        self.records = tuple(sorted(records, key=lambda record: record.id))
        self.name = name
        if not self.records:
            raise SetError(f"{name}: has no tasks")
        if len(self.records) > MAX_TASKS:
            raise SetError(f"{name}: has {len(self.records)} tasks, allowed are {MAX_TASKS}")
        ids = [record.id for record in self.records]
        twice = next((one for one, other in pairwise(ids) if one == other), None)
        if twice is not None:
            raise SetError(
                f"{name}: two tasks have the id {twice}; equal rows without ids have equal ids, so keep one of them"
            )

    @classmethod
    def from_bytes(cls, data: bytes, wanted: str, *, name: str = "task set") -> "TaskSet":
        """The set of canonical bytes; SetError if they do not have the expected hash."""
        if len(data) > MAX_SET_BYTES:
            raise SetError(f"{name}: has {len(data)} bytes, allowed are {MAX_SET_BYTES}")
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            raise SetError(f"{name}: has the hash {found[:16]}..., expected {wanted[:16]}...")
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
        """All task types in the set, sorted."""
        return tuple(sorted({record.task_type for record in self.records}))

    def keep(self, wanted: FilterConfig) -> dict[str, tuple[TaskRecord, ...]]:
        """The tasks that a filter keeps, by source; sources in order of their names."""
        kept: dict[str, list[TaskRecord]] = {}
        for record in self.records:
            if is_kept(record, wanted):
                kept.setdefault(record.source, []).append(record)
        if not kept:
            rated = sorted({model for record in self.records for model in record.difficulty})
            has = f"; they have pass rates of {', '.join(rated[:8]) or 'no model'}, not of {wanted.model}"
            hint = has if wanted.model and wanted.model not in rated else ""
            raise SetError(f"tasks.filter: keeps none of the {len(self.records)} tasks of {self.name}{hint}")
        return {source: tuple(kept[source]) for source in sorted(kept)}

    def save(self, path: Path) -> None:
        """Write the canonical form."""
        write_atomic(path, self.data)


def weigh_sources(weights: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The weight of each source. If none is given it is the source's size, so that all tasks are equally likely; if
    some are given, a source without one is not used."""
    if not weights:
        return dict(sizes)
    unknown = next((name for name in weights if name not in sizes), None)
    if unknown is not None:
        raise SetError(f"tasks.weights.{unknown}: no task of this source is left; sources are {', '.join(sizes)}")
    used = {name: weights[name] for name in sizes if weights.get(name, 0) > 0}
    if not used:
        raise SetError("tasks.weights: at least one source needs a weight above 0")
    return used
