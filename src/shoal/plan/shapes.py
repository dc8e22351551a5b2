"""The sizes of a model, read from its architecture on the meta device: no weights are loaded and none are needed.

Symbols of the plan: P parameters, L layers, W width, H heads, K key/value heads, D head size, F width of the
feed-forward layer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shoal.config.run import RunConfig
from shoal.errors import ConfigError
from shoal.policy.compatibility import first_line
from shoal.policy.decoder import attention_shape, is_lean
from shoal.policy.model import describe_tiny, find_policy
from shoal.policy.tokenizer import build_tokenizer
from shoal.tasks.open import open_tasks


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder; parameters are counted once where tensors are tied."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context: int
    """longest sequence"""
    parameters: int
    layer_parameters: int
    """of the largest layer: what FSDP2 gathers at a time"""
    root_parameters: int
    """outside the layers: embeddings, last norm, output head"""
    active_parameters: int
    """that take part in the products of one token: all but the table of embeddings and idle experts"""
    largest_parameter: int
    linears: tuple[tuple[str, int, int], ...]
    """name, inputs and outputs of the linear modules of one layer"""
    has_qk_norm: bool
    is_lean: bool
    """whether shoal's own forward pass runs it, whose memory the plan models"""

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def fused_parameters(self) -> int:
        """Of one layer, in concatenated copies: queries, keys and values, and both inputs of the feed-forward layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim * self.width
        return qkv + 2 * self.feed_forward * self.width

    def find_targets(self, targets: Sequence[str]) -> list[tuple[str, int, int]]:
        """The linear modules of a layer whose names end in one of these; all if there are none."""
        for target in targets:
            if not any(_ends_in(name, target) for name, _, _ in self.linears):
                names = ", ".join(name for name, _, _ in self.linears)
                raise ConfigError(f"policy.lora: no linear module {target!r} in a layer; it has {names}")
        chosen = [linear for linear in self.linears if any(_ends_in(linear[0], target) for target in targets)]
        return chosen if targets else list(self.linears)

    def count_adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of low-rank adapters: rank x (inputs + outputs) of each target of each layer."""
        return self.layers * sum(rank * (inputs + outputs) for _, inputs, outputs in self.find_targets(targets))

    def count_kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def read_shape(config: RunConfig) -> ModelShape:
    """The sizes of the model that a run's settings name."""
    return measure_shape(_read_architecture(config))


def measure_shape(architecture: PretrainedConfig) -> ModelShape:
    """The sizes of a model of that architecture, built on the meta device."""
    text = architecture.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except (ValueError, AttributeError, ImportError) as error:
        raise ConfigError(f"policy.path: cannot build a causal LM ({first_line(error)})") from None
    layers, heads, kv_heads, head_dim = attention_shape(text)
    blocks = _find_layers(model, layers)
    linears = [(name, module) for name, module in blocks[0].named_modules() if isinstance(module, nn.Linear)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    table = 0 if tied else model.get_input_embeddings().weight.numel()
    return ModelShape(
        layers=layers,
        width=text.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        context=text.max_position_embeddings,
        parameters=parameters,
        layer_parameters=max(_count(block) for block in blocks),
        root_parameters=parameters - sum(_count(block) for block in blocks),
        active_parameters=parameters - table - _count_idle(model, text),
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
        linears=tuple((name, linear.in_features, linear.out_features) for name, linear in linears),
        has_qk_norm=any(name.endswith("q_norm") for name, _ in blocks[0].named_modules()),
        is_lean=is_lean(model),
    )


def _read_architecture(config: RunConfig) -> PretrainedConfig:
    if not config.policy.path:
        return describe_tiny(config.policy.tiny, build_tokenizer(open_tasks(config).alphabet))
    path = find_policy(config.policy.path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"policy.path: cannot read an architecture from {path!r}: {first_line(error)}") from None


def _find_layers(model: PreTrainedModel, layers: int) -> Sequence[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ConfigError(f"policy.path: no list of {layers} decoder layers in a {model.config.model_type} model")


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_idle(model: PreTrainedModel, text: Any) -> int:
    """Parameters of experts that a token does not visit."""
    chosen, number = getattr(text, "num_experts_per_tok", None), _count_experts(text)
    if not chosen or not number:
        return 0
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return round(total * (1 - chosen / number))


def _count_experts(text: Any) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((getattr(text, name) for name in names if getattr(text, name, None)), 0)
