"""RMSNorm and SwiGLU: transformers' values, autograd's gradients, and rows that do not depend on each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from shoal.policy.kernels import rms_norm, swiglu

EPS = 1e-6


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (5, 6, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm_has_the_values_and_gradients_of_the_formula(shape: tuple[int, ...], scale: float) -> None:
    # Per head there is one weight row, which the batch shares.
    x, weight = draw(*shape, scale=scale).requires_grad_(), draw(*shape[1:], seed=1).requires_grad_()
    ours, theirs = rms_norm(x, weight, EPS), plain_norm(x, weight)
    torch.testing.assert_close(ours, theirs)
    outer = draw(*shape, seed=2)
    for got, expected in zip(
        torch.autograd.grad(ours, (x, weight), outer), torch.autograd.grad(theirs, (x, weight), outer), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 4), (7, 48), (300, 256)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_swiglu_has_the_values_and_gradients_of_the_formula(shape: tuple[int, int], scale: float) -> None:
    x = draw(*shape, scale=scale).requires_grad_()
    ours, theirs = swiglu(x), plain_swiglu(x)
    torch.testing.assert_close(ours, theirs)
    outer = draw(shape[0], shape[1] // 2, seed=2)
    (got,), (expected,) = torch.autograd.grad(ours, x, outer), torch.autograd.grad(theirs, x, outer)
    torch.testing.assert_close(got, expected, atol=1e-5 * scale, rtol=1e-4)


def test_swiglu_passes_the_gradient_check() -> None:
    assert torch.autograd.gradcheck(swiglu, draw(3, 8).double().requires_grad_())


def test_rms_norm_of_short_floats_has_the_gradients_of_transformers() -> None:
    module = Qwen3RMSNorm(32, eps=EPS).to(torch.bfloat16)
    x = draw(9, 32, scale=3.0).bfloat16().requires_grad_()
    outer = draw(9, 32, seed=2).bfloat16()
    ours = torch.autograd.grad(rms_norm(x, module.weight, EPS), (x, module.weight), outer)
    theirs = torch.autograd.grad(module(x), (x, module.weight), outer)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_the_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    module = Qwen3RMSNorm(32, eps=EPS).to(dtype)
    module.weight.copy_(draw(32))
    x = draw(9, 32, scale=3.0).to(dtype)
    torch.testing.assert_close(rms_norm(x, module.weight, EPS), module(x))
    torch.testing.assert_close(swiglu(x), plain_swiglu(x))


@torch.no_grad()
def test_swiglu_stays_finite_for_gates_far_from_zero() -> None:
    gates = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]])
    assert swiglu(torch.cat((gates, torch.ones_like(gates)), 1)).tolist() == [
        [0.0, 0.0, 0.0, 200.0, pytest.approx(1e30)]
    ]


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_rows_have_the_same_bits_whatever_their_number_and_the_threads(threads: int) -> None:
    # Threads divide elements, not rows: beyond 32768 elements a share may end in the middle of a row.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, weight = draw(320, 704, scale=4.0), draw(704, seed=1)
    whole = rms_norm(x, weight, EPS), swiglu(x)
    parts = [(rms_norm(x[:rows], weight, EPS), swiglu(x[:rows])) for rows in (16, 112, 160, 304)]
    torch.set_num_threads(before)
    for part in parts:
        for got, expected in zip(part, whole, strict=True):
            assert torch.equal(got, expected[: len(got)])


def test_training_leaves_its_inputs_alone() -> None:
    x, weight = draw(4, 16).requires_grad_(), draw(16, seed=1).requires_grad_()
    outer = draw(4, 8, seed=2)
    kept = x.detach().clone(), outer.clone()
    swiglu(rms_norm(x, weight, EPS)).backward(outer)
    assert torch.equal(x.detach(), kept[0]) and torch.equal(outer, kept[1])
