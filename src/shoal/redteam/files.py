"""What authors of bad files have in common: the manifest stays that of honest work, and is true of the bytes."""

import hashlib
import io
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.files import write_atomic
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.entry import make_entry
from shoal.submission.write import Proofs, Written, encode_groups
from shoal.worker.author import Author

Spoil = Callable[[bytes], bytes]
"""from an honest file to what is handed in"""
_LAYOUT = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "store_schema": False}


class FileAuthor(Author):
    """Does honest work and hands in something else, in each of its ways in turn."""

    def __init__(self, recipe: Recipe, *ways: Spoil) -> None:
        super().__init__(recipe)
        self.ways = ways
        """in the order in which they are taken"""
        self._next = cycle(ways)

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
        """A bad file; hash, size and rollouts of its manifest are such that the coordinator takes it."""
        data = next(self._next)(encode_groups(groups, proofs))
        write_atomic(path, data)
        entries = tuple(make_entry(rollout) for group in groups for rollout in group.rollouts)
        return Written(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data), entries=entries)


def load_table(data: bytes) -> pa.Table:
    """The rows of an honest file."""
    return pq.read_table(io.BytesIO(data))


def save_table(table: pa.Table, **options: Any) -> bytes:
    """A file in the layout's way, but for the options."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=max(1, table.num_rows), **_LAYOUT | options)
    return buffer.getvalue()


def put_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray, *, nullable: bool = False) -> pa.Table:
    """The table with another column in the place of one."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, pa.field(name, column.type, nullable=nullable), column)
