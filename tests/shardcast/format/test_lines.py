"""The lines of a manifest, read back from their file."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.format.layout import File
from shoal.shardcast.format.records import Hashes, LineBuffer, ManifestHead, sign_record

LINES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")), max_size=20)


def fill(lines: list[bytes], path: Path | None = None) -> LineBuffer:
    found = LineBuffer()
    for number, line in enumerate(lines):
        if path is not None:
            path.write_bytes(b"".join(one + b"\n" for one in lines[: number + 1]))
            found.keep_in(path)
        found.append(line)
    return found


@given(LINES, st.integers(0, 25), st.integers(0, 200))
def test_lines_are_the_same_in_memory_and_in_a_file(
    tmp_path_factory: Any, lines: list[bytes], first: int, size: int
) -> None:
    for found in (fill(lines), fill(lines, tmp_path_factory.mktemp("lines") / "manifest")):
        assert list(found) == lines and len(found) == len(lines)
        assert list(found)[first:] == lines[first:]
        assert found.num_bytes == sum(len(line) + 1 for line in lines)
        data, following = found.read_batch(first, size)
        assert data == b"".join(line + b"\n" for line in lines[first:following])
        assert following == first if first >= len(lines) else following > first
        assert following - first <= 1 or len(data) <= size


def test_batches_lead_from_the_first_line_to_the_last() -> None:
    lines = [b"x" * size for size in (1, 90, 0, 40, 200, 3)]
    found, number, received = fill(lines), 0, b""
    while number < len(lines):
        data, number = found.read_batch(number, 100)
        received += data
    assert received == b"".join(line + b"\n" for line in lines)


def test_a_line_number_out_of_range_is_an_index_error() -> None:
    found = fill([b"a", b"b"])
    assert (found[0], found[1]) == (b"a", b"b")
    for index in (2, -1):
        with pytest.raises(IndexError):
            found[index]


def test_a_file_that_was_cut_off_is_an_error_of_the_disk_and_the_head_is_still_known(tmp_path: Path) -> None:
    found = fill([b"head", b"second"], tmp_path / "manifest")
    (tmp_path / "manifest").write_bytes(b"head\nsec")
    assert found[0] == b"head"
    with pytest.raises(OSError, match="shorter"):
        found.read_batch(0, 100)


def test_a_version_of_many_shards_takes_little_more_memory_than_their_hashes(maker: Any, run: Any) -> None:
    num, portion = 1 << 16, 3800

    async def work() -> None:
        store = await maker.open_store()
        head = ManifestHead(maker.run, 1, 1, 1 << 16, (File("w", num << 16),), None, True)
        entry = await store.adopt(sign_record(maker.key, "", 0, head))
        tracemalloc.start()
        try:
            for first in range(0, num, portion):
                record = Hashes(first, (bytes(32),) * min(portion, num - first))
                await entry.append(sign_record(maker.key, entry.digest, len(entry.log.lines), record))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert entry.log.num_hashes == num
        assert held < 1.25 * 32 * num
        await store.close()
        again = await maker.open_store()
        assert again.find(1).log.num_hashes == num and len(again.find(1).log.lines) == len(entry.log.lines)
        await again.close()

    run(work)
