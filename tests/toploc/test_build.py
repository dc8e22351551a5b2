"""Proofs: byte for byte those of the published package, or of the definition where the package has none."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.toploc.build import build_batch, build_proofs, find_moduli
from shoal.toploc.field import P

VECTORS: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parent / "data" / "reference.json.gz").read_bytes())
)


def read_vector(vector: dict[str, Any]) -> Tensor:
    raw = np.frombuffer(base64.b64decode(vector["bf16_le_base64"]), dtype="<i2").astype(np.int16)
    return torch.from_numpy(raw).view(torch.bfloat16).reshape(vector["tokens"], vector["hidden"])


def build_plain(hidden: Tensor, chunk_size: int = 32, topk: int = 128) -> list[bytes]:
    """The definition in integers: top values by a stable sort, modulus by trying, Lagrange's formula."""
    proofs = []
    for rows in hidden.split(chunk_size):
        bits = [value % 0x10000 for value in rows.reshape(-1).view(torch.int16).tolist()]
        order = sorted(range(len(bits)), key=lambda index: (-(bits[index] & 0x7FFF), index))[:topk]
        modulus = next(m for m in range(P, 0, -1) if len({index % m for index in order}) == len(order))
        coefficients = interpolate_plain([index % modulus for index in order], [bits[index] for index in order])
        proofs.append(b"".join(word.to_bytes(2) for word in [modulus, *coefficients]))
    return proofs


def interpolate_plain(points: list[int], values: list[int]) -> list[int]:
    total = [0] * len(points)
    for i, (x, y) in enumerate(zip(points, values, strict=True)):
        basis, scale = [1], 1
        for j, other in enumerate(points):
            if i != j:
                basis = [
                    (a - other * b) % P for a, b in zip([0, *basis], [*basis, 0], strict=True)
                ]  # times (x - other)
                scale = scale * (x - other) % P
        factor = y * pow(scale, -1, P)
        total = [(t + factor * b) % P for t, b in zip(total, basis, strict=True)]
    return total


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['tokens']}x{v['hidden']} k{v['topk']}")
def test_proofs_of_the_published_package_are_reproduced_byte_for_byte(vector: dict[str, Any]) -> None:
    proofs = build_proofs(read_vector(vector), chunk_size=vector["chunk"], topk=vector["topk"])
    assert [proof.hex() for proof in proofs] == vector["proofs_hex"]


def test_one_vector_needs_a_smaller_modulus() -> None:
    assert VECTORS[-1]["proofs_hex"][0].startswith("ffd8")


@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 64])
@pytest.mark.parametrize(("width", "topk"), [(1, 4), (5, 16), (16, 128)])
def test_proofs_equal_their_definition_for_any_number_of_tokens(tokens: int, width: int, topk: int) -> None:
    hidden = draw_normal(tokens, width)
    proofs = build_proofs(hidden, topk=topk)
    assert proofs == (build_plain(hidden, topk=topk) if tokens else [])
    assert len(proofs) == -(-tokens // 32)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32))
def test_proofs_equal_their_definition_for_any_sizes_and_ties(
    tokens: int, width: int, chunk: int, topk: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(-3, 4, (tokens, width)).astype(np.float32)
    hidden = torch.from_numpy(values).bfloat16()
    assert build_proofs(hidden, chunk_size=chunk, topk=topk) == build_plain(hidden, chunk, topk)


def test_a_chunk_of_few_values_has_a_shorter_proof() -> None:
    assert [len(proof) for proof in build_proofs(draw_normal(33, 40))] == [258, 2 + 2 * 40]


def test_a_batch_equals_its_rollouts_one_by_one() -> None:
    hiddens = [draw_normal(tokens, 48, seed=tokens) for tokens in (0, 1, 31, 32, 33, 64, 100, 700, 2)]
    assert build_batch(hiddens) == [build_proofs(hidden) for hidden in hiddens]


def test_a_batch_may_mix_widths_and_types() -> None:
    hiddens = [draw_normal(40, 48), draw_normal(33, 200).float(), draw_normal(5, 16).float().numpy()]
    assert build_batch(hiddens) == [build_proofs(hidden) for hidden in hiddens]


def test_more_chunks_than_fit_one_batch_are_all_built() -> None:
    hidden = draw_normal(300, 8)
    assert build_proofs(hidden, chunk_size=1, topk=4) == build_plain(hidden, 1, 4)


def test_wider_states_are_rounded_before_they_are_committed() -> None:
    hidden = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    expected = build_proofs(hidden.bfloat16())
    assert build_proofs(hidden) == expected
    assert build_proofs(hidden.numpy()) == expected
    assert build_proofs(hidden.half()) == build_proofs(hidden.half().float())
    assert build_proofs(hidden.half().numpy()) == build_proofs(hidden.half())


def test_a_strided_tensor_gives_the_proofs_of_its_copy() -> None:
    wide = draw_normal(40, 128)
    assert build_proofs(wide[:, ::2]) == build_proofs(wide[:, ::2].contiguous())


def test_the_prompts_proof_comes_first_and_covers_all_of_it() -> None:
    prompt, hidden = draw_normal(77, 48, seed=5), draw_normal(40, 48)
    proofs = build_proofs(hidden, prefill=prompt)
    assert proofs == build_proofs(prompt, chunk_size=77) + build_proofs(hidden)
    assert build_batch([hidden, hidden], prefills=[prompt, None]) == [proofs, proofs[1:]]


def test_nans_of_any_pattern_give_one_proof() -> None:
    hidden = draw_normal(32, 16)
    proofs = set()
    for pattern in (0x7FC0, 0xFFC0, 0xFFFF, 0x7F81):
        bits = hidden.view(torch.int16).clone()
        bits[3, 5] = pattern - (pattern >> 15 << 16)
        proofs |= {build_proofs(bits.view(torch.bfloat16))[0]}
    assert len(proofs) == 1


def test_infinities_and_zeros_are_values_like_any_other() -> None:
    hidden = torch.zeros(2, 4, dtype=torch.bfloat16)
    hidden[0, 1], hidden[1, 2], hidden[0, 3] = float("inf"), float("-inf"), -0.0
    assert build_proofs(hidden, topk=8) == build_plain(hidden, topk=8)


@pytest.mark.parametrize("stride", [1, 16, 65497, 65496, 65497 * 2, 65497 * 7])
def test_the_modulus_is_the_largest_that_keeps_indices_apart(stride: int) -> None:
    indices = np.arange(0, 40 * stride, stride)
    plain = next(m for m in range(P, 0, -1) if len({i % m for i in indices.tolist()}) == len(indices))
    assert find_moduli(np.stack((indices, np.arange(40)))).tolist() == [plain, P]


def test_an_index_of_exactly_p_is_congruent_to_zero() -> None:
    assert find_moduli(np.array([[0, P], [1, P]])).tolist() == [P - 1, P]


def test_moduli_of_many_rows_are_found_independently() -> None:
    rng = np.random.default_rng(0)
    indices = np.stack([rng.choice(400_000, 128, replace=False) for _ in range(200)])
    plain = [next(m for m in range(P, 0, -1) if len({i % m for i in row}) == 128) for row in indices.tolist()]
    assert find_moduli(indices).tolist() == plain
    assert len(set(plain)) > 2


@pytest.mark.parametrize(
    ("sizes", "name"), [({"chunk_size": 0}, "chunk_size"), ({"topk": 0}, "topk"), ({"topk": 5000}, "topk")]
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build_proofs(draw_normal(1, 4), **sizes)
