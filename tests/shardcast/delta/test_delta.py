"""Deltas of whole checkpoints: the new one is restored bit for bit, or there is one error and nothing is left."""

import io
import json
import random
import struct
import threading
import time
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from shoal.shardcast.delta import codec
from shoal.shardcast.delta import delta as delta_module
from shoal.shardcast.delta.delta import (
    BlockWorkers,
    DeltaError,
    DeltaWriter,
    Scratch,
    UselessDeltaError,
    apply_chain,
    encode_delta,
)
from shoal.shardcast.delta.format import MAGIC, count_blocks, list_blocks
from shoal.shardcast.delta.tensors import ElementSpan

Files = dict[str, bytes]
DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "F8_E4M3": 1, "BOOL": 1, "F4": 0}
_SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 elements: small files have many."""
    monkeypatch.setattr(codec, "BLOCK_ELEMENTS", 64)


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def read_folder(path: Path) -> Files:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def encode(old: Path, new: Path, **options: Any) -> tuple[bytes, DeltaWriter]:
    out = io.BytesIO()
    stats = encode_delta(old, new, out, **options)
    return out.getvalue(), stats


def apply(old: Path, delta: bytes, folder: Path, **options: Any) -> Path:
    (folder / "delta").write_bytes(delta)
    out = folder / "out"
    apply_chain(old, [folder / "delta"], out, **options)
    return out


def check_round_trip(folder: Path, old: Files, new: Files) -> DeltaWriter:
    before, after = write_folder(folder / "old", old), write_folder(folder / "new", new)
    delta, stats = encode(before, after)
    assert read_folder(apply(before, delta, folder)) == new
    assert read_folder(before) == old
    assert (stats.full_bytes, stats.delta_bytes) == (sum(map(len, new.values())), len(delta))
    return stats


def draw_values(count: int, seed: int, dtype: str = "<u2") -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(count * np.dtype(dtype).itemsize), dtype=dtype).copy()


def step_some(values: np.ndarray, share: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    moved = values + rng.choice(np.array([1, -1], dtype=np.int8), len(values)).view(np.uint8).astype(values.dtype)
    return np.where(rng.random(len(values)) < share, moved, values)


def write_tensors(tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: str = "") -> bytes:
    head: dict[str, Any] = {"__metadata__": {"step": metadata}} if metadata else {}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of three files: tensors of two types with few changes, one with many, a config."""
    weights, scales = draw_values(900, 0), draw_values(70, 1, "<u4")
    old = {
        "config.json": b'{"model_type": "tiny"}',
        "model.safetensors": save({"w": weights, "s": scales}),
        "optimizer.safetensors": save({"m": draw_values(130, 3, "<u4")}),
    }
    new = old | {
        "model.safetensors": save({"w": step_some(weights, 0.05, 0), "s": step_some(scales, 0.3, 1)}),
        "optimizer.safetensors": save({"m": step_some(draw_values(130, 3, "<u4"), 1, 2)}),
    }
    return write_folder(tmp_path / "old", old), write_folder(tmp_path / "new", new)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Files, Files]:
    """A file of tensors before and after a step, of odd shapes and all kinds of changes."""
    tensors: list[dict[str, tuple[str, list[int], bytes]]] = [{}, {}]
    for index in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.sampled_from([[], [0], [1], [7], [3, 0, 2], [5, 13], [64], [65], [129], [2, 3, 50]]))
        count = int(np.prod(shape))
        size = count * DTYPES[dtype] if DTYPES[dtype] else (count + 1) // 2
        seed, share = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.02, 0.2, 0.7, 1.0]))
        values = draw_values(size // (DTYPES[dtype] or 1), seed, f"<u{DTYPES[dtype] or 1}")
        for side, data in zip(tensors, (values, step_some(values, share, seed)), strict=True):
            side[f"t{index}"] = (dtype, shape, data.tobytes())
    metadata = draw(st.sampled_from([("", ""), ("6", "7"), ("9", "10")]))
    old, new = (write_tensors(side, text) for side, text in zip(tensors, metadata, strict=True))
    return {"model.safetensors": old}, {"model.safetensors": new}


@_SHARED
@given(checkpoints())
def test_a_step_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, files: tuple[Files, Files]) -> None:
    check_round_trip(tmp_path_factory.mktemp("delta"), *files)


@_SHARED
@given(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), st.booleans())
def test_any_two_files_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, contents: tuple[bytes, bytes], single: bool
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    if not single:
        check_round_trip(folder, {"file": contents[0]}, {"file": contents[1]})
        return
    for name, data in zip(("old", "new"), contents, strict=True):
        (folder / name).write_bytes(data)
    delta, _ = encode(folder / "old", folder / "new")
    assert apply(folder / "old", delta, folder).read_bytes() == contents[1]


def test_files_may_appear_disappear_change_and_stay(tmp_path: Path) -> None:
    old = {"same.json": b"{}" * 500, "gone.txt": b"x", "longer.txt": b"abc", "changed.txt": b"abc", "empty": b""}
    new = {"same.json": b"{}" * 500, "added.txt": b"y", "longer.txt": b"abcd", "changed.txt": b"abd", "empty": b""}
    check_round_trip(tmp_path, old, new)


def test_a_folder_without_files_is_a_checkpoint(tmp_path: Path) -> None:
    check_round_trip(tmp_path, {"a": b"1"}, {})


def test_a_tensor_that_was_added_does_not_make_the_others_new(tmp_path: Path) -> None:
    weights = draw_values(5000, 0)
    old = {"m.safetensors": write_tensors({"w": ("BF16", [5000], weights.tobytes())})}
    added = {"a": ("F32", [3], bytes(12)), "w": ("BF16", [5000], step_some(weights, 0.01, 0).tobytes())}
    stats = check_round_trip(tmp_path, old, {"m.safetensors": write_tensors(added)})
    assert stats.delta_bytes < stats.full_bytes / 3


def test_statistics_count_elements_and_changes(pair: tuple[Path, Path]) -> None:
    old, new = pair
    _, stats = encode(old, old)
    assert (stats.num_changed, stats.ratio > 1) == (0, True)
    heads = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in old.glob("*.safetensors"))
    assert stats.num_elements == heads + 900 + 70 + 130 + len(b'{"model_type": "tiny"}')
    before, after = ((path / "optimizer.safetensors").read_bytes() for path in pair)
    assert encode(old / "optimizer.safetensors", new / "optimizer.safetensors")[1].num_changed == 130
    assert before != after


def test_the_number_of_threads_changes_neither_the_delta_nor_the_result(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = pair
    deltas = {encode(old, new, threads=threads)[0] for threads in (None, 1, 2, 3, 8)}
    assert len(deltas) == 1
    for threads in (1, 3):
        folder = tmp_path / str(threads)
        folder.mkdir()
        assert read_folder(apply(old, next(iter(deltas)), folder, threads=threads)) == read_folder(new)


def test_blocks_of_the_full_size_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert codec.BLOCK_ELEMENTS == 1 << 21
    values = draw_values((1 << 21) + 5, 0)
    files = [{"m.safetensors": save({"w": data})} for data in (values, step_some(values, 0.01, 0))]
    stats = check_round_trip(tmp_path, *files)
    assert stats.ratio > 90


def test_applying_twice_gives_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(*pair)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert read_folder(apply(pair[0], delta, tmp_path / name)) == read_folder(pair[1])


def test_what_is_already_there_is_not_touched(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(*pair)
    write_folder(tmp_path / "out", {"precious": b"1"})
    with pytest.raises(FileExistsError):
        apply(pair[0], delta, tmp_path)
    assert read_folder(tmp_path / "out") == {"precious": b"1"}

    single, _ = encode(pair[0] / "config.json", pair[1] / "config.json")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "out").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        apply(pair[0] / "config.json", single, tmp_path / "file")
    assert (tmp_path / "file" / "out").read_bytes() == b"precious"


def change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_parent_with_one_different_bit_is_reported_as_such(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(*pair)
    size = (pair[0] / "model.safetensors").stat().st_size
    for place in (0, 30, size // 2, size - 1):
        change_byte(pair[0] / "model.safetensors", place)
        with pytest.raises(DeltaError, match="a different parent"):
            apply(pair[0], delta, tmp_path)
        change_byte(pair[0] / "model.safetensors", place)
        assert not (tmp_path / "out").exists()
    change_byte(pair[0] / "config.json", 3)
    with pytest.raises(DeltaError, match="a different parent"):
        apply(pair[0], delta, tmp_path)


def test_a_parent_of_another_shape_is_reported_as_such(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(*pair)
    config = pair[0] / "config.json"
    config.write_bytes(config.read_bytes() + b" ")
    with pytest.raises(DeltaError, match=r"config\.json: the parent that the delta was made for has 22 bytes here"):
        apply(pair[0], delta, tmp_path)
    config.unlink()
    with pytest.raises(DeltaError, match="has this file"):
        apply(pair[0], delta, tmp_path)
    with pytest.raises(DeltaError, match="has this file"):
        apply(tmp_path / "nowhere", delta, tmp_path)
    with pytest.raises(DeltaError, match="has this file"):
        apply(pair[0] / "model.safetensors", delta, tmp_path)
    assert not (tmp_path / "out").exists()


def test_more_bytes_than_allowed_are_refused_before_anything_is_written(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    delta, stats = encode(*pair)
    with pytest.raises(DeltaError, match="the maximum is"):
        apply(pair[0], delta, tmp_path, max_bytes=stats.full_bytes - 1)
    assert not (tmp_path / "out").exists()
    apply(pair[0], delta, tmp_path, max_bytes=stats.full_bytes)


def test_checkpoints_that_cannot_be_compared_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match="one is a folder and one a file"):
        encode(pair[0], pair[1] / "config.json")
    with pytest.raises(DeltaError, match="no such checkpoint"):
        encode(tmp_path / "nowhere", pair[1])
    (pair[1] / ".hidden").write_bytes(b"")
    with pytest.raises(DeltaError, match="invalid file name"):
        encode(*pair)
    (pair[1] / ".hidden").unlink()
    (pair[1] / "folder").mkdir()
    with pytest.raises(DeltaError, match="may contain only files"):
        encode(*pair)


def test_threads_must_be_at_least_one(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        encode(*pair, threads=0)


@_SHARED
@given(st.data())
def test_a_damaged_delta_is_an_error_or_another_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    files = {"a.safetensors": save({"w": draw_values(300, 0)}), "b.json": b"{}", "c.txt": bytes(100)}
    changed = files | {"a.safetensors": save({"w": step_some(draw_values(300, 0), 0.2, 0)}), "c.txt": bytes(101)}
    old, new = write_folder(folder / "old", files), write_folder(folder / "new", changed)
    delta = bytearray(encode(old, new)[0])
    whole = len(delta)
    for _ in range(data.draw(st.integers(0, 3))):
        delta[data.draw(st.integers(0, len(delta) - 1))] = data.draw(st.integers(0, 255))
    del delta[data.draw(st.one_of(st.just(whole), st.integers(0, whole))) :]
    try:
        apply(old, bytes(delta), folder, max_bytes=1 << 20)
        assert len(delta) == whole, "a delta that was cut short cannot be applied"
    except DeltaError:
        assert not (folder / "out").exists()
    assert read_folder(old) == files


def test_every_way_to_cut_a_delta_short_is_an_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(pair[0] / "model.safetensors", pair[1] / "model.safetensors")
    for length in [*range(60), *random.Random(0).sample(range(60, len(delta)), 60), len(delta) - 1]:
        with pytest.raises(DeltaError, match="ends too early"):
            apply(pair[0] / "model.safetensors", delta[:length], tmp_path)
        assert not (tmp_path / "out").exists()


def test_what_follows_the_last_block_is_an_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, _ = encode(*pair)
    with pytest.raises(DeltaError, match="after its last block"):
        apply(pair[0], delta + b"\0", tmp_path)
    assert not (tmp_path / "out").exists()


def make_delta(header: object, blocks: bytes = b"", *, magic: bytes = MAGIC, version: int = 1) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return struct.pack("<12sII", magic, version, len(data)) + data + blocks


def make_entry(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "parent": None, "size": 4, "spans": [[2, 2, None]]} | changes


def make_header(*entries: object) -> dict[str, Any]:
    return {"files": list(entries), "folder": True}


FRESH = struct.pack("<BQIBBI", 3, 0, 10, 1, 0, 2) + b"\x01\x02" + struct.pack("<BI", 0, 0)


def test_the_smallest_delta_is_what_the_format_says(tmp_path: Path) -> None:
    old, new = write_folder(tmp_path / "old", {}), write_folder(tmp_path / "new", {"a": b"\1\2"})
    entry = make_entry(size=2, spans=[[1, 2, None]])
    delta = make_delta(make_header(entry), struct.pack("<BQIBBI", 3, 0, 8, 1, 0, 2) + b"\1\2")
    assert encode(old, new)[0] == delta
    assert read_folder(apply(old, delta, tmp_path)) == {"a": b"\1\2"}


@pytest.mark.parametrize(
    ("delta", "complaint"),
    [
        (b"", "ends too early"),
        (make_delta(make_header(), magic=b"another-magi"), "not a delta"),
        (make_delta(make_header(), version=2), "format 2"),
        (struct.pack("<12sII", MAGIC, 1, 0xFFFFFFFF), "header is too long"),
        (make_delta(b"{"), "damaged"),
        (make_delta(b"\xff\xff"), "damaged"),
        (make_delta(b"[" * 1_000_000), "damaged"),
        (make_delta(b"9" * 10_000), "damaged"),
        (make_delta([]), "not an object with files"),
        (make_delta({"files": {}, "folder": True}), "not an object with files"),
        (make_delta({"files": []}), "whether it makes a folder"),
        (make_delta({"files": [], "folder": 1}), "whether it makes a folder"),
        (make_delta({"files": [], "folder": False}), "must have one file"),
        (make_delta(make_header() | {"more": 1}), "not canonical"),
        (make_delta(b'{"files": [],"folder":true}'), "not canonical"),
        (make_delta(make_header(make_entry(), make_entry())), "a name occurs twice"),
        (make_delta(make_header(make_entry(name="b"), make_entry())), "sorted by name"),
        (make_delta(make_header(*[make_entry()] * 5000)), "too many files"),
        (make_delta(make_header(5)), "not an object with spans"),
        (make_delta(make_header(make_entry(name="../a"))), "invalid file name"),
        (make_delta(make_header(make_entry(name="/etc/a"))), "invalid file name"),
        (make_delta(make_header(make_entry(name="a\0"))), "invalid file name"),
        (make_delta(make_header(make_entry(name=None))), "invalid file name"),
        (make_delta(make_header(make_entry(size=-4))), "impossible size"),
        (make_delta(make_header(make_entry(size=4.0))), "impossible size"),
        (make_delta(make_header(make_entry(size=True))), "impossible size"),
        (make_delta(make_header(make_entry(size=1 << 60))), "impossible size"),
        (make_delta(make_header(make_entry(parent=-1))), "impossible size"),
        (make_delta(make_header(make_entry(size=5))), "add up to its size"),
        (make_delta(make_header(make_entry(spans=[[2, 2]]))), "not three numbers"),
        (make_delta(make_header(make_entry(spans=[[3, 2, None]]))), "impossible sizes"),
        (make_delta(make_header(make_entry(spans=[["2", 2, None]]))), "impossible sizes"),
        (make_delta(make_header(make_entry(spans=[[2, 0, None]]))), "impossible sizes"),
        (make_delta(make_header(make_entry(spans=[[2, 1 << 50, None]]))), "impossible sizes"),
        (make_delta(make_header(make_entry(spans=[[2, 2, 0]]))), "outside its parent"),
        (make_delta(make_header(make_entry(parent=4, spans=[[2, 2, 1]]))), "outside its parent"),
        (make_delta(make_header(make_entry(parent=4, spans=[[2, 2, -1]]))), "outside its parent"),
        (make_delta(make_header(make_entry())), "ends too early"),
        (make_delta(make_header(make_entry()), struct.pack("<BQI", 3, 0, 0xFFFFFFFF)), "a block is too long"),
        (make_delta(make_header(make_entry()), struct.pack("<BQI", 3, 0, 1 << 22)), "ends too early"),
        (make_delta(make_header(make_entry()), struct.pack("<BQI", 0, 0, 0)), "needs a parent"),
        (make_delta(make_header(make_entry()), struct.pack("<BQIB", 3, 1, 1, 1)), "needs a parent"),
        (make_delta(make_header(make_entry()), FRESH), "damaged"),
        (make_delta(make_header(make_entry(size=1 << 47, spans=[[8, 1 << 44, None]]))), "ends too early"),
    ],
)  # fmt: skip
def test_a_hostile_delta_is_one_error_and_takes_no_memory(delta: bytes, complaint: str, tmp_path: Path) -> None:
    old = write_folder(tmp_path / "old", {"a": b"1234"})
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match=complaint) as caught:
            apply(old, delta, tmp_path, threads=1)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["delta", "old"]


def test_a_file_that_becomes_shorter_meanwhile_is_an_error(pair: tuple[Path, Path]) -> None:
    class Cutter(io.BytesIO):
        def write(self, data: Any) -> int:
            with (pair[1] / "optimizer.safetensors").open("r+b") as file:
                file.truncate(10)
            return super().write(data)

    with pytest.raises(DeltaError, match="became shorter"):
        encode_delta(*pair, Cutter())


def test_no_job_is_running_when_an_error_is_raised() -> None:
    """Files are closed then, and their descriptors may be reused."""
    started, finished = threading.Event(), threading.Event()

    def work(_: Scratch, job: int) -> None:
        if job == 0:
            assert started.wait(10)
            raise DeltaError("first")
        started.set()
        time.sleep(0.2)
        finished.set()

    with BlockWorkers(2) as workers:
        with pytest.raises(DeltaError, match="first"):
            workers.run_jobs(work, [0, 1], lambda _: None)
        assert finished.is_set()


def test_an_error_of_the_disk_passes(pair: tuple[Path, Path]) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        encode_delta(*pair, Full())


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the sizes of encoded blocks."""
    sizes: list[int] = []
    encode_job = delta_module._encode_job

    def encode_and_count(base: int, source: int, scratch: Scratch, block: Any) -> Any:
        sizes.append(block.size)
        return encode_job(base, source, scratch, block)

    monkeypatch.setattr(delta_module, "_encode_job", encode_and_count)
    return sizes


def test_a_delta_that_does_not_pay_is_given_up_after_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    old, new = (
        write_folder(tmp_path / name, {f"part{i}": rng.randbytes(64 * 700) for i in range(3)})
        for name in ("old", "new")
    )
    sizes, out = count_encoded(monkeypatch), io.BytesIO()
    with pytest.raises(UselessDeltaError, match="of the checkpoint"):
        encode_delta(old, new, out, max_share=0.9)
    assert 16 <= len(sizes) <= 32 and out.getvalue() == b""


def test_many_small_files_are_sampled_like_one_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    old, new = (
        write_folder(tmp_path / name, {f"part{i:03d}": rng.randbytes(128) for i in range(200)})
        for name in ("old", "new")
    )
    sizes = count_encoded(monkeypatch)
    with pytest.raises(UselessDeltaError):
        encode_delta(old, new, io.BytesIO(), max_share=0.9)
    assert 16 <= len(sizes) <= 32


def test_the_sample_is_taken_from_all_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    same = rng.randbytes(64 * 900)
    folders = []
    for name in ("old", "new"):  # the first part is new, the second is not: sampling only the beginning would mislead
        folders.append(write_folder(tmp_path / name, {"a": rng.randbytes(64 * 300), "b": same}))
    sizes = count_encoded(monkeypatch)
    delta, stats = encode(*folders, max_share=0.9)
    assert 0.2 < 1 / stats.ratio < 0.6 and len(sizes) > 1200
    assert delta == encode(*folders)[0], "a sample changes nothing"
    with pytest.raises(UselessDeltaError):
        encode(*folders, max_share=0.2)


def test_a_small_checkpoint_is_encoded_without_a_sample(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stats = encode(*pair)
    monkeypatch.setattr(delta_module, "_SAMPLED_FROM", 10**6)
    assert encode(*pair, max_share=0.0)[1] == stats
    monkeypatch.setattr(delta_module, "_SAMPLED_FROM", 0)
    monkeypatch.setattr(delta_module, "_SAMPLE_BLOCKS", 1)
    with pytest.raises(UselessDeltaError):
        encode(*pair, max_share=0.0)


@given(st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(1, 500)), max_size=5))
def test_blocks_are_counted_as_they_are_listed(spans: list[tuple[int, int]]) -> None:
    made = tuple(ElementSpan(width, count) for width, count in spans)
    assert count_blocks(made) == len(list(list_blocks(made)))


def write_chain(folder: Path, versions: list[Files]) -> tuple[Path, list[Path]]:
    """The first of some checkpoints, and the deltas from each to the next."""
    paths = [write_folder(folder / f"v{number}", files) for number, files in enumerate(versions)]
    deltas = []
    for number, (old, new) in enumerate(pairwise(paths)):
        deltas.append(folder / f"d{number}")
        deltas[-1].write_bytes(encode(old, new)[0])
    return paths[0], deltas


def draw_model(seed: int, *, step: str = "", extra: bool = False) -> bytes:
    """Tensors of a length that is no multiple of 8 bytes, a fifth of whose values differ between seeds."""
    values = draw_values(1001, 0)
    for number in range(1, seed + 1):
        values = step_some(values, 0.2, number)
    tensors = {"a": ("BF16", [1001], values.tobytes()), "b": ("F32", [130], draw_values(130, seed, "<u4").tobytes())}
    if extra:
        tensors["c"] = ("F32", [200], draw_values(200, 9, "<u4").tobytes())
    return write_tensors(tensors, step)


def test_a_chain_of_deltas_gives_the_last_checkpoint_in_one_pass(tmp_path: Path) -> None:
    versions = [{"m": draw_model(seed, step=str(seed)), "config": bytes([seed]) * 70} for seed in range(6)]
    first, deltas = write_chain(tmp_path, versions)
    for end in range(1, 6):
        out = tmp_path / f"out{end}"
        apply_chain(first, deltas[:end], out, threads=2)
        assert read_folder(out) == versions[end]
    assert read_folder(first) == versions[0]


@pytest.mark.parametrize(
    "last",
    [
        {"m": draw_model(2, extra=True)},
        {"m": draw_model(2, step="longer than before")},
        {"m": draw_model(2), "more": b"x"},
        {"other": draw_model(2)},
    ],
)
def test_deltas_that_cut_the_checkpoint_differently_are_refused_and_leave_nothing(tmp_path: Path, last: Files) -> None:
    first, deltas = write_chain(tmp_path, [{"m": draw_model(0)}, {"m": draw_model(1)}, last])
    with pytest.raises(DeltaError, match="use different blocks"):
        apply_chain(first, deltas, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chain_that_lacks_a_delta_or_has_them_in_another_order_is_refused(tmp_path: Path) -> None:
    first, deltas = write_chain(tmp_path, [{"m": draw_model(seed)} for seed in range(4)])
    for wrong in ([deltas[0], deltas[2]], [deltas[1], deltas[0]], [deltas[0], deltas[0]]):
        with pytest.raises(DeltaError, match="a different parent"):
            apply_chain(first, wrong, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_long_chain_takes_no_more_memory_than_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BLOCK_ELEMENTS", 1 << 16)
    rng = np.random.default_rng(0)
    first, deltas = write_chain(tmp_path, [{"m": rng.bytes(1 << 20)} for _ in range(9)])  # incompressible

    def measure(used: list[Path], name: str) -> int:
        tracemalloc.start()
        apply_chain(first, used, tmp_path / name, threads=1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    measure(deltas[:1], "warm")
    assert measure(deltas, "all") < measure(deltas[:1], "one") + (1 << 19), "eight payloads in a block's place are 4 MB"


def test_halting_ends_the_encoding_and_leaves_nothing(tmp_path: Path) -> None:
    first, deltas = write_chain(tmp_path, [{"m": draw_model(seed)} for seed in range(3)])
    halt = threading.Event()
    halt.set()
    with pytest.raises(DeltaError, match="stopped"):
        apply_chain(first, deltas, tmp_path / "out", halt=halt)
    assert not (tmp_path / "out").exists()


def test_tensors_that_move_to_other_files_come_back_bit_for_bit(tmp_path: Path) -> None:
    before = {f"w{number}": draw_values(3000, number) for number in range(6)}
    after = {name: step_some(values, 0.02, 7) for name, values in before.items()}

    def cut(tensors: dict[str, np.ndarray], per_file: int) -> Files:
        names = sorted(tensors)
        groups = [names[at : at + per_file] for at in range(0, len(names), per_file)]
        return {
            f"model-{i}.safetensors": save({name: tensors[name] for name in group}) for i, group in enumerate(groups)
        }

    for name in ("same", "moved"):
        (tmp_path / name).mkdir()
    same = check_round_trip(tmp_path / "same", cut(before, 2), cut(after, 2))
    moved = check_round_trip(tmp_path / "moved", cut(before, 6), cut(after, 2))
    assert same.num_changed < 0.05 * same.num_elements < moved.num_changed, "a tensor has its parent in the same file"
