"""Losses compared with hand-computed numbers, a padded second implementation, and their own invariants."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config.run import LossConfig, LossName
from shoal.learner.losses import LOSSES
from shoal.learner.losses.base import LossInputs, LossOutput, sum_tokens

NAMES = sorted(LOSSES)
RATIO_CLIPPED = [name for name in NAMES if name != "cispo"]
CONFIG = LossConfig(eps_low=0.2, eps_high=0.28, delta=4.0)
MAX_TOKENS = 10


def make_inputs(logprobs: list[float], ratios: list[float], advantages: list[float], segment: list[int]) -> LossInputs:
    current = torch.tensor(logprobs, dtype=torch.float64)
    old = current - torch.tensor(ratios, dtype=torch.float64).log()
    return LossInputs(
        logprobs=current.requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        segment=torch.tensor(segment),
        num_segments=max(segment) + 1,
    )


def check_token(name: LossName, ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    """Loss, d(loss)/d(logprob) and clipped of a sample of one token with log-prob -1."""
    inputs = make_inputs([-1.0], [ratio], [advantage], [0])
    output = LOSSES[name].token_loss(inputs, CONFIG)
    (slope,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    assert output.ratio.item() == pytest.approx(ratio)
    assert output.token_loss.item() == pytest.approx(loss)
    assert slope.item() == pytest.approx(gradient)
    assert output.clipped.tolist() == [clipped]


def test_every_name_of_the_config_has_a_page() -> None:
    assert set(LOSSES) == set(get_args(LossName))


# ratio, advantage -> loss, gradient, clipped. Inside the clip both are -r A; 0.8 and 1.28 are the edges.
PPO = [
    (0.5, 2.0, -1.0, -1.0, False),
    (0.9, 2.0, -1.8, -1.8, False),
    (1.0, 2.0, -2.0, -2.0, False),
    (1.2, 2.0, -2.4, -2.4, False),
    (1.5, 2.0, -2.56, 0.0, True),
    (5.0, 2.0, -2.56, 0.0, True),
    (0.5, -2.0, 1.6, 0.0, True),
    (0.9, -2.0, 1.8, 1.8, False),
    (1.5, -2.0, 3.0, 3.0, False),
    (1.5, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize("name", ["intellect2", "grpo", "dr_grpo", "dapo", "gspo"])
@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), PPO)
def test_clipped_objective_matches_hand_computed_numbers(
    name: LossName, ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    check_token(name, ratio, advantage, loss, gradient, clipped)


def test_intellect2_bounds_a_bad_token_beyond_delta_and_gives_it_no_gradient() -> None:
    check_token("intellect2", 3.9, -2.0, 7.8, 7.8, False)
    check_token("intellect2", 5.0, -2.0, 8.0, 0.0, True)
    check_token("intellect2", 500.0, -2.0, 8.0, 0.0, True)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_other_losses_leave_the_ratio_of_a_bad_token_unbounded(name: LossName) -> None:
    check_token(name, 500.0, -2.0, 1000.0, 1000.0, False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(0.5, 2.0, 0.8, True), (0.9, 2.0, 0.9, False), (5.0, 2.0, 1.28, True), (5.0, -2.0, 1.28, True)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: bool
) -> None:
    # log-prob is -1, so the loss is +weight * A and its gradient -weight * A.
    loss, gradient = weight * advantage, -weight * advantage
    check_token("cispo", ratio, advantage, loss, gradient, clipped)


def test_gspo_tokens_share_the_geometric_mean_ratio() -> None:
    inputs = make_inputs([-1.0, -2.0, -3.0], [4.0, 0.25, 1.21], [1.0, 1.0, -1.0], [0, 0, 1])
    output = LOSSES["gspo"].token_loss(inputs, CONFIG)
    assert output.ratio.tolist() == pytest.approx([1.0, 1.0, 1.21])
    assert output.token_loss.tolist() == pytest.approx([-1.0, -1.0, 1.21])
    assert not output.clipped.any()


def test_gspo_gradient_flows_through_the_sequence_mean() -> None:
    inputs = make_inputs([-1.0, -2.0], [1.44, 1.0], [3.0, 3.0], [0, 0])
    output = LOSSES["gspo"].token_loss(inputs, CONFIG)
    weights = LOSSES["gspo"].sample_weights(torch.tensor([2]), MAX_TOKENS)
    (gradient,) = torch.autograd.grad(sum_tokens(output.token_loss, weights, inputs.segment), inputs.logprobs)
    assert gradient.tolist() == pytest.approx([-1.2 * 3 / 2, -1.2 * 3 / 2])


def test_gspo_clips_a_sample_as_a_whole() -> None:
    inputs = make_inputs([-1.0, -1.0, -1.0, -1.0], [4.0, 1.0, 1.0, 1.0], [1.0] * 4, [0, 0, 1, 1])
    output = LOSSES["gspo"].token_loss(inputs, CONFIG)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    assert output.clipped.tolist() == [True, True, False, False]
    assert gradient[:2].tolist() == [0.0, 0.0] and (gradient[2:] != 0).all()


def test_sample_weights_match_hand_computed_numbers() -> None:
    lengths = torch.tensor([1, 3, 4])
    expected: dict[LossName, list[float]] = {
        "intellect2": [1 / 8] * 3,
        "dapo": [1 / 8] * 3,
        "cispo": [1 / 8] * 3,
        "grpo": [1 / 3, 1 / 9, 1 / 12],
        "gspo": [1 / 3, 1 / 9, 1 / 12],
        "dr_grpo": [1 / 30] * 3,
    }
    for name, weights in expected.items():
        assert LOSSES[name].sample_weights(lengths, MAX_TOKENS).tolist() == pytest.approx(weights)


# A second implementation: [B, L] with a mask, by cases instead of min and clamp.


def padded_loss(name: str, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    low, high = 1 - CONFIG.eps_low, 1 + CONFIG.eps_high
    num_samples, lengths = len(logp), mask.sum(1)
    r, a = torch.exp(logp - old), advantage[:, None].expand_as(logp)
    if name == "gspo":
        s = torch.exp(((logp - old) * mask).sum(1) / lengths)
        kept = torch.where(advantage > 0, s <= high, s >= low)
        return -torch.where(kept, s * advantage, s.clip(low, high).detach() * advantage).mean()
    if name == "cispo":
        token = -torch.where(r > high, high, torch.where(r < low, low, r)).detach() * a * logp
    else:
        token = -torch.where(((a > 0) & (r > high)) | ((a < 0) & (r < low)), r.clip(low, high).detach() * a, r * a)
    if name == "intellect2":
        token = torch.where((a < 0) & (r > CONFIG.delta), -CONFIG.delta * a, token)
    token = token * mask
    if name == "grpo":
        return (token.sum(1) / lengths).mean()
    return token.sum() / (num_samples * MAX_TOKENS if name == "dr_grpo" else lengths.sum())


def make_padded(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs [B, L], advantages [B] and mask [B, L], with log-ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 7, 3, 5, 2, 6])
    mask = torch.arange(7)[None] < lengths[:, None]
    logp = -torch.rand(6, 7, generator=generator, dtype=torch.float64) * 4
    old = logp + torch.randn(6, 7, generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.5, -0.5, 0.0, -2.0, 0.7, 0.3], dtype=torch.float64)
    return logp.requires_grad_(), old, advantage, mask


def pack_rows(padded: tuple[Tensor, Tensor, Tensor, Tensor], rows: list[int]) -> LossInputs:
    logp, old, advantage, mask = (tensor[rows] for tensor in padded)
    segment = torch.arange(len(rows))[:, None].expand_as(mask)[mask]
    return LossInputs(
        logprobs=logp[mask],
        old_logprobs=old[mask],
        advantages=advantage[segment],
        segment=segment,
        num_segments=len(rows),
    )


def packed_gradient(name: LossName, padded: tuple[Tensor, Tensor, Tensor, Tensor], micro: list[list[int]]) -> Tensor:
    """d(loss)/d(logp) [B, L], accumulated over micro-batches of packed rows."""
    logp, _, _, mask = padded
    weights = LOSSES[name].sample_weights(mask.sum(1), MAX_TOKENS)
    total = torch.zeros_like(logp)
    for rows in micro:
        inputs = pack_rows(padded, rows)
        output = LOSSES[name].token_loss(inputs, CONFIG)
        total += torch.autograd.grad(sum_tokens(output.token_loss, weights[rows], inputs.segment), logp)[0]
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_packed_loss_equals_a_padded_second_implementation(name: LossName, seed: int) -> None:
    padded = make_padded(seed)
    reference = padded_loss(name, *padded)
    inputs = pack_rows(padded, list(range(6)))
    output = LOSSES[name].token_loss(inputs, CONFIG)
    weights = LOSSES[name].sample_weights(padded[3].sum(1), MAX_TOKENS)
    assert sum_tokens(output.token_loss, weights, inputs.segment).item() == pytest.approx(reference.item(), abs=1e-7)
    (expected,) = torch.autograd.grad(reference, padded[0])
    torch.testing.assert_close(packed_gradient(name, padded, [list(range(6))]), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("micro", [[[0], [1], [2], [3], [4], [5]], [[5, 0, 2], [4, 1, 3]], [[3], [0, 1, 2, 4, 5]]])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_in_any_cut_and_order_give_the_gradient_of_the_whole(
    name: LossName, micro: list[list[int]]
) -> None:
    padded = make_padded(0)
    whole = packed_gradient(name, padded, [list(range(6))])
    torch.testing.assert_close(packed_gradient(name, padded, micro), whole, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", RATIO_CLIPPED)
def test_gradient_is_zero_exactly_where_clipped_or_without_advantage(name: LossName) -> None:
    clipped, gradient, advantages = [], [], []
    for seed in range(5):
        inputs = pack_rows(make_padded(seed), list(range(6)))
        output = LOSSES[name].token_loss(inputs, CONFIG)
        gradient.append(torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)[0])
        clipped.append(output.clipped)
        advantages.append(inputs.advantages)
    silent = torch.cat(clipped) | (torch.cat(advantages) == 0)
    assert torch.equal(torch.cat(gradient) == 0, silent)
    assert torch.cat(clipped).any() and not silent.all()


def test_cispo_gives_every_token_with_advantage_a_gradient() -> None:
    inputs = pack_rows(make_padded(0), list(range(6)))
    output = LOSSES["cispo"].token_loss(inputs, CONFIG)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    assert torch.equal(gradient != 0, inputs.advantages != 0) and output.clipped.any()


EXTREME_DIFFS = st.sampled_from([-1e4, -88.8, -20.0, 0.0, 20.0, 88.8, 1e4])
EXTREME_ADVANTAGES = st.sampled_from([-2.0, 0.0, 2.0])


def run_extreme(name: LossName, diffs: list[float], advantages: list[float]) -> tuple[LossOutput, Tensor]:
    old = torch.full((len(diffs),), -1e4)
    inputs = LossInputs(
        logprobs=(old + torch.tensor(diffs)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(advantages),
        segment=torch.arange(len(diffs)) // 2,
        num_segments=len(diffs),
    )
    output = LOSSES[name].token_loss(inputs, CONFIG)
    return output, torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)[0]


@pytest.mark.parametrize("name", NAMES)
@given(tokens=st.lists(st.tuples(EXTREME_DIFFS, EXTREME_ADVANTAGES), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_extreme_log_ratios_give_finite_loss_and_gradient(name: LossName, tokens: list[tuple[float, float]]) -> None:
    output, gradient = run_extreme(name, [diff for diff, _ in tokens], [advantage for _, advantage in tokens])
    for tensor in (output.token_loss, output.ratio, gradient, 0.0 * output.token_loss):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", RATIO_CLIPPED)
def test_beyond_the_log_ratio_bound_the_gradient_is_zero(name: LossName) -> None:
    output, gradient = run_extreme(name, [1e4, 1e4, -1e4, -1e4], [-1.0, -1.0, 1.0, 1.0])
    assert output.clipped.all() and (gradient == 0).all()
    assert output.ratio.tolist() == pytest.approx([math.exp(20)] * 2 + [math.exp(-20)] * 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        make_inputs([-1.0, value], [1.0, 1.0], [1.0, 1.0], [0, 0])


def test_inputs_of_different_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ in length"):
        make_inputs([-1.0, -1.0], [1.0, 1.0], [1.0], [0, 0])


def test_half_precision_log_probs_are_refused() -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="float32"):
        LossInputs(
            logprobs=half, old_logprobs=half, advantages=half, segment=torch.zeros(1, dtype=torch.long), num_segments=1
        )
