"""Adapters on disk, in peft's format, which peft and vLLM load beside the base model.

    adapter_config.json          rank, alpha, the layers
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight (rank, inputs), lora_B.weight (outputs, rank)

- A folder with these files and no `config.json` is an adapter; its base is version 0 of the same run. `find_base` knows
  where a run keeps it: beside the adapter, or beside the folder that holds it.
- Merging reads the base weights from the base's files, so a model that holds any version of the run becomes any other.
- Only plain adapters are read, those that W + s B A describes; other kinds of peft are refused by name.
- Nothing in the files depends on the machine or the time, for the hash of a version covers them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.errors import ConfigError
from shoal.policy.lora import Weights, adapter_weights, check_shapes, find_adapted, merge_product
from shoal.policy.weights import WeightsReader

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_NAMES = ("v0", "v000000")
"""how folders of version 0 are called, by nodes and by trainers"""
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
}
"""settings of peft that change what an adapter computes, with the values that leave it at W + s B A"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read from a folder."""

    rank: int
    alpha: float
    weights: Weights
    """A and B by the names of `adapter_weights`"""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def find_base(folder: Path) -> Path:
    """The folder of the base model of an adapter in a run's or a node's folders."""
    places = [place / name for place in (folder.absolute().parent, folder.absolute().parents[1]) for name in BASE_NAMES]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(f"{folder}: holds an adapter, and its base model is not beside it, as v0 or v000000")


def save_adapter(model: PreTrainedModel, folder: Path, weights: Weights | None = None) -> None:
    """Write the adapters of a model, or `weights` for them, if it is sharded. Not atomic, like `save_policy`."""
    adapted = find_adapted(model)
    first = next(iter(adapted.values()))
    rank = len(first.lora_A)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(first.alpha) if first.alpha == int(first.alpha) else first.alpha,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "target_modules": _name_targets(model, list(adapted)),
        **_PLAIN,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = adapter_weights(model) if weights is None else weights
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": tensor.cpu() for name, tensor in weights.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder; ConfigError if it is damaged or of another kind."""
    rank, alpha = _read_config(folder / ADAPTER_CONFIG)
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / ADAPTER_WEIGHTS}: cannot be read: {error}") from None
    return Adapter(rank, alpha, {_read_name(folder, name): tensor for name, tensor in tensors.items()})


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: Adapter, base: Path) -> None:
    """Give a model the weights of an adapter merged with the base model in a folder, whose architecture it has.

    Only adapted layers are written: in all others a run's versions are equal.
    """
    layers = {name.rpartition(".")[0] for name in adapter.weights}
    modules = {name: module for name, module in model.named_modules() if name in layers}
    needed: Weights = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            needed[f"{name}.lora_A"] = torch.empty(adapter.rank, module.in_features, device="meta")
            needed[f"{name}.lora_B"] = torch.empty(module.out_features, adapter.rank, device="meta")
    check_shapes(needed, adapter.weights)
    with WeightsReader(base) as reader:
        for name, module in modules.items():
            if f"{name}.weight" not in reader.tensors:
                raise ConfigError(f"{base}: has no tensor {name}.weight, to which the adapter belongs")
            low, high = (adapter.weights[f"{name}.{factor}"] for factor in ("lora_A", "lora_B"))
            merged = merge_product(reader.read_rows(f"{name}.weight").float(), low, high, adapter.scale)
            weight: Tensor = module.weight  # type: ignore[assignment]
            weight.copy_(merged)


def _read_config(path: Path) -> tuple[int, float]:
    try:
        config = json.loads(path.read_bytes())
        rank, alpha = config["r"], config["lora_alpha"]
        is_lora = config["peft_type"] == "LORA"
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is missing or is not the configuration of a LoRA adapter") from None
    if not is_lora or type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise ConfigError(f"{path}: is not the configuration of a LoRA adapter")
    for name, plain in _PLAIN.items():
        if name in config and config[name] != plain and (config[name] or plain):
            raise ConfigError(f"{path}: {name} = {json.dumps(config[name])} is not supported, only plain LoRA")
    return rank, float(alpha)


def _read_name(folder: Path, name: str) -> str:
    if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
        raise ConfigError(f"{folder / ADAPTER_WEIGHTS}: unknown tensor {name[:200]!r}")
    return name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def _name_targets(model: PreTrainedModel, adapted: list[str]) -> list[str]:
    """The layers as peft matches them, by the ends of their names; in full where an end fits others as well."""
    ends = {name.rpartition(".")[2] for name in adapted}
    matched = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    return sorted(ends) if len(matched) == len(adapted) else sorted(adapted)
