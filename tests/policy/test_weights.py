"""Weights by rows: the bytes of `save_pretrained`, rows from several processes, and files that are refused."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from shoal.errors import ConfigError
from shoal.policy import weights
from shoal.policy.weights import (
    INDEX,
    WEIGHTS,
    RowRange,
    TensorSpec,
    WeightsLayout,
    WeightsReader,
    WeightsWriter,
    create_files,
    describe_tensors,
    finish_file,
    plan_layout,
    write_weights,
)

TYPES = sorted(weights._TYPES.values(), key=str)
BIG = 1 << 40


def draw_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values from all bytes; NaNs compare unequal, so tests compare bytes."""
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(TYPES)),
        min_size=1,
        max_size=8,
    )
)
def test_one_file_has_the_bytes_of_safetensors(
    tmp_path: Path, shapes: dict[str, tuple[list[int], torch.dtype]]
) -> None:
    tensors = {name: draw_tensor(tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
    write_weights(tmp_path, plan_layout(describe_tensors(tensors), BIG), tensors)
    assert read_bytes(tmp_path) == {WEIGHTS: save(tensors, metadata={"format": "pt"})}


@pytest.mark.parametrize("shard_bytes", [BIG, 20_000, 3_000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_and_index_are_those_of_save_pretrained(tmp_path: Path, shard_bytes: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=48, num_hidden_layers=12, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    tensors = model.state_dict()
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", plan_layout(describe_tensors(tensors), shard_bytes), tensors)
    theirs = {name: data for name, data in read_bytes(tmp_path / "theirs").items() if "safetensors" in name}
    assert read_bytes(tmp_path / "ours") == theirs
    assert (len(theirs) > 1) == (shard_bytes < BIG)


def test_a_layout_knows_the_sizes_of_its_files_before_they_are_written(tmp_path: Path) -> None:
    tensors = {name: torch.ones(30, 5) for name in "abc"}
    layout = plan_layout(describe_tensors(tensors), 1200)
    write_weights(tmp_path, layout, tensors)
    assert layout.sizes == {name: len(data) for name, data in read_bytes(tmp_path).items()}
    assert len(layout.files) == 2 and INDEX in layout.sizes


def write_part(
    folder: Path, layout: WeightsLayout, tensors: dict[str, Tensor], rank: int, ranks: int
) -> list[RowRange]:
    """The rows that FSDP2 would give to a rank: chunks of equal size, the last ones shorter or empty."""
    with WeightsWriter(folder, layout) as writer:
        for name, tensor in tensors.items():
            rows = tensor if tensor.dim() else tensor[None]
            size = -(-len(rows) // ranks)
            first = min(rank * size, len(rows))
            writer.write_rows(name, first, rows[first : first + size])
        return [each for file in layout.files for each in writer.close_file(file.name)]


def test_rows_of_several_processes_make_the_same_files(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(i, 7) for i in range(1, 9)} | {"scalar": torch.tensor(2.5), "none": torch.zeros(0)}
    layout = plan_layout(describe_tensors(tensors, torch.bfloat16), 200)
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    write_weights(tmp_path / "one", layout, tensors)
    folder = tmp_path / "three"
    create_files(folder, layout)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        parts = pool.starmap(write_part, [(folder, layout, tensors, rank, 3) for rank in range(3)])
    for file in layout.files:
        assert not (folder / file.name).exists()
        names = {tensor.spec.name for tensor in file.tensors}
        finish_file(folder, file, [each for part in parts for each in part if each[0] in names])
    assert read_bytes(tmp_path / "one") == read_bytes(folder)


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([("w", 0, 4)], id="the end is missing"),
        pytest.param([("w", 1, 5)], id="the beginning is missing"),
        pytest.param([("w", 0, 2), ("w", 3, 5)], id="a hole"),
        pytest.param([("w", 0, 3), ("w", 2, 5)], id="rows written twice"),
        pytest.param([], id="nothing"),
        pytest.param([("w", 0, 5), ("x", 0, 5)], id="a tensor of another file"),
    ],
)
def test_a_file_with_missing_rows_never_gets_its_name(tmp_path: Path, ranges: list[RowRange]) -> None:
    layout = plan_layout([TensorSpec("w", torch.float32, (5, 2))], BIG)
    create_files(tmp_path, layout)
    with pytest.raises(AssertionError):
        finish_file(tmp_path, layout.files[0], ranges)
    assert not (tmp_path / WEIGHTS).exists()


def test_a_row_outside_a_tensor_is_not_written(tmp_path: Path) -> None:
    layout = plan_layout([TensorSpec("w", torch.float32, (5, 2)), TensorSpec("x", torch.float32, (5, 2))], BIG)
    create_files(tmp_path, layout)
    with WeightsWriter(tmp_path, layout) as writer:
        for first, rows in ((4, torch.ones(2, 2)), (-1, torch.ones(2, 2)), (0, torch.ones(2, 3))):
            with pytest.raises(AssertionError):
                writer.write_rows("w", first, rows)


@pytest.mark.parametrize("shard_bytes", [BIG, 500])
def test_rows_are_read_as_safetensors_reads_them(
    tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BLOCK_BYTES", 64)
    tensors = {"a": torch.randn(20, 3, 2), "b": torch.randn(9).bfloat16(), "c": torch.tensor(3), "d": torch.zeros(0, 4)}
    layout = plan_layout(describe_tensors(tensors), shard_bytes)
    write_weights(tmp_path, layout, tensors)
    with WeightsReader(tmp_path) as reader:
        assert reader.tensors == layout.tensors
        for name, tensor in tensors.items():
            assert torch.equal(reader.read_rows(name), tensor)
            target = torch.full_like(tensor, 7)
            reader.copy_into(name, target)
            assert torch.equal(target, tensor) and reader.is_equal(name, tensor)
        with safe_open(tmp_path / layout.tensors["a"].file, "pt") as file:
            assert torch.equal(reader.read_rows("a", 3, 11), file.get_slice("a")[3:11])
        assert reader.read_rows("a", 5, 5).shape == (0, 3, 2)
        changed = tensors["a"].clone()
        changed[19, 2, 1] += 1
        assert not reader.is_equal("a", changed) and not reader.is_equal("a", changed[:19])


def test_values_are_rounded_to_the_published_type_and_compared_after_rounding(tmp_path: Path) -> None:
    tensor = torch.randn(50, 8)
    write_weights(tmp_path, plan_layout(describe_tensors({"w": tensor}, torch.bfloat16), BIG), {"w": tensor})
    assert torch.equal(load_file(tmp_path / WEIGHTS)["w"], tensor.bfloat16())
    with WeightsReader(tmp_path) as reader:
        assert reader.is_equal("w", tensor) and reader.is_equal("w", tensor.bfloat16().float())
        assert not reader.is_equal("w", tensor * 1.01)
        target = torch.zeros(50, 8)
        reader.copy_into("w", target)
    assert torch.equal(target, tensor.bfloat16().float())


def test_integers_keep_their_type_when_floats_are_rounded() -> None:
    specs = describe_tensors({"w": torch.ones(2), "count": torch.tensor(3)}, torch.bfloat16)
    assert [spec.dtype for spec in specs] == [torch.bfloat16, torch.int64]


def write_sharded(folder: Path) -> None:
    tensors = {name: torch.ones(10, 5) for name in "ab"}
    write_weights(folder, plan_layout(describe_tensors(tensors), 200), tensors)


def change_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".x.safetensors", "x.bin", "", 5, None]
)
def test_an_index_names_only_plain_files(tmp_path: Path, file: object) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    change_index(folder, {"a": file})
    with pytest.raises(ConfigError, match="is not the plain name"):
        WeightsReader(folder)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"[" * 100_000])
def test_what_is_no_index_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(ConfigError, match="not a valid index"):
        WeightsReader(tmp_path)


def test_an_index_above_the_limit_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sharded(tmp_path)
    WeightsReader(tmp_path).close()
    monkeypatch.setattr(weights, "MAX_INDEX_BYTES", (tmp_path / INDEX).stat().st_size - 1)
    with pytest.raises(ConfigError, match="not a valid index"):
        WeightsReader(tmp_path)


def test_a_folder_without_weights_or_with_damaged_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no file named {WEIGHTS} or {INDEX}"):
        WeightsReader(tmp_path)
    write_sharded(tmp_path)
    change_index(tmp_path, {"c": "model-00001-of-00002.safetensors"})
    with pytest.raises(ConfigError, match="has no tensor 'c'"):
        WeightsReader(tmp_path)
    change_index(tmp_path, {"a": "model-00003-of-00002.safetensors"})
    with pytest.raises(ConfigError, match="cannot be read"):
        WeightsReader(tmp_path)
    os.truncate(tmp_path / "model-00001-of-00002.safetensors", 100)
    change_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    with pytest.raises(ConfigError, match="not a valid safetensors file"):
        WeightsReader(tmp_path)


@pytest.mark.parametrize(("dtype", "shape"), [("F32", [3]), ("F4", [16])])
def test_a_tensor_of_another_size_than_its_type_and_shape_is_refused(
    tmp_path: Path, dtype: str, shape: list[int]
) -> None:
    head = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(ConfigError, match="unknown type or the wrong size"):
        WeightsReader(tmp_path)
