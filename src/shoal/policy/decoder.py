"""One forward pass for learner, engine and validator: flat tokens in, hidden states out; attention is an argument.

Shapes: N tokens of any number of sequences, W width, H heads, K key/value heads, D head size.
- Nothing here depends on where a sequence begins: only `attend` does, and tokens see each other in no other way. So
  packing cannot leak between samples, and the same code decodes one token of 256 rollouts or trains on a packed batch.
- Llama, Qwen2 and Qwen3 run on fused weights in a lean loop. Every other architecture that supports transformers'
  attention interface runs its own forward, with `attend` plugged in.
- A layer runs through its own module, where FSDP2's hooks gather its parameters, and fuses what they gathered. Only the
  callers that pass `layers` (engine and replay, whose weights change rarely) run past the modules.
- Activation checkpointing and compilation happen inside that module's forward, so within FSDP2's hooks. A recomputed
  layer brings its attention along: the backward pass runs when `run_decoder` is over, on GPUs in another thread.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.errors import ConfigError
from shoal.policy.kernels import rms_norm, swiglu
from shoal.policy.lora import LoraLinear

LEAN = {"llama", "qwen2", "qwen3"}
INTERFACE = "shoal"
_EXTRAS = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Arguments that some architectures pass to their attention besides q, k and v, which `attend` does not support."""


class Attend(Protocol):
    """Attention of one layer: q (N, H, D) and k, v (N, K, D), already rotated, to (N, H, D)."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of concatenated projections as one: A stacked, and s B as blocks on a diagonal."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; projections of the same input are concatenated."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """(H + K, D): one row per query and key head"""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    adapters: Mapping[str, LowRank] = field(default_factory=dict)
    """of `qkv`, `out`, `gate_up` and `down`, if they have any"""


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How the layers of a model run when gradients are recorded."""

    recompute: bool = False
    """keep only a layer's input for the backward pass, which computes the layer again"""
    compile: bool = False
    """by torch.compile, except for the attention"""


_COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++")
"""What torch.compile looks for on a CPU."""
_OPTIONS = "shoal_options"
"""Attribute of a layer's module: it stays with the module when FSDP2 changes its class, and in copies of the model."""


def set_layer_options(model: PreTrainedModel, options: LayerOptions) -> None:
    """Apply the options to every decoder layer of the model."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and options != LayerOptions():
        raise ConfigError(f"learner: {model.config.model_type} has no layers that can be recomputed or compiled")
    if options.compile and model.device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise ConfigError(f"learner.compile: no C++ compiler found ({', '.join(filter(None, _COMPILERS))})")
    for layer in layers:
        setattr(layer, _OPTIONS, options)


def is_lean(model: PreTrainedModel) -> bool:
    """Whether the lean loop supports this model; otherwise its own forward runs."""
    config = model.config
    return (
        config.model_type in LEAN
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and config.rope_parameters["rope_type"] != "dynamic"
    )


def attention_shape(config: Any) -> tuple[int, int, int, int]:
    """Layers, heads, key/value heads and head size."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def fuse_layers(model: PreTrainedModel) -> list[Layer]:
    """Concatenated weights of every layer: copies, through which gradients flow when enabled."""
    return [_fuse_layer(layer) for layer in model.model.layers]


class FreshLayers:
    """Concatenated weights of a model's layers, made each time a layer runs: one layer in memory instead of all.

    `change` alters every matrix, in float32, and is rounded to the type of the weights: the values of `map_linears`
    (policy/altered.py) without a copy of the model.
    """

    def __init__(self, model: PreTrainedModel, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self._layers, self._change = model.model.layers, change

    def __getitem__(self, index: int) -> Layer:
        return _fuse_layer(self._layers[index], change=self._change)


Layers = Sequence[Layer] | FreshLayers


def run_decoder(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    layers: Layers | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Hidden states (N, W) after the final norm. Pass `layers` to avoid fusing again if the weights did not change.

    `dtype` is the type of the computation (default: that of the weights); gradients arrive in the type of the weights.
    """
    if not is_lean(model):
        assert dtype is None, "only the lean loop casts weights"
        return _run_hub(model, token_ids, positions, attend)
    return _run_lean(model, token_ids, positions, attend, layers, dtype)


def compute_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Float32 logits (N, vocabulary), from a product in the type of the hidden states."""
    return apply_head(model.get_output_embeddings(), hidden)


def apply_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """`compute_logits` of a model with this head."""
    if head.weight.dtype == hidden.dtype:
        return head(hidden).float()  # type: ignore[no-any-return]
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    return F.linear(hidden, head.weight.to(hidden.dtype), bias).float()


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer's lean forward needs besides the hidden states (N, W)."""

    config: Any
    index: int
    cos: Tensor
    sin: Tensor
    attend: Attend


def _run_lean(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    layers: Layers | None,
    dtype: torch.dtype | None,
) -> Tensor:
    body, config = model.model, model.config
    x = F.embedding(token_ids, body.embed_tokens.weight.to(dtype or body.embed_tokens.weight.dtype))
    cos, sin = (table.to(x.dtype) for table in _rotation(model, positions))
    for index, module in enumerate(body.layers):
        given = LayerInput(config, index, cos, sin, attend)
        x = _call_layer(module, x, given) if layers is None else _run_layer(layers[index], x, given)
    return rms_norm(x, body.norm.weight.to(x.dtype), config.rms_norm_eps)


def _call_layer(module: nn.Module, x: Tensor, given: LayerInput) -> Tensor:
    """Run one decoder layer through its module, whose hooks may gather and release its parameters."""
    _adopt_layer(module)
    return module(x, given)  # type: ignore[no-any-return]


def _adopt_layer(module: nn.Module) -> None:
    """Have the module run our forward."""
    if "forward" not in vars(module):
        module.forward = MethodType(_forward_layer, module)


def _forward_layer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer's forward: the lean one for hidden states and a `LayerInput`, else transformers' own."""
    options: LayerOptions = getattr(module, _OPTIONS, LayerOptions())
    plug: AbstractContextManager[None] = nullcontext()
    if args and isinstance(args[-1], LayerInput):
        run: Callable[..., Any] = partial(_run_module, compiled=options.compile)
    elif (plugged := _plugged.get(None)) is None:  # the model runs by itself
        return type(module).forward(module, *args, **kwargs)
    else:
        run, plug = _compile(type(module).forward) if options.compile else type(module).forward, plugged.copy()
    if not (options.recompute and torch.is_grad_enabled()):
        return run(module, *args, **kwargs)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(run, module, *args, context_fn=lambda: (nullcontext(), plug), **settings, **kwargs)


def _run_module(module: nn.Module, x: Tensor, given: LayerInput, *, compiled: bool) -> Tensor:
    return _run_layer(_fuse_layer(module, x.dtype), x, given, compiled=compiled)


def _run_layer(layer: Layer, x: Tensor, given: LayerInput, *, compiled: bool = False) -> Tensor:
    project, finish = (_compile(_project_qkv), _compile(_finish_layer)) if compiled else (_project_qkv, _finish_layer)
    q, k, v = project(given.config, layer, x, given.cos, given.sin)
    return finish(given.config.rms_norm_eps, layer, x, given.attend(given.index, q, k, v))  # type: ignore[no-any-return]


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compilation for all layers of a model: they differ in nothing but their weights."""
    return torch.compile(function, dynamic=True)


def _finish_layer(eps: float, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    """What follows the attention."""
    x = x + _project(layer, "out", mixed.flatten(1), layer.out_bias)
    return x + _project(layer, "down", swiglu(_project(layer, "gate_up", rms_norm(x, layer.mlp_norm, eps))))


def _project(layer: Layer, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """One projection; an adapter's share is computed beside it, so that no gradient of the full weight is needed."""
    y = F.linear(x, getattr(layer, name), bias)
    adapter = layer.adapters.get(name)
    return y if adapter is None else y + F.linear(F.linear(x, adapter.low), adapter.high)


def _project_qkv(config: Any, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, per head; queries and keys are normalised and rotated as one tensor."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    fused = _project(layer, "qkv", normed, layer.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, -1)
    qk, v = fused.split((heads + kv_heads, kv_heads), dim=1)
    if layer.qk_norm is not None:
        qk = rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
    rotated = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
    q, k = rotated.split((heads, kv_heads), dim=1)
    return q, k, v


_tables: WeakKeyDictionary[PreTrainedModel, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def _rotation(model: PreTrainedModel, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, D), the sine signed so that one roll of the halves completes the rotation."""
    dtype = model.model.embed_tokens.weight.dtype
    known = _tables.get(model)
    if known is None or known[0].dtype != dtype or known[0].device != positions.device:
        everywhere = torch.arange(model.config.max_position_embeddings, device=positions.device)
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = model.model.rotary_emb(model.model.embed_tokens.weight[:1], everywhere[None])
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            _tables[model] = cos[0, :, None].contiguous(), signed[:, None].contiguous()
    cos, signed = _tables[model]
    return cos.index_select(0, positions), signed.index_select(0, positions)


def _fuse_layer(
    layer: nn.Module, dtype: torch.dtype | None = None, *, change: Callable[[Tensor], Tensor] | None = None
) -> Layer:
    """The weights of a layer, in `dtype` if given: cast before anything else, as FSDP2 casts what it gathers.

    `change` alters the matrices, see `FreshLayers`.
    """
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    dtype = dtype or mlp.down_proj.weight.dtype

    def read(linear: nn.Linear) -> Tensor:
        return linear.weight.to(dtype) if change is None else change(linear.weight.float()).to(dtype)

    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased, out_bias = parts[0].bias is not None, attention.o_proj.bias
    return Layer(
        input_norm=layer.input_layernorm.weight.to(dtype),  # type: ignore[union-attr, operator, arg-type]
        qkv=torch.cat([read(part) for part in parts]),
        qkv_bias=torch.cat([part.bias.to(dtype) for part in parts]) if biased else None,
        qk_norm=_fuse_norms(attention, dtype) if hasattr(attention, "q_norm") else None,
        out=read(attention.o_proj),
        out_bias=None if out_bias is None else out_bias.to(dtype),
        mlp_norm=layer.post_attention_layernorm.weight.to(dtype),  # type: ignore[union-attr, operator, arg-type]
        gate_up=torch.cat((read(mlp.gate_proj), read(mlp.up_proj))),
        down=read(mlp.down_proj),
        adapters=_fuse_adapters(
            dtype, qkv=parts, out=(attention.o_proj,), gate_up=(mlp.gate_proj, mlp.up_proj), down=(mlp.down_proj,)
        ),
    )


def _fuse_adapters(dtype: torch.dtype, **projections: tuple[nn.Linear, ...]) -> dict[str, LowRank]:
    """The adapters of each fused projection, without those that have none or whose are disabled."""
    fused = {}
    for name, parts in projections.items():
        adapted = [part if isinstance(part, LoraLinear) and part.enabled else None for part in parts]
        lows: list[Tensor] = [part.lora_A.to(dtype) for part in adapted if part is not None]
        if lows:
            highs = [
                lows[0].new_zeros(linear.out_features, 0) if part is None else part.scale * part.lora_B.to(dtype)
                for linear, part in zip(parts, adapted, strict=True)
            ]
            fused[name] = LowRank(torch.cat(lows), torch.block_diag(*highs))
    return fused


def _fuse_norms(attention: Any, dtype: torch.dtype) -> Tensor:
    q_norm, k_norm = attention.q_norm.weight.to(dtype), attention.k_norm.weight.to(dtype)
    heads = attention.q_proj.out_features // len(q_norm), attention.k_proj.out_features // len(k_norm)
    return torch.cat((q_norm.expand(heads[0], -1), k_norm.expand(heads[1], -1)))


class _Plug:
    """Makes transformers' code call `attend`, inside the block; for any number of blocks, one after the other."""

    def __init__(self, model: PreTrainedModel, attend: Attend) -> None:
        self._model, self._attend = model, attend

    def __enter__(self) -> None:
        self._token, self._before = _plugged.set(self), self._model.config._attn_implementation
        self._model.config._attn_implementation = INTERFACE

    def __exit__(self, *_: object) -> None:
        self._model.config._attn_implementation = self._before
        _plugged.reset(self._token)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v)

    def copy(self) -> "_Plug":
        """For a block of its own: a backward pass may run inside this one's."""
        return _Plug(self._model, self._attend)


_plugged: ContextVar[_Plug] = ContextVar("plugged")


def _run_hub(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    for module in model.modules():
        if hasattr(module, _OPTIONS):
            _adopt_layer(module)
    with _Plug(model, attend):
        output = model.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _hub_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **extra: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) tensors of one layer, to (1, N, H, D)."""
    if odd := [name for name in _EXTRAS if extra.get(name) is not None]:
        raise ValueError(f"its attention uses {' and '.join(odd)}")
    dim = query.shape[-1]
    scaled = query[0].transpose(0, 1) * (extra["scaling"] * dim**0.5)  # attend itself divides by sqrt(D)
    mixed = _plugged.get().attend(module.layer_idx, scaled, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return mixed[None], None


AttentionInterface.register(INTERFACE, _hub_attention)
