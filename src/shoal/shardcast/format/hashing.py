"""BLAKE3 of shards and blobs.

The root of a blob is a hash over its shards' hashes, so one pass over the data gives both, and shards can be hashed in
parallel and out of order.
"""

import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Executor
from contextlib import aclosing
from pathlib import Path

from blake3 import blake3

from shoal.shardcast.errors import ShardError
from shoal.shardcast.format.layout import Shard, group_shards
from shoal.util.aio import map_ordered

HASH_BYTES = 32
BUFFER_BYTES = 1 << 20
"""Bytes read at once by each thread: enough to make calls cheap, small enough to stay in the cache."""
GROUP_BYTES = 1 << 23
"""Approximate number of bytes that one thread hashes at a time."""
NUM_AHEAD = 6
"""Groups that are hashed or queued ahead of the current one."""
_ROOT_CONTEXT = b"shoal-shardcast-root-1"
"""Changing breaks: every manifest."""

_local = threading.local()


def hash_root(total: int, shard_size: int, hashes: bytes | bytearray) -> bytes:
    """The root of a blob of `total` bytes with these shard hashes, concatenated."""
    hasher = blake3(_ROOT_CONTEXT)
    hasher.update(total.to_bytes(8, "little") + shard_size.to_bytes(8, "little"))
    return hasher.update(hashes).digest()


def hash_range(descriptor: int, offset: int, size: int) -> bytes:
    """The hash of a range of a file; ShardError if the file is too short."""
    hasher = blake3()
    view = own_buffer()
    end = offset + size
    while offset < end:
        length = os.preadv(descriptor, [view[: min(len(view), end - offset)]], offset)
        if length == 0:
            raise ShardError(f"the file ends at byte {offset}, before the shard does")
        hasher.update(view[:length])
        offset += length
    return hasher.digest()


def hash_shards(path: Path, shards: Iterable[Shard]) -> list[bytes]:
    """The hashes of shards of the file at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [hash_range(descriptor, shard.offset, shard.size) for shard in shards]
    finally:
        os.close(descriptor)


async def hash_ordered(
    pool: Executor, path_of: Callable[[str], Path], shards: Iterable[Shard]
) -> AsyncGenerator[tuple[Shard, bytes | None], None]:
    """Yield shards with their hashes, in order, computed by several threads; None if the file is missing or too short.

    Close it with `aclosing`.
    """

    def hash_group(group: list[Shard]) -> list[bytes] | list[None]:
        try:
            return hash_shards(path_of(group[0].file), group)
        except (ShardError, FileNotFoundError):
            return [None] * len(group)

    groups = map_ordered(pool, hash_group, group_shards(shards, GROUP_BYTES), NUM_AHEAD)
    async with aclosing(groups):
        async for group, hashes in groups:
            for pair in zip(group, hashes, strict=True):
                yield pair


def own_buffer() -> memoryview:
    """This thread's buffer. Created once: the first touch of fresh memory costs more than hashing its contents."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BUFFER_BYTES))
    view: memoryview = _local.buffer
    return view
