"""RMSNorm and SwiGLU with hand-written gradients.

Autograd through the composite operators keeps every intermediate and makes a pass over memory for each; on a CPU these
passes dominate the cost, not the arithmetic. Values equal those of transformers' modules up to rounding. A compiler
makes these passes one by itself: under `torch.compile` the plain formulas run.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, normalised in float32 as transformers does."""
    if torch.is_grad_enabled():
        if x.dtype.itemsize >= 4 and not torch.compiler.is_compiling():
            return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass over memory; squares and mean take two
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last axis holds gate then up."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    if not torch.is_grad_enabled():
        # F.silu rounds differently at the end of a thread's share of the elements; exp does not.
        gate, up = gate_up.chunk(2, -1)
        wide = gate.float()
        divisor = wide.neg().exp_().add_(1)
        return torch.div(wide, divisor, out=divisor).to(gate.dtype).mul_(up)
    return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps))
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normed, scale, weight = ctx.saved_tensors
        grad_weight = (grad * normed).sum_to_size(weight.shape)
        inner = grad * weight
        projection = (inner * normed).mean(-1, keepdim=True)
        return inner.sub_(normed * projection).mul_(scale), grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out
