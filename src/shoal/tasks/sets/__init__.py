"""Task sets: problems from files and generators, under one content hash."""

from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.places import open_set
from shoal.tasks.sets.record import RecordError, TaskRecord, dump_record, parse_record
from shoal.tasks.sets.taskset import SetError, SetFilter, TaskSet

__all__ = [
    "RecordError",
    "SetError",
    "SetFamily",
    "SetFilter",
    "TaskRecord",
    "TaskSet",
    "dump_record",
    "open_set",
    "parse_record",
]
