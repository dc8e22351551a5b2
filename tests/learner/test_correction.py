"""Off-policy correction: weights by kind, and metrics that merge."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.learner.correction import Correction, CorrectionKind, build_correction


def correct_ratios(
    ratios: list[float], segment: list[int], kind: CorrectionKind, cap: float = 2.0, num_segments: int = 0
) -> Correction:
    diff = torch.tensor(ratios, dtype=torch.float64).log()
    behaviour = torch.full_like(diff, -1.0)
    samples = num_segments or max(segment) + 1
    return build_correction(behaviour + diff, behaviour, torch.tensor(segment), samples, kind=kind, cap=cap)


def test_token_weights_are_ratios_truncated_above_only() -> None:
    correction = correct_ratios([0.01, 0.5, 1.0, 1.9, 3.0, 100.0], [0, 0, 0, 1, 1, 1], "token")
    assert correction.weights.tolist() == pytest.approx([0.01, 0.5, 1.0, 1.9, 2.0, 2.0])
    assert correction.mismatch.truncated == pytest.approx(2 / 6)
    assert correction.mismatch.masked == 0


def test_sequence_mask_looks_at_the_geometric_mean_on_both_sides() -> None:
    # means: sqrt(4 * 0.25) = 1, sqrt(9 * 1) = 3, sqrt(1 / 9) = 1 / 3
    correction = correct_ratios([4.0, 0.25, 9.0, 1.0, 1 / 9, 1.0], [0, 0, 1, 1, 2, 2], "sequence")
    assert correction.weights.tolist() == [1, 1, 0, 0, 0, 0]
    assert correction.mismatch.masked == pytest.approx(2 / 3)
    assert correction.mismatch.truncated == 0
    assert correction.mismatch.ess == pytest.approx(2 / 6)


def test_without_correction_weights_are_one_and_the_mismatch_is_still_measured() -> None:
    correction = correct_ratios([0.5, 3.0], [0, 1], "none")
    assert correction.weights.tolist() == [1.0, 1.0]
    # k3 of KL(behaviour || old): r - 1 - log r
    assert correction.mismatch.kl == pytest.approx(((0.5 - 1 + math.log(2)) + (3 - 1 - math.log(3))) / 2)
    assert correction.mismatch.max_diff == pytest.approx(math.log(3))
    assert correction.mismatch.ess == 1


@pytest.mark.parametrize("kind", ["none", "token", "sequence"])
def test_equal_policies_need_no_correction(kind: CorrectionKind) -> None:
    correction = correct_ratios([1.0] * 5, [0, 0, 1, 1, 1], kind)
    mismatch = correction.mismatch
    assert correction.weights.tolist() == [1.0] * 5
    assert (mismatch.kl, mismatch.max_diff, mismatch.truncated, mismatch.masked) == (0, 0, 0, 0)
    assert mismatch.ess == mismatch.raw_ess == 1


def test_effective_sample_size_matches_hand_computed_numbers() -> None:
    mismatch = correct_ratios([1.0, 1.0, 4.0], [0, 0, 0], "token").mismatch
    assert mismatch.ess == pytest.approx((1 + 1 + 2) ** 2 / (3 * (1 + 1 + 4)))
    assert mismatch.raw_ess == pytest.approx((1 + 1 + 4) ** 2 / (3 * (1 + 1 + 16)))


def test_all_samples_masked_has_effective_size_zero() -> None:
    assert correct_ratios([9.0, 9.0], [0, 1], "sequence").mismatch.ess == 0


@pytest.mark.parametrize("kind", ["none", "token", "sequence"])
@pytest.mark.parametrize("diff", [1e4, -1e4])
def test_extreme_differences_stay_finite(kind: CorrectionKind, diff: float) -> None:
    behaviour = torch.full((3,), -1e4)
    segment = torch.zeros(3, dtype=torch.long)
    correction = build_correction(behaviour + diff, behaviour, segment, 1, kind=kind, cap=2.0)
    assert torch.isfinite(correction.weights).all() and correction.weights.max() <= 2
    assert all(math.isfinite(number) for number in asdict(correction.mismatch).values())
    assert correction.mismatch.max_diff == 1e4


def test_weights_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    correction = build_correction(old, torch.zeros(2), torch.tensor([0, 1]), 2, kind="token", cap=2.0)
    assert not correction.weights.requires_grad


def test_log_probs_that_are_not_finite_are_refused() -> None:
    broken = torch.tensor([0.0, -math.inf])
    with pytest.raises(AssertionError, match="not finite"):
        build_correction(torch.zeros(2), broken, torch.tensor([0, 0]), 1, kind="token", cap=2.0)


def test_a_batch_without_tokens_has_empty_metrics() -> None:
    empty = torch.zeros(0)
    mismatch = build_correction(empty, empty, empty.long(), 0, kind="token", cap=2.0).mismatch
    assert (mismatch.kl, mismatch.ess, mismatch.truncated, mismatch.masked, mismatch.max_diff) == (0, 0, 0, 0, 0)


@given(
    samples=st.lists(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=5), min_size=2, max_size=6),
    kind=st.sampled_from(["none", "token", "sequence"]),
)
@settings(max_examples=50, deadline=None)
def test_merged_metrics_equal_those_of_the_whole(samples: list[list[float]], kind: CorrectionKind) -> None:
    segment = [index for index, sample in enumerate(samples) for _ in sample]
    whole = correct_ratios([ratio for sample in samples for ratio in sample], segment, kind)
    parts = [correct_ratios(sample, [0] * len(sample), kind) for sample in samples]
    merged = parts[0].mismatch
    for part in parts[1:]:
        merged = merged.merge(part.mismatch)
    assert asdict(merged) == pytest.approx(asdict(whole.mismatch))
    assert torch.cat([part.weights for part in parts]).tolist() == pytest.approx(whole.weights.tolist())
