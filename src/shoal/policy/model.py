"""Policies: a Hugging Face causal LM with its tokenizer, loaded from a folder or hub id, or a tiny one from scratch.

A saved policy is an ordinary Hugging Face folder (config, safetensors, tokenizer), which transformers and vLLM can
load. Its weights are one file or several (`policy/weights.py`), read and written tensor by tensor. It may also be an
adapter beside its base model; what is opened is a whole model in both cases, with the adapter merged.
"""

import copy
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from shoal.config.run import SHARD_BYTES, PolicyConfig, TinyConfig
from shoal.errors import ConfigError
from shoal.policy.adapter import Adapter, find_base, is_adapter, merge_adapter, read_adapter
from shoal.policy.compatibility import check_model, first_line
from shoal.policy.lora import is_factor
from shoal.policy.tokenizer import build_tokenizer
from shoal.policy.weights import INDEX, WeightsReader, describe_tensors, plan_layout, write_weights
from shoal.seeds import derive_seed

disable_progress_bar()  # users see only shoal's own progress bars
logging.getLogger("huggingface_hub").handlers.clear()  # its warnings reach the root's handlers as well
logger = logging.getLogger(__name__)

_FF_MULTIPLE = 64
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(slots=True)
class Policy:
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def describe_size(self) -> str:
        """The number of parameters, and of those that are trained if it differs."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        rest = "" if trained == self.num_parameters else f", of which {trained:,} are trained"
        return f"{self.num_parameters:,} parameters{rest}"


def choose_device(name: str) -> torch.device:
    """The device that a setting or flag names; `auto` is the accelerator that torch finds, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return found or torch.device("cpu")
    device = torch.device(name)
    if device.type != "cpu":
        if found is None or found.type != device.type:
            raise ConfigError(f"device {name!r} is not available; torch finds {found or 'no accelerator'} here")
        if (device.index or 0) >= torch.accelerator.device_count():
            raise ConfigError(f"device {name!r} is not available; there are {torch.accelerator.device_count()}")
    return device


def load_policy(config: PolicyConfig, *, alphabet: str, seed: int) -> Policy:
    """The policy that the settings name; if they name none, a tiny one is built from `alphabet` and `seed`."""
    if config.path:
        return reopen_policy(config.path, config)
    tokenizer = build_tokenizer(alphabet)
    model = _build_tiny(config.tiny, tokenizer, derive_seed("init", seed)).to(getattr(torch, config.dtype))
    return Policy(model=model.to(choose_device(config.device)), tokenizer=tokenizer)


def reopen_policy(path: str | Path, config: PolicyConfig) -> Policy:
    """Open a saved policy with the type and on the device that the settings name."""
    return open_policy(path, dtype=getattr(torch, config.dtype), device=choose_device(config.device))


def find_policy(path: str | Path) -> str:
    """The absolute path of a folder, or a hub id unchanged."""
    if Path(path).is_dir():
        return str(Path(path).resolve())
    if isinstance(path, Path) or not _HUB_ID.fullmatch(path):
        raise ConfigError(f"policy.path: no such folder {str(path)!r}")
    return path


def open_policy(path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Policy:
    """Open a saved policy. Weights are read only from safetensors: no pickle, no code from the folder."""
    path = find_policy(path)
    if is_adapter(Path(path)):
        base = find_base(Path(path))
        policy = open_policy(base, dtype=dtype, device=device)
        merge_adapter(policy.model, read_adapter(Path(path)), base)
        return policy
    is_folder = Path(path).is_dir()
    if not is_folder:
        logger.info(f"policy.path: there is no folder {path!r}, so it is loaded from the Hugging Face hub")
    try:
        if (Path(path) / INDEX).is_file():
            WeightsReader(Path(path)).close()  # transformers would open any path that the index names
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError, ConfigError) as error:
        where = "" if is_folder else "there is no such folder, and from the hub: "
        raise ConfigError(f"policy.path: cannot load a causal LM from {path!r}: {where}{first_line(error)}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        text = f"{len(missing)} missing, first {missing[0]!r}"
        raise ConfigError(f"policy.path: the weights of {str(path)!r} are incomplete, {text}")
    tokenizer = open_tokenizer(path, model)
    check_model(model)
    return Policy(model=model.to(device), tokenizer=tokenizer)


def copy_policy(policy: Policy, folder: Path, adapter: Adapter | None = None) -> Policy | None:
    """The same model with the weights of a folder, and an adapter merged into them; None as `load_over` says.

    Opening a folder takes several times longer, because transformers detects everything again.
    """
    if not _fits(policy, folder):
        return None
    copied = Policy(model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer)
    load_over(copied, folder, adapter)
    return copied


@torch.no_grad()
def load_over(policy: Policy, folder: Path, adapter: Adapter | None = None) -> bool:
    """Replace all weights of a policy by those of a folder, in place, with an adapter merged into them.

    False if the folder does not hold exactly its tensors: then nothing was changed.
    """
    if not _fits(policy, folder):
        return False
    merged = set() if adapter is None else {f"{name.rpartition('.')[0]}.weight" for name in adapter.weights}
    with WeightsReader(folder) as reader:
        for name, tensor in name_tensors(policy.model, reader.tensors).items():
            if name not in merged:
                reader.copy_into(name, tensor)
    if adapter is not None:
        merge_adapter(policy.model, adapter, folder)
    return True


def _fits(policy: Policy, folder: Path) -> bool:
    """Whether a folder holds exactly the tensors of a policy."""
    try:
        with WeightsReader(folder) as reader:
            own = name_tensors(policy.model, reader.tensors)
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            return shapes == {name: spec.shape for name, spec in reader.specs.items()}
    except ConfigError:
        return False


def name_tensors(model: PreTrainedModel, found: Mapping[str, object]) -> dict[str, Tensor]:
    """A model's tensors, each once. Tied tensors are one, and a file holds it under one of its names."""
    own = model.state_dict(keep_vars=True)  # tied tensors are one object
    given = {id(own[name]) for name in own.keys() & found.keys()}
    return {name: tensor.detach() for name, tensor in own.items() if name in found or id(tensor) not in given}


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors by the names and in the order of `save_pretrained`: tied ones once, under the name that loads.

    Adapters are not among them. They may be on any device, and sharded. They are copied only for architectures whose
    files have other tensors than the model (experts that are saved one by one).
    """
    own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not is_factor(name)}
    kept = {id(tensor): name for name, tensor in own.items()}
    kept |= {id(tensor): name for name, tensor in own.items() if name not in model.all_tied_weights_keys}
    ignored = set(model._keys_to_ignore_on_save or ())
    tensors = {
        name: tensor.detach() for name, tensor in own.items() if kept[id(tensor)] == name and name not in ignored
    }
    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    # It sorts those of a model that was opened from a folder, and of no other. Files follow from the order, and ranks,
    # which build their model without opening it, must divide v0 as one process did.
    kept_order = [name for name in own if name in reverted]
    return {name: reverted[name] for name in (*kept_order, *(name for name in reverted if name not in own))}


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round a model's weights in place, as opening its folder in this type does.

    `model.to` would also round the frequencies of the rotation, which stay in float32 there.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def save_policy(
    policy: Policy, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the Hugging Face folder, with floating-point weights in `dtype` (default: as they are).

    Of a model with adapters it is the base.
    Not atomic: callers write into a folder that is renamed when complete.
    """
    save_settings(policy, folder, dtype)
    tensors = saved_tensors(policy.model)
    write_weights(folder, plan_layout(describe_tensors(tensors, dtype), shard_bytes), tensors)


def save_settings(policy: Policy, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write everything of the folder except the weights: configs and tokenizer."""
    save_model_settings(policy.model, folder, dtype)
    policy.tokenizer.save_pretrained(folder)


def save_model_settings(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the configs of a model whose weights in the folder are of this dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # sharding changes the name of the class
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def open_tokenizer(path: str | Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a saved policy; transformers creates an empty one if a folder has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise ConfigError(f"policy.path: cannot load the tokenizer of {str(path)!r}: {reason}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(f"policy.path: {str(path)!r} has no tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"policy.path: the tokenizer of {str(path)!r} has no end token")
    if len(tokenizer) > (rows := model.config.vocab_size):
        raise ConfigError(f"policy.path: the tokenizer of {str(path)!r} has {len(tokenizer)} tokens, the model {rows}")
    return tokenizer


def describe_tiny(config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The architecture of a tiny model."""
    feed_forward = math.ceil(config.width * 8 / 3 / _FF_MULTIPLE) * _FF_MULTIPLE
    return AutoConfig.for_model(
        config.arch,
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.width // config.heads,
        max_position_embeddings=config.context,
        # Tied embeddings reload wrongly in some engines, and save nothing at a vocabulary of a hundred.
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # No pad token for the model: transformers would give it a zero embedding, which the sampler can draw and whose
        # norm multiplies gradients a thousandfold. The tokenizer has one for users that batch by padding.
        pad_token_id=None,
    )


def _build_tiny(config: TinyConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(describe_tiny(config, tokenizer))  # type: ignore[no-any-return]
