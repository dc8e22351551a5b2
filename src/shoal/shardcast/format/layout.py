"""How the files of a blob are cut into shards.

Every file is cut separately into pieces of the shard size, the last one short; an empty file has none. Shards are
numbered across all files in order. Nothing is stored per shard: place and size follow from the number.

Also here: which names a file of a checkpoint may have, wherever the name came from; and which checkpoints are adapters.

A name is one plain part of a path: no separator, no leading dot, only ASCII letters, digits, dot, underscore and
hyphen, at most 128 of them. So joining it to a folder always stays directly inside that folder.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate


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


class ShardLayout:
    """The shards of some files."""

    def __init__(self, files: Iterable[File], shard_size: int) -> None:
        self.files = tuple(files)
        self.shard_size = shard_size
        self.total = sum(file.size for file in self.files)
        self.shards = ShardTable(self.files, shard_size)


class ShardTable:
    """The shards by number, computed on access."""

    def __init__(self, files: tuple[File, ...], shard_size: int) -> None:
        self._files = files
        self._shard_size = shard_size
        # Number of the first shard of each file, then the total number of shards.
        self._starts = list(accumulate((count_shards(file.size, shard_size) for file in files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Shard]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Shard:
        if not 0 <= index < len(self):
            raise IndexError(f"shard {index} out of range, there are {len(self)} shards")
        # The last start not above the index: empty files share a start with the next file and never own a shard.
        number = bisect_right(self._starts, index) - 1
        file = self._files[number]
        offset = (index - self._starts[number]) * self._shard_size
        return Shard(index, file.name, offset, min(self._shard_size, file.size - offset))


def count_shards(size: int, shard_size: int) -> int:
    """Number of shards of one file."""
    return -(-size // shard_size)


def group_shards(shards: Iterable[Shard], size: int) -> Iterator[list[Shard]]:
    """Group shards in order, into lists of one file each and of about `size` bytes, or one shard that is larger."""
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


def is_single_pair(old: ShardLayout, new: ShardLayout) -> bool:
    """Whether a delta between the two goes from a single file to a single file, whatever their names."""
    return len(old.files) == len(new.files) == 1


BASE_VERSION = 0
"""the version that adapters are laid over"""


def holds_adapter(names: Iterable[str]) -> bool:
    """Whether files of these names are an adapter in peft's format, which is of no use without version 0."""
    return "adapter_config.json" in (found := set(names)) and "config.json" not in found


MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object) -> str:
    """Return the name if it may be written to disk; otherwise raise `ValueError`."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        shown = repr(name if not isinstance(name, str) else name[:MAX_NAME_CHARS])[:200]
        raise ValueError(
            f"invalid file name {shown}: 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 . _ -, first a letter or digit"
        )
    return name
