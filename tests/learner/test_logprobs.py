"""KL and entropy terms: values, gradients, bounds."""

import math

import pytest
import torch

from shoal.learner.logprobs import entropy_from_logits, kl_k3


def test_k3_matches_hand_computed_numbers() -> None:
    logprobs = torch.log(torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64))
    reference = torch.log(torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64))
    expected = [0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    assert kl_k3(logprobs, reference).tolist() == pytest.approx(expected)


def test_k3_averages_to_the_kl_under_the_policy() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl_k3(policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-5)


def test_k3_carries_gradient_to_the_policy() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -3.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(kl_k3(logprobs, reference).sum(), logprobs)
    # d/dlogp (exp(d) - d - 1) = 1 - exp(d): pulls up where ref is the likelier, down where it is not.
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(1.0), 0.0])


def test_k3_far_below_the_reference_keeps_its_pull_and_far_above_is_bounded() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-1e4, 0.0]))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.tolist() == pytest.approx([1e4 - 1, math.exp(20) - 21])
    assert gradient.tolist() == [1.0, 0.0]


def test_entropy_matches_hand_computed_numbers() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 1e-30, 1e-30], [0.7, 0.1, 0.1, 0.1]]))
    expected = [math.log(4), math.log(2), -0.7 * math.log(0.7) - 0.3 * math.log(0.1)]
    assert entropy_from_logits(logits).tolist() == pytest.approx(expected)


def test_entropy_gradient_matches_the_closed_form() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    entropy = entropy_from_logits(logits)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    logprobs = torch.log_softmax(logits.detach(), -1)
    # dH/dz_v = -p_v (log p_v + H)
    torch.testing.assert_close(gradient, -logprobs.exp() * (logprobs + entropy.detach()[:, None]))
    assert (gradient != 0).all()


def test_entropy_is_computed_in_float32_and_finite_for_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    entropy = entropy_from_logits(logits)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert entropy.dtype == torch.float32 and entropy.tolist() == pytest.approx([0.0, math.log(3)])
    assert torch.isfinite(gradient).all()
