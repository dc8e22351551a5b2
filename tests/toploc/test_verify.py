"""What verification measures, compared with plain loops; and that no bytes raise or pass."""

import struct
from statistics import fmean, median

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.toploc.build import build_batch, build_proofs, commit_values
from shoal.toploc.field import P
from shoal.toploc.proof import Fault
from shoal.toploc.select import read_bits, select_top, split_chunks
from shoal.toploc.verify import BAND, OUTSIDE, UNMEASURED, ChunkResult, verify_batch, verify_proofs

GOLDEN = {
    "ffd91b422b67ba4b756d": {35: 2.891, 63: 2.391, 70: -2.172, 79: -2.672},
    "ffd9cbb89af1862554a0": {2: -2.375, 6: -1.781, 35: -2.547, 44: 2.531},
    "ffd9b468dae6e4ab41b6": {3: 2.203, 8: 2.812, 19: 2.031, 47: -2.234},
    "ffd98064d65830e2af73": {3: 2.0, 33: 2.016, 43: 2.109, 44: -2.219},
    "ffd9d20464ea9191f6d7": {1: -1.281, 4: 1.211, 13: -2.453, 14: 1.18},
}
"""Proofs printed by the published package's README, decoded by hand: index to value, to three decimals."""


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def passes_published(result: ChunkResult) -> bool:
    """The thresholds of the TOPLOC paper for bfloat16, and no fault."""
    published = result.exp_mismatches <= 38 and result.mant_err_mean <= 10 and result.mant_err_median <= 8
    return published and result.fault is None


def evaluate_plain(proof: bytes, index: int) -> int:
    modulus, *coefficients = struct.unpack(f">{len(proof) // 2}H", proof)
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * (index % modulus) + coefficient) % P
    return value


def compare_plain(hidden: Tensor, proof: bytes, k: int) -> tuple[int, float, float, int]:
    """Exponent mismatches, mantissa mean and median, sign mismatches of one chunk without NaN."""
    bits = [value % 0x10000 for value in hidden.reshape(-1).view(torch.int16).tolist()]
    order = sorted(range(len(bits)), key=lambda index: (-(bits[index] & 0x7FFF), index))[:k]
    errors, signs = [], 0
    for index in order:
        claimed = evaluate_plain(proof, index)
        if claimed >> 7 & 0xFF == bits[index] >> 7 & 0xFF:
            errors.append(abs((claimed & 0x7F) - (bits[index] & 0x7F)))
            signs += claimed >> 15 != bits[index] >> 15
    return k - len(errors), fmean(errors) if errors else 2.0**64, median(errors) if errors else 2.0**64, signs


def forge_constant(value: float, points: int = 128) -> bytes:
    bits = int(torch.tensor(value).bfloat16().view(torch.int16)) % 0x10000
    return struct.pack(f">{points + 1}H", P, bits, *[0] * (points - 1))


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 64])
@pytest.mark.parametrize("width", [4, 100, 640])
def test_a_proof_agrees_with_the_states_it_was_built_from(tokens: int, width: int) -> None:
    hidden = draw_normal(tokens, width)
    results = verify_proofs(hidden, build_proofs(hidden))
    assert len(results) == -(-tokens // 32)
    for result, values in zip(results, (32 * width, (tokens - 32) * width), strict=False):
        assert result.exp_mismatches == result.mant_err_mean == result.mant_err_median == result.sign_mismatches == 0
        assert result.points == min(128, min(tokens, 32) * width, values if values > 0 else 128)
        assert result.fault is None


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02, 0.2, 3.0])
def test_numbers_equal_a_plain_loop_at_any_distance(noise: float) -> None:
    hidden = draw_normal(96, 300)
    other = (hidden.float() * (1 + noise * torch.randn(96, 300, generator=torch.Generator().manual_seed(9)))).bfloat16()
    proofs = build_proofs(other)
    for rows, proof, result in zip(hidden.split(32), proofs, verify_proofs(hidden, proofs), strict=True):
        found = result.exp_mismatches, result.mant_err_mean, result.mant_err_median, result.sign_mismatches
        assert found == compare_plain(rows, proof, 128)


def test_numbers_equal_a_plain_loop_where_a_modulus_is_smaller() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, 200_000)).astype(np.float32)
    values[0, 5] = values[0, 5 + P] = 1000  # two top values that are congruent
    hidden = torch.from_numpy(values).bfloat16()
    (proof,) = build_proofs(hidden)
    assert int.from_bytes(proof[:2]) < P
    (result,) = verify_proofs(hidden, [proof])
    assert (result.exp_mismatches, result.mant_err_mean, result.fault) == (0, 0.0, None)


@pytest.mark.parametrize(("text", "values"), GOLDEN.items())
def test_the_readmes_proofs_hold_at_the_indices_decoded_from_them(text: str, values: dict[int, float]) -> None:
    hidden = torch.zeros(1, 80 if 79 in values else 48, dtype=torch.bfloat16)
    for index, value in values.items():
        hidden[0, index] = value
    (result,) = verify_proofs(hidden, [bytes.fromhex(text)], topk=4)
    assert result.exp_mismatches == result.sign_mismatches == 0
    assert result.mant_err_mean <= 0.25  # three decimals are not always the nearest bfloat16
    assert result.fault is None


def test_states_of_another_text_do_not_agree() -> None:
    for width in (128, 896):
        for result in verify_proofs(draw_normal(64, width), build_proofs(draw_normal(64, width, seed=1))):
            assert result.exp_mismatches > 100


def test_flipped_signs_are_counted_and_nothing_else() -> None:
    hidden = draw_normal(32, 64)
    (result,) = verify_proofs(-hidden, build_proofs(hidden))
    assert (result.exp_mismatches, result.mant_err_mean, result.sign_mismatches) == (0, 0.0, 128)


def test_minus_zero_agrees_with_zero() -> None:
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden[0, :5] = torch.tensor([5.0, -4.0, 3.0, -2.0, 1.0])
    (result,) = verify_proofs(torch.where(hidden == 0, -0.0, hidden), build_proofs(hidden))
    assert (result.exp_mismatches, result.mant_err_mean, result.sign_mismatches) == (0, 0.0, 0)


def test_nan_agrees_with_nan_of_any_pattern() -> None:
    hidden = draw_normal(32, 64)
    hidden[:, 3] = float("nan")
    bits = hidden.view(torch.int16).clone()
    bits[:, 3] = -1  # 0xFFFF
    (result,) = verify_proofs(bits.view(torch.bfloat16), build_proofs(hidden))
    assert (result.exp_mismatches, result.mant_err_mean, result.sign_mismatches) == (0, 0.0, 0)


def test_a_nan_of_another_sign_in_a_proof_agrees_too() -> None:
    """The published package commits to a NaN unchanged; 0xFFC0 is what x86 gives for 0 / 0."""
    hidden = torch.tensor([[float("nan"), 3.0, 2.0, 1.0]])
    (proof,) = commit_values(np.arange(4)[None], np.array([[0xFFC0, 0x4040, 0x4000, 0x3F80]], dtype=np.uint16))
    (result,) = verify_proofs(hidden, [proof])
    assert (result.exp_mismatches, result.mant_err_mean, result.sign_mismatches) == (0, 0.0, 0)


def test_a_prover_with_nans_does_not_agree_with_a_clean_verifier() -> None:
    hidden = draw_normal(32, 64)
    broken = hidden.clone()
    broken[:, :8] = float("nan")
    (result,) = verify_proofs(hidden, build_proofs(broken))
    assert result.exp_mismatches > 100


def test_infinities_agree_with_infinities() -> None:
    hidden = draw_normal(32, 64)
    hidden[4], hidden[5] = float("inf"), float("-inf")
    (result,) = verify_proofs(hidden, build_proofs(hidden))
    assert (result.exp_mismatches, result.sign_mismatches) == (0, 0)


def test_another_choice_among_ties_costs_only_those_positions() -> None:
    """The last places go to the highest indices instead of the lowest, as another implementation may choose."""
    hidden = draw_normal(32, 896)
    chunk = split_chunks(hidden, 32)[0]
    indices, _ = select_top([chunk[::-1].copy()], 128)
    own, _ = select_top([chunk], 128)
    mirrored = len(chunk) - 1 - indices
    shared = len(set(mirrored[0].tolist()) & set(own[0].tolist()))
    (proof,) = commit_values(mirrored, chunk[mirrored].view(np.uint16))
    (result,) = verify_proofs(hidden, [proof])
    assert shared < 128  # there is a tie
    assert result.exp_mismatches <= 128 - shared


def test_a_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    hidden = torch.tensor([[8.0, 4.0]]).bfloat16()
    (result,) = verify_proofs(torch.tensor([[8.0 * (1 + 1 / 128), 4.0 * (1 + 4 / 128)]]), build_proofs(hidden))
    assert (result.mant_err_mean, result.mant_err_median) == (2.5, 2.5)


def test_where_no_exponent_agrees_the_mantissa_errors_are_the_worst() -> None:
    hidden = torch.tensor([[8.0, 4.0]])
    (result,) = verify_proofs(hidden * 1024, build_proofs(hidden))
    assert (result.exp_mismatches, result.mant_err_mean, result.mant_err_median) == (2, UNMEASURED, UNMEASURED)
    assert result.sign_mismatches == 0


def test_honest_proofs_look_like_top_values_elsewhere_only_by_chance() -> None:
    """An honest polynomial is random outside: 256 of P patterns per exponent that the top values have."""
    hidden = draw_normal(32 * 600, 128)
    results = verify_proofs(hidden, build_proofs(hidden))
    hits, tried = sum(r.outside_hits for r in results), sum(r.outside_points for r in results)
    assert 0.95 * OUTSIDE * 600 < tried <= OUTSIDE * 600
    assert 256 / P < hits / tried < 4 * 256 / P
    assert max(result.outside_hits for result in results) <= 6


def test_a_constant_polynomial_is_a_top_value_everywhere() -> None:
    """It passes the published thresholds on Gaussian states; here two checks reveal it."""
    results = verify_proofs(draw_normal(320, 5120), [forge_constant(3.5)] * 10)
    for result in results:
        assert result.exp_mismatches <= 38
        assert result.mant_err_mean <= 10
        assert result.outside_hits == result.outside_points == OUTSIDE
        assert (result.degree, result.fault) == (0, Fault.DEGREE)
        assert result.sign_mismatches > 30


def test_outside_positions_exclude_the_top_values() -> None:
    hidden = draw_normal(1, 160)
    (result,) = verify_proofs(hidden, build_proofs(hidden))
    assert 0 < result.outside_points < OUTSIDE
    (result,) = verify_proofs(hidden[:, :128], build_proofs(hidden[:, :128]))
    assert result.outside_points == 0


def test_outside_positions_of_a_short_chunk_are_not_counted_twice() -> None:
    hidden = draw_normal(1, 9)
    (result,) = verify_proofs(hidden, build_proofs(hidden, topk=4), topk=4)
    assert result.outside_points == 5


def test_a_wide_range_of_top_values_does_not_make_everything_a_hit() -> None:
    hidden = draw_normal(640, 128)
    hidden[::32, 0] = float("inf")
    hidden[::32, 1] = 1e30
    results = verify_proofs(hidden, build_proofs(hidden))
    share = sum(r.outside_hits for r in results) / sum(r.outside_points for r in results)
    assert 0 < share < 2 * BAND * 256 / P


@pytest.mark.parametrize(("zeros", "fault"), [(0, None), (1, None), (2, None), (3, Fault.DEGREE), (100, Fault.DEGREE)])
def test_more_than_two_leading_zeros_are_too_many(zeros: int, fault: Fault | None) -> None:
    hidden = draw_normal(32, 64)
    proof = build_proofs(hidden)[0]
    (result,) = verify_proofs(hidden, [proof[: 258 - 2 * zeros] + bytes(2 * zeros)])
    assert (result.degree, result.fault) == (127 - zeros, fault)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_proof_of_up_to_three_values_may_have_any_degree(width: int) -> None:
    hidden = torch.ones(1, width)
    (result,) = verify_proofs(hidden, build_proofs(hidden))
    assert (result.degree, result.points, result.fault) == (0, width, None)


def test_states_that_are_equal_everywhere_cannot_be_proven() -> None:
    for hidden in (torch.ones(32, 8), torch.zeros(32, 8)):
        (result,) = verify_proofs(hidden, build_proofs(hidden))
        assert (result.exp_mismatches, result.degree, result.fault) == (0, 0, Fault.DEGREE)


@pytest.mark.parametrize("word", [P, P + 5, 0xFFFF])
def test_a_coefficient_has_one_name(word: int) -> None:
    hidden = draw_normal(64, 64)
    proofs = build_proofs(hidden)
    broken = proofs[0][:20] + word.to_bytes(2) + proofs[0][22:]
    results = verify_proofs(hidden, [broken, proofs[1]])
    assert [result.fault for result in results] == [Fault.COEFFICIENT, None]
    assert (results[0].exp_mismatches, results[0].mant_err_mean, results[0].degree) == (128, UNMEASURED, -1)


def test_malformed_proofs_get_the_worst_numbers_and_their_neighbours_their_own() -> None:
    hidden = draw_normal(32 * 7, 64)
    good = build_proofs(hidden)
    shrunk = (P - 1).to_bytes(2) + good[4][2:]
    given = [good[0], None, good[2][:-1], bytes(258), shrunk, good[5] + b"\0", good[6]]
    results = verify_proofs(hidden, given)
    faults = [None, Fault.UNREADABLE, Fault.LENGTH, Fault.NULL, Fault.MODULUS, Fault.LENGTH, None]
    assert [result.fault for result in results] == faults
    worst = {(r.exp_mismatches, r.mant_err_mean, r.mant_err_median, r.outside_hits) for r in results if r.fault}
    assert worst == {(128, UNMEASURED, UNMEASURED, OUTSIDE)}
    assert results[0].exp_mismatches == results[6].exp_mismatches == 0


@pytest.mark.parametrize("odd", [None, "text", 5, 1.5, [], bytearray(258), ("a",), Fault])
def test_anything_in_the_place_of_a_proof_is_a_fault(odd: object) -> None:
    hidden = draw_normal(32, 64)
    (result,) = verify_proofs(hidden, [odd])  # type: ignore[list-item]
    assert result.fault is Fault.UNREADABLE


def test_a_missing_proof_is_a_failed_chunk() -> None:
    hidden = draw_normal(100, 64)
    results = verify_proofs(hidden, build_proofs(hidden)[:2])
    assert [result.fault for result in results] == [None, None, Fault.MISSING, Fault.MISSING]
    assert [result.fault for result in verify_proofs(hidden, [])] == [Fault.MISSING] * 4


def test_surplus_proofs_are_one_more_failed_chunk_however_many() -> None:
    hidden = draw_normal(32, 64)
    proofs = build_proofs(hidden)
    for surplus in (1, 2, 10_000):
        assert [r.fault for r in verify_proofs(hidden, proofs * (1 + surplus))] == [None, Fault.SURPLUS]
    assert [r.fault for r in verify_proofs(hidden[:0], proofs)] == [Fault.SURPLUS]
    assert verify_proofs(hidden[:0], []) == []


def test_faults_of_one_rollout_leave_the_others_of_a_batch_alone() -> None:
    hiddens = [draw_normal(tokens, 64, seed=tokens) for tokens in (64, 33, 0, 5)]
    proofs: list[list[bytes]] = build_batch(hiddens)
    given = [proofs[0][:1], proofs[1], proofs[0], proofs[3]]
    faults = [[result.fault for result in results] for results in verify_batch(hiddens, given)]
    assert faults == [[None, Fault.MISSING], [None, None], [Fault.SURPLUS], [None]]


def test_a_batch_equals_its_rollouts_one_by_one() -> None:
    hiddens = [draw_normal(tokens, 48, seed=tokens) for tokens in (0, 1, 31, 32, 33, 64, 100, 2000)]
    proofs = build_batch([hidden * 1.01 for hidden in hiddens])
    assert verify_batch(hiddens, proofs) == [verify_proofs(h, p) for h, p in zip(hiddens, proofs, strict=True)]


def test_the_prompts_proof_is_checked_like_any_other() -> None:
    prompt, hidden = draw_normal(77, 48, seed=5), draw_normal(40, 48)
    proofs = build_proofs(hidden, prefill=prompt)
    results = verify_proofs(hidden, proofs, prefill=prompt)
    assert [(r.exp_mismatches, r.fault) for r in results] == [(0, None)] * 3
    assert verify_proofs(hidden, proofs, prefill=prompt * 2)[0].exp_mismatches > 100


def test_a_proof_that_could_not_be_read_is_a_fault() -> None:
    hidden = draw_normal(32, 64)
    (result,) = verify_proofs(hidden, [None])
    assert result.fault is Fault.UNREADABLE


def test_every_type_of_states_verifies_a_bfloat16_proof() -> None:
    hidden = draw_normal(40, 64)
    proofs = build_proofs(hidden)
    for same in (hidden.float(), hidden.float().numpy(), hidden.T.contiguous().T, hidden.half(), hidden.half().numpy()):
        assert all(result.exp_mismatches == 0 for result in verify_proofs(same, proofs))


def test_verification_leaves_states_and_threads_alone() -> None:
    hidden = draw_normal(64, 64)
    before, threads = hidden.clone(), torch.get_num_threads()
    verify_proofs(hidden, build_proofs(hidden))
    assert torch.equal(read_plain(hidden), read_plain(before))
    assert torch.get_num_threads() == threads


def read_plain(hidden: Tensor) -> Tensor:
    return torch.from_numpy(read_bits(hidden).copy())


def test_a_hundred_thousand_random_byte_strings_neither_raise_nor_pass() -> None:
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 600, 60_000)
    raw = rng.bytes(int(lengths.sum()))
    ends = np.cumsum(lengths)
    proofs = [raw[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    words = rng.integers(0, P, (40_000, 129)).astype(">u2")
    words[:, 0] = P  # the form is right, and all polynomials are equally likely
    proofs += [row.tobytes() for row in words]
    hidden = draw_normal(1000, 160)
    results = []
    for start in range(0, 100_000, 1000):
        results += verify_proofs(hidden, proofs[start : start + 1000], chunk_size=1)
    assert len(results) == 100_000
    assert not any(passes_published(result) for result in results)
    assert sum(result.fault is None for result in results) >= 40_000
    assert min(result.exp_mismatches for result in results) > 100
