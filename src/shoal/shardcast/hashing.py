"""BLAKE3 of shards and blobs.

The root of a blob is a hash over its shards' hashes, so one pass over the data gives both, and shards can be hashed in
parallel and out of order.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from shoal.shardcast.errors import ShardError
from shoal.shardcast.layout import Shard

HASH_BYTES = 32
BUFFER_BYTES = 1 << 20
"""Bytes read at once by each thread: enough to make calls cheap, small enough to stay in the cache."""
_ROOT_CONTEXT = b"shoal-shardcast-root-1"
"""Changing breaks: every manifest."""

_local = threading.local()


def hash_root(total: int, shard_size: int, hashes: bytes | bytearray) -> bytes:
    """The root of a blob of `total` bytes with these hashes of its shards, one after the other."""
    hasher = blake3(_ROOT_CONTEXT)
    hasher.update(total.to_bytes(8, "little") + shard_size.to_bytes(8, "little"))
    return hasher.update(hashes).digest()


def hash_range(descriptor: int, offset: int, size: int) -> bytes:
    """The hash of a range of a file; ShardError where the file ends before it."""
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


def hash_shards(path: Path, shards: Sequence[Shard]) -> list[bytes]:
    """The hashes of shards of the file at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [hash_range(descriptor, shard.offset, shard.size) for shard in shards]
    finally:
        os.close(descriptor)


def own_buffer() -> memoryview:
    """This thread's buffer. Made once: the first touch of fresh memory costs more than the hash of what is in it."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BUFFER_BYTES))
    view: memoryview = _local.buffer
    return view
