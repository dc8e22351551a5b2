"""How the files of a blob are cut into shards.

Every file is cut on its own into pieces of the shard size, the last one short; an empty file has none. Shards are
numbered through all files in their order. Nothing is stored per shard: place and size follow from the number.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload


@dataclass(frozen=True, slots=True)
class File:
    """One file of a blob."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of one file."""

    index: int
    """number within the blob"""
    file: str
    """name of the file"""
    offset: int
    """first byte within the file"""
    size: int


class Layout:
    """The shards of some files."""

    def __init__(self, files: Iterable[File], shard_size: int) -> None:
        self.files = tuple(files)
        self.shard_size = shard_size
        self.total = sum(file.size for file in self.files)
        self.shards: Sequence[Shard] = _Shards(self.files, shard_size)


class _Shards(Sequence[Shard]):
    def __init__(self, files: tuple[File, ...], shard_size: int) -> None:
        self._files = files
        self._shard_size = shard_size
        # Number of the first shard of each file, then the number of all shards.
        self._starts = list(accumulate((count_shards(file.size, shard_size) for file in files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} shards, no shard {index}")
        # The last start not above the index: empty files share a start with the file after them and never own a shard.
        number = bisect_right(self._starts, index) - 1
        file = self._files[number]
        offset = (index - self._starts[number]) * self._shard_size
        return Shard(index, file.name, offset, min(self._shard_size, file.size - offset))


def count_shards(size: int, shard_size: int) -> int:
    """Shards of one file."""
    return -(-size // shard_size)


def group_shards(shards: Iterable[Shard], size: int) -> Iterator[list[Shard]]:
    """Shards in their order, in lists of one file each and of about `size` bytes, or one shard that is larger."""
    group: list[Shard] = []
    filled = 0
    for shard in shards:
        if group and (group[0].file != shard.file or filled + shard.size > size):
            yield group
            group, filled = [], 0
        group.append(shard)
        filled += shard.size
    if group:
        yield group


def is_single_pair(old: Layout, new: Layout) -> bool:
    """Whether a delta between the two is one from file to file, whatever the files are called."""
    return len(old.files) == len(new.files) == 1
