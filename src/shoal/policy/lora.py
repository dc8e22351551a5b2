"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + s B (A x), with W fixed, and A and B trained.

Symbols: A is (rank, inputs), B is (outputs, rank), s = alpha / rank. A starts uniform in +- 1 / sqrt(inputs), as in
peft, and B at zero, so that the policy starts as the base model.

- An adapted layer keeps the names `weight` and `bias`; its adapter's are `lora_A` and `lora_B`. So `base_weights` of an
  adapted model is the state of the model without adapters.
- Every A has its own seed, derived from the layer's name: the order of layers and the number of ranks do not matter.
- A merged weight is always computed from the base weight, W + s B A in float32, and never from another merged one: a
  version's weights do not depend on the versions before it.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config.run import LoraConfig
from shoal.errors import ConfigError
from shoal.seeds import derive_seed

_FACTORS = ("lora_A", "lora_B")

Weights = dict[str, Tensor]


class LoraLinear(nn.Linear):
    """A linear layer with an adapter, in place of the one it is made from, whose weight and bias it takes over."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        self.alpha = alpha
        self.enabled = True

    @property
    def scale(self) -> float:
        return self.alpha / len(self.lora_A)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output for any number of leading axes."""
        output = F.linear(input, self.weight, self.bias)
        if not self.enabled:
            return output
        return output + F.linear(F.linear(input, self.lora_A), self.scale * self.lora_B)


def attach_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze a model, and put a new adapter beside every linear layer that the settings name."""
    model.requires_grad_(False)
    for name, linear in find_targets(model, config.targets).items():
        model.set_submodule(name, LoraLinear(linear, config.rank, config.used_alpha))
    load_adapters(model, start_adapters(model, seed))


def start_adapters(model: nn.Module, seed: int) -> Weights:
    """A and B of new adapters, in the host's memory."""
    found: Weights = {}
    for name, module in find_adapted(model).items():
        rng = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        rank, inputs = module.lora_A.shape
        found[f"{name}.lora_A"] = (2 * torch.rand(rank, inputs, generator=rng) - 1) * inputs**-0.5
        found[f"{name}.lora_B"] = torch.zeros(module.out_features, rank)
    return found


def find_targets(model: PreTrainedModel, targets: list[str]) -> dict[str, nn.Linear]:
    """The linear layers to adapt, by name: those whose names end in one of `targets`, or all but the output head."""
    head = model.get_output_embeddings()
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    for target in targets:
        if not any(_ends_in(name, target) for name in linears):
            kinds = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(f"policy.lora.targets: no linear layer is called {target}; there are {', '.join(kinds)}")
    if not linears:
        raise ConfigError(f"policy.lora: {model.config.model_type} has no linear layers to adapt")
    return {name: linears[name] for name in linears if not targets or any(_ends_in(name, each) for each in targets)}


def find_adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name; empty for a model without."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_weights(model: nn.Module) -> Weights:
    """A and B of every adapted layer; empty for a model without."""
    return {
        f"{name}.{factor}": getattr(module, factor).detach()
        for name, module in find_adapted(model).items()
        for factor in _FACTORS
    }


def load_adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set A and B of every adapted layer to what `adapter_weights` gave."""
    own = adapter_weights(model)
    check_shapes(own, weights)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def check_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise a ConfigError unless both have the same names and shapes."""
    if odd := sorted(own.keys() ^ weights.keys()):
        raise ConfigError(f"the adapter does not fit the model: {len(odd)} names differ, first {odd[0]!r}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            shape, needed = tuple(weights[name].shape), tuple(tensor.shape)
            raise ConfigError(f"the adapter does not fit the model: {name!r} has {shape}, the model needs {needed}")


def base_weights(model: nn.Module) -> Weights:
    """The state of the model without its adapters."""
    return {name: tensor for name, tensor in model.state_dict().items() if not is_factor(name)}


def is_factor(name: str) -> bool:
    """Whether a tensor is A or B of an adapter, by its name."""
    return name.rpartition(".")[2] in _FACTORS


def merge_product(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """W + s B A, computed in float32 and rounded once to the type of W.

    A product and a sum, not `addmm`: with AVX-512 the bits of that depend on the number of threads.
    """
    return (high.float() @ low.float()).mul_(scale).add_(weight.float()).to(weight.dtype)


@torch.no_grad()
def copy_merged(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A copy without adapters that computes the same, merged in `dtype`; of a model without adapters, just a copy."""
    plain = copy.deepcopy(model)
    for name, module in find_adapted(plain).items():
        linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        weight = module.weight.to(dtype)
        linear.weight = nn.Parameter(merge_product(weight, module.lora_A, module.lora_B, module.scale))
        linear.bias = module.bias
        plain.set_submodule(name, linear)
    return plain


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """The base model, within the block: the reference of the KL term needs no second copy of the weights."""
    adapted = list(find_adapted(model).values())
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
