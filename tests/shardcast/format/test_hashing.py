"""Hashes of shards and roots, against BLAKE3 computed at once."""

import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.errors import ShardError
from shoal.shardcast.format.hashing import BUFFER_BYTES, hash_range, hash_root, hash_shards
from shoal.shardcast.format.layout import File, ShardLayout


def test_the_root_covers_sizes_and_hashes_as_written_down() -> None:
    hashes = bytes(range(64))
    text = b"shoal-shardcast-root-1" + (100).to_bytes(8, "little") + (64).to_bytes(8, "little") + hashes
    assert hash_root(100, 64, hashes) == hash_root(100, 64, bytearray(hashes)) == blake3(text).digest()


def test_a_root_is_as_published() -> None:
    assert hash_root(0, 65536, b"").hex() == "5e2489078761e0216d5f231a90435e4b48d2dee02235b53cede59e2913cfb350"


@given(st.integers(0, 1 << 44), st.integers(1, 1 << 26), st.binary(max_size=64))
def test_other_sizes_or_hashes_have_another_root(total: int, size: int, hashes: bytes) -> None:
    root = hash_root(total, size, hashes)
    assert root not in (hash_root(total + 1, size, hashes), hash_root(total, size + 1, hashes))
    assert root != hash_root(total, size, hashes + b"\0")


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (5, BUFFER_BYTES), (7, 2 * BUFFER_BYTES + 3), (0, 0)])
def test_a_range_has_the_hash_of_its_bytes(tmp_path: Path, offset: int, size: int) -> None:
    data = os.urandom(2 * BUFFER_BYTES + 100)
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb") as file:
        assert hash_range(file.fileno(), offset, size) == blake3(data[offset : offset + size]).digest()


def test_a_file_that_ends_too_early_is_a_shard_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 99)
    with pytest.raises(ShardError, match="ends at byte 99"):
        hash_shards(tmp_path / "f", ShardLayout([File("f", 100)], 40).shards)


def test_shards_are_hashed_each_on_its_own_and_the_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    hashes = hash_shards(tmp_path / "f", ShardLayout([File("f", 100)], 40).shards)
    assert hashes == [blake3(b"x" * size).digest() for size in (40, 40, 20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
