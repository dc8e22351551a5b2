"""Comparison with the published package `toploc` itself, if it is installed.

Its wheel on PyPI is built for an older torch; from source it builds in a few minutes:

    pip install setuptools wheel ninja
    pip install --no-build-isolation --no-deps --no-binary toploc toploc==0.1.6
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.toploc.build import build_proofs
from shoal.toploc.verify import verify_proofs

try:
    import toploc
except ImportError as error:
    pytest.skip(f"the published package cannot be imported: {error}", allow_module_level=True)

SHAPES = [(32, 16, 4), (33, 160, 32), (100, 128, 128), (64, 896, 128), (96, 5120, 128), (70, 64, 40)]


def draw_normal(tokens: int, width: int, seed: int) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def has_tie(chunk: Tensor, topk: int) -> bool:
    """Whether the top values are not determined by magnitude alone."""
    magnitudes = chunk.reshape(-1).abs().sort(descending=True).values
    return bool(magnitudes[topk - 1] == magnitudes[topk])


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    """The package changes the number of threads of its caller."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("tokens", "width", "topk"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_proofs_are_equal_where_no_tie_leaves_a_choice(tokens: int, width: int, topk: int, seed: int) -> None:
    hidden = draw_normal(tokens, width, seed)
    theirs = toploc.build_proofs_bytes(hidden, decode_batching_size=32, topk=topk, skip_prefill=True)
    ours = build_proofs(hidden, topk=topk)
    assert len(theirs) == len(ours)
    for chunk, their, our in zip(hidden.split(32), theirs, ours, strict=True):
        assert their == our or has_tie(chunk, topk)


@pytest.mark.parametrize(("tokens", "width", "topk"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_each_verifies_the_others_proofs_up_to_ties(tokens: int, width: int, topk: int, seed: int) -> None:
    hidden = draw_normal(tokens, width, seed)
    theirs = toploc.build_proofs_bytes(hidden, decode_batching_size=32, topk=topk, skip_prefill=True)
    ours = build_proofs(hidden, topk=topk)
    there = toploc.verify_proofs_bytes(hidden, ours, decode_batching_size=32, topk=topk, skip_prefill=True)
    here = verify_proofs(hidden, theirs, topk=topk)
    for chunk, result, found in zip(hidden.split(32), there, here, strict=True):
        ties = 8 if has_tie(chunk, topk) else 0
        assert result.exp_mismatches <= ties
        assert result.mant_err_mean <= ties / 8
        assert found.exp_mismatches <= ties
        assert found.mant_err_mean <= ties / 8
        assert found.fault is None


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.1])
def test_both_measure_the_same_where_no_tie_leaves_a_choice(noise: float) -> None:
    hidden = torch.randn(320, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    factors = 1 + noise * torch.randn(320, 256, generator=torch.Generator().manual_seed(3))
    proofs = build_proofs((hidden.float() * factors).bfloat16(), topk=64)
    there = toploc.verify_proofs_bytes(hidden, proofs, decode_batching_size=32, topk=64, skip_prefill=True)
    compared = 0
    for chunk, theirs, ours in zip(hidden.split(32), there, verify_proofs(hidden, proofs, topk=64), strict=True):
        if not has_tie(chunk, 64):
            assert theirs.exp_mismatches == ours.exp_mismatches
            assert theirs.mant_err_mean == pytest.approx(ours.mant_err_mean)
            assert abs(theirs.mant_err_median - ours.mant_err_median) <= 1  # theirs is the upper of the middle two
            compared += 1
    assert compared


def test_the_prompts_proof_is_the_packages_prefill_proof() -> None:
    prompt, hidden = draw_normal(50, 64, 5), draw_normal(70, 64, 6)
    theirs = toploc.build_proofs_bytes([prompt, *hidden], decode_batching_size=32, topk=16)
    ours = build_proofs(hidden, topk=16, prefill=prompt)
    assert len(theirs) == len(ours) == 4
    for chunk, their, our in zip([prompt, *hidden.split(32)], theirs, ours, strict=True):
        assert their == our or has_tie(chunk, 16)
    for result in toploc.verify_proofs_bytes([prompt, *hidden], ours, decode_batching_size=32, topk=16):
        assert result.exp_mismatches <= 8
