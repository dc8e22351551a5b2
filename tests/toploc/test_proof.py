"""The proof format: its bytes, its base64 form, and what is refused before anything is computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.base import CHUNK
from shoal.toploc.field import P
from shoal.toploc.proof import (
    CHUNK_SIZE,
    MODULUS_SLACK,
    Fault,
    find_fault,
    pack_proofs,
    unpack_proofs,
)


def make_proof(modulus: int = P, points: int = 4) -> bytes:
    return b"".join(word.to_bytes(2) for word in [modulus, *range(1, points + 1)])


def test_the_engine_hands_over_chunks_of_the_size_that_proofs_cover() -> None:
    assert CHUNK == CHUNK_SIZE == 32


def test_words_are_big_endian_and_the_modulus_comes_first() -> None:
    coefficients = np.array([[0x1B42, 0x2B67, 0xBA4B, 0x756D], [1, 2, 3, 4]], dtype=np.uint16)
    proofs = pack_proofs(np.array([P, P - 1]), coefficients)
    assert [proof.hex() for proof in proofs] == ["ffd91b422b67ba4b756d", "ffd80001000200030004"]


@given(st.lists(st.lists(st.integers(0, P - 1), min_size=3, max_size=3), min_size=1, max_size=20), st.integers(3, P))
def test_packing_and_unpacking_are_inverse(rows: list[list[int]], modulus: int) -> None:
    moduli, coefficients = np.full(len(rows), modulus), np.array(rows, dtype=np.uint16)
    found = unpack_proofs(pack_proofs(moduli, coefficients))
    assert np.array_equal(found[0], moduli)
    assert np.array_equal(found[1], coefficients)


def test_a_proof_of_128_values_has_258_bytes() -> None:
    (proof,) = pack_proofs(np.array([P]), np.zeros((1, 128), dtype=np.uint16))
    assert len(proof) == 258


@pytest.mark.parametrize("claim", [None, "ffd9", 5, [1, 2], make_proof().hex(), bytearray(make_proof())])
def test_what_is_not_bytes_is_unreadable(claim: object) -> None:
    assert find_fault(claim, points=4, values=100) is Fault.UNREADABLE


@pytest.mark.parametrize("proof", [b"", b"\0", b"\xff", make_proof()[:-1], make_proof() + b"\0", make_proof(points=5)])
def test_a_proof_of_another_length_is_refused(proof: bytes) -> None:
    assert find_fault(proof, points=4, values=100) is Fault.LENGTH


@pytest.mark.parametrize("proof", [bytes(2), bytes(10), bytes(258), make_proof(modulus=0)])
def test_a_modulus_of_zero_is_a_null_proof_of_any_length(proof: bytes) -> None:
    assert find_fault(proof, points=4, values=100) is Fault.NULL


@pytest.mark.parametrize(
    ("modulus", "values", "fault"),
    [
        (P, 4, None),
        (P, P, None),
        (P - 1, P, Fault.MODULUS),  # all residues are distinct at P already
        (P - 1, P + 1, None),
        (P - MODULUS_SLACK, P + 1, None),
        (P - MODULUS_SLACK - 1, P + 1, Fault.MODULUS),
        (4, P + 1, Fault.MODULUS),
        (P + 1, P + 1, Fault.MODULUS),
        (0xFFFF, 10**6, Fault.MODULUS),
    ],
)
def test_only_a_modulus_that_an_honest_search_can_end_with_is_possible(
    modulus: int, values: int, fault: Fault | None
) -> None:
    assert find_fault(make_proof(modulus), points=4, values=values) is fault


def test_what_is_not_bytes_is_a_fault() -> None:
    assert find_fault(None, points=1, values=1) is Fault.UNREADABLE
