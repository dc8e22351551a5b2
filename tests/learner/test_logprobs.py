"""KL and entropy terms: values, gradients, bounds; scores of tokens in chunks, with the plain path's gradients."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fixtures.sizes import Sizes
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.learner import logprobs as module
from shoal.learner.advantage import build_samples
from shoal.learner.logprobs import TokenScores, entropy_from_logits, kl_k3, score_states, score_tokens
from shoal.policy.packing import build_packs
from shoal.rollout import Group

TOKENS, WIDTH, WORDS = 50, 24, 301
CHUNK = 4 * WORDS * 7
"""Bytes: 8 chunks, the last of one row."""


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


def draw_states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """States, a head with bias, targets and temperatures."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, WORDS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    targets = torch.randint(WORDS, (TOKENS,), generator=generator)
    temperatures = 0.5 + torch.rand(TOKENS, generator=generator)
    return hidden.to(dtype).requires_grad_(), head.to(dtype), targets, temperatures


def take_gradients(scores: TokenScores, inputs: list[Tensor], *, entropy_grad: bool) -> tuple[Tensor, ...]:
    """Gradients of a loss that weights every token, and every entropy if it carries gradient, differently."""
    weights = torch.linspace(-1, 1, len(scores.logprobs))
    loss = (weights * scores.logprobs).sum()
    if entropy_grad:
        loss = loss + (weights.flip(0) * scores.entropy).sum()
    return torch.autograd.grad(loss, inputs)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_chunks_give_the_scores_and_gradients_of_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, scaled: bool, entropy_grad: bool
) -> None:
    hidden, head, targets, temperatures = draw_states()
    inputs = [hidden, *head.parameters()]

    def score() -> tuple[TokenScores, tuple[Tensor, ...]]:
        scores = score_states(hidden, head, targets, temperatures if scaled else None, entropy_grad=entropy_grad)
        return scores, take_gradients(scores, inputs, entropy_grad=entropy_grad)

    plain, expected = score()
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    chunked, gradients = score()
    assert_close(chunked.logprobs, plain.logprobs)
    assert_close(chunked.entropy, plain.entropy)
    assert chunked.entropy.requires_grad == plain.entropy.requires_grad == entropy_grad
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_no_tensor_is_larger_than_a_chunk_forward_or_backward(
    monkeypatch: pytest.MonkeyPatch, entropy_grad: bool
) -> None:
    hidden, head, targets, temperatures = draw_states()
    assert head.weight.numel() > CHUNK // 4, "the weight and its gradient are the largest tensors that must exist"

    def measure() -> int:
        with Sizes() as sizes:
            scores = score_states(hidden, head, targets, temperatures, entropy_grad=entropy_grad)
            take_gradients(scores, [hidden, *head.parameters()], entropy_grad=entropy_grad)
        return sizes.largest

    assert measure() == TOKENS * WORDS
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    assert measure() == head.weight.numel() < TOKENS * WORDS
    head.requires_grad_(False)  # an adapter is trained: not even a gradient of the head's size
    with Sizes() as sizes:
        scores = score_states(hidden, head, targets, temperatures, entropy_grad=entropy_grad)
        take_gradients(scores, [hidden], entropy_grad=entropy_grad)
    assert sizes.largest == CHUNK // 4


def test_gradients_of_a_bfloat16_head_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets, temperatures = draw_states(torch.bfloat16)
    many = torch.arange(40 * TOKENS) % TOKENS  # the same small addends, often enough that bfloat16 would stop adding
    inputs = (hidden[many], targets[many], temperatures[many])

    def differentiate(head: nn.Linear) -> Tensor:
        scores = score_states(inputs[0].detach().to(head.weight.dtype), head, *inputs[1:])
        (gradient,) = torch.autograd.grad(scores.logprobs.sum(), [head.weight])
        return gradient

    expected = differentiate(copy.deepcopy(head).float())
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * WORDS)
    gradient = differentiate(head)
    assert gradient.dtype == torch.bfloat16
    assert (gradient.float() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_has_the_gradients_of_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., PreTrainedModel], groups: list[Group], tied: bool
) -> None:
    model = make_model("qwen3", num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied)
    (pack,) = build_packs(build_samples(groups, "zscore"), 10_000)
    parameters = list(model.parameters())

    def differentiate() -> tuple[Tensor, ...]:
        return take_gradients(score_tokens(model, pack, entropy_grad=True), parameters, entropy_grad=True)

    expected = differentiate()
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * model.config.vocab_size * 9)
    for ours, theirs in zip(differentiate(), expected, strict=True):
        assert_close(ours, theirs)


def test_an_adapter_of_the_head_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets, temperatures = draw_states()
    wrapped: Any = nn.Sequential(head)
    wrapped.out_features = WORDS
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    with pytest.raises(AssertionError, match="would be ignored"):
        score_states(hidden, wrapped, targets, temperatures)
