"""The calibration file: written whole, read strictly, refused for another model."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.policy.model import Policy, open_policy, save_policy
from shoal.toploc.calibration import Calibration, hash_model, hash_weights, load_calibration
from shoal.toploc.chunks import STATISTICS, ChunkStats
from shoal.toploc.finding import Check


def test_a_file_is_read_as_it_was_written(calibration: Calibration, speaker: Policy, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration.save(path)
    assert load_calibration(path) == load_calibration(path, speaker.model) == calibration
    data = json.loads(path.read_text())
    assert data["format"] == 2 and data["dtype"] == "float32" and data["backend"] == "torch cpu"
    assert data["full"]["limits"]["toploc_mantissa"]["method"] in ("floor", "margin", "tail")
    assert [variant["name"] for variant in data["variants"]] == ["engine", "transformers", "float64"]


def test_every_chunk_has_the_limit_of_its_kind(calibration: Calibration) -> None:
    chunk = ChunkStats(tokens=32, **dict.fromkeys(STATISTICS, 0.0))
    short = ChunkStats(tokens=31, **dict.fromkeys(STATISTICS, 0.0))
    looser = {check: limit.model_copy(update={"threshold": 7.0}) for check, limit in calibration.short.limits.items()}
    changed = calibration.model_copy(update={"short": calibration.short.model_copy(update={"limits": looser})})
    for check, limit in calibration.full.limits.items():
        assert changed.limit_chunk(check, chunk) == limit.threshold < 7.0
        assert changed.limit_chunk(check, short) == 7.0


def test_the_honest_distribution_was_measured(calibration: Calibration) -> None:
    assert sum(variant.chunks for variant in calibration.variants) >= 600
    assert calibration.heldout_rollouts == sum(variant.rollouts for variant in calibration.variants)
    assert calibration.heldout_alarms == 0
    assert 0 < calibration.full.limits[Check.LOGPROB].quantiles["0.5"] < 1e-5


def test_a_file_is_good_for_other_weights_of_the_same_model(
    calibration: Calibration, stranger: Policy, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    calibration.save(path)
    assert calibration.weights_hash != hash_weights(stranger.model)
    assert load_calibration(path, stranger.model) == calibration


def test_a_file_of_another_model_is_refused(calibration: Calibration, qwen: Policy, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration.save(path)
    with pytest.raises(ConfigError, match=r"c.json: is for another model, .* \(speaker\), this one is .*calibrate"):
        load_calibration(path, qwen.model)


def test_a_file_of_another_dtype_is_refused(calibration: Calibration, speaker: Policy, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration.save(path)
    with pytest.raises(ConfigError, match="is for float32, the model is loaded in bfloat16"):
        load_calibration(path, copy.deepcopy(speaker.model).to(torch.bfloat16))


def edit(data: dict[str, Any], *keys: str, value: Any) -> None:
    for key in keys[:-1]:
        data = data[key]
    if value is None:
        del data[keys[-1]]
    else:
        data[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value", "where"),
    [
        (("format",), 1, "format"),
        (("rate",), 0.0, "rate"),
        (("rate",), "1e-4", "rate"),
        (("extra",), 1, "extra"),
        (("dtype",), None, "dtype"),
        (("full", "limits", "sampling"), None, "full"),
        (("short", "bets", "mantissa"), None, "short"),
        (("short", "bets", "mantissa", "mean"), 1.5, "short.bets.mantissa.mean"),
        (("full", "limits", "sampling", "threshold"), "x", "full.limits.sampling.threshold"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(
    calibration: Calibration, tmp_path: Path, keys: tuple[str, ...], value: Any, where: str
) -> None:
    data = json.loads(calibration.model_dump_json())
    edit(data, *keys, value=value)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"c.json: not a calibration file: {where}: "):
        load_calibration(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "\x00"])
def test_an_invalid_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a calibration file"):
        load_calibration(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c.json: cannot be read \(No such file"):
        load_calibration(tmp_path / "c.json")


def test_the_hash_of_a_model_survives_saving_and_changes_with_its_shape(
    qwen: Policy, llama: Policy, tmp_path: Path
) -> None:
    save_policy(qwen, tmp_path)
    reopened = open_policy(tmp_path)
    assert hash_model(reopened.model) == hash_model(qwen.model)
    assert hash_weights(reopened.model) == hash_weights(qwen.model)
    assert hash_model(llama.model) != hash_model(qwen.model)
    deeper = copy.deepcopy(qwen.model)
    deeper.config.rms_norm_eps = 1e-3
    assert hash_model(deeper) != hash_model(qwen.model), "settings count too, not only shapes"


def test_the_hash_of_weights_changes_with_one_of_them(qwen: Policy) -> None:
    changed = copy.deepcopy(qwen.model)
    with torch.no_grad():
        changed.get_output_embeddings().weight[3, 3] += 1e-3
    assert hash_weights(changed) != hash_weights(qwen.model)
    assert hash_model(changed) == hash_model(qwen.model)
