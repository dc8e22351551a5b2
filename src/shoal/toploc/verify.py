"""Checking proofs against the verifier's own hidden states: numbers for every chunk; no bytes raise an exception.

For each of the k positions where the verifier's own states are largest, the proof's polynomial gives the bfloat16
pattern that the prover claims there:

- exponents differ: a mismatch. A position the prover did not commit to gives a random pattern, which mismatches except
  by chance;
- exponents equal: the mantissas differ by 0 .. 127, of which mean and median are taken, and the signs may differ.
  -0.0 and 0.0 agree. NaN agrees with NaN.

Elsewhere an honest polynomial is effectively random. `OUTSIDE` positions spread over the rest of the chunk are tested
for an exponent that the top values have: one in a hundred hits by chance, all hit for a polynomial that is constant.

A result with a fault has failed, whatever its numbers are; numbers that could not be measured get their worst value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.seeds import derive_seed, token_uniforms
from shoal.toploc.build import BATCH, list_chunks
from shoal.toploc.field import P, Vandermonde, reduce, to_canonical
from shoal.toploc.proof import CHUNK_SIZE, MISSING_DEGREES, TOPK, Fault, find_fault, unpack_proofs
from shoal.toploc.select import Bits, States, check_sizes, group_chunks, merge_nans, select_top

OUTSIDE = 32
"""Positions outside the top values at which a proof is evaluated."""
BAND = 8
"""Exponents, from the smallest of the top values upwards, that count as top exponents: at most 3 % by chance."""
UNMEASURED = 2.0**64
"""Mantissa error if no exponent agrees, as in the published package."""

_SHARES = token_uniforms(derive_seed("toploc", "outside"), 0, OUTSIDE) + np.arange(OUTSIDE)
_EXPONENT, _MANTISSA, _SIGN = np.uint16(0x7F80), np.uint16(0x7F), np.uint16(0x8000)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """How one chunk's proof agrees with the verifier's states."""

    exp_mismatches: int
    """positions whose exponents differ, of `points`"""
    mant_err_mean: float
    """mean difference of mantissas, 0 .. 127, where exponents agree; `UNMEASURED` if none does"""
    mant_err_median: float
    """median of the same; of an even number, the mean of the middle two"""
    sign_mismatches: int
    """positions whose signs differ while exponents agree"""
    outside_hits: int
    """positions outside the top values that look like top values, of `outside_points`"""
    outside_points: int
    """positions outside that were tried: `OUTSIDE`, fewer if a chunk has few values"""
    degree: int
    """degree of the polynomial, 0 for a constant; -1 if there is none to read"""
    points: int
    """values that a proof of this chunk commits to"""
    fault: Fault | None = None
    """why the proof is invalid, if it is"""


def verify_proofs(
    hidden: States,
    proofs: Sequence[bytes | None],
    *,
    chunk_size: int = CHUNK_SIZE,
    topk: int = TOPK,
    prefill: States | None = None,
) -> list[ChunkResult]:
    """One result per chunk of the verifier's hidden states (tokens, width), and one more if proofs are left over."""
    prefills = None if prefill is None else [prefill]
    return verify_batch([hidden], [proofs], chunk_size=chunk_size, topk=topk, prefills=prefills)[0]


def verify_batch(
    hiddens: Sequence[States],
    proofs: Sequence[Sequence[bytes | None]],
    *,
    chunk_size: int = CHUNK_SIZE,
    topk: int = TOPK,
    prefills: Sequence[States | None] | None = None,
) -> list[list[ChunkResult]]:
    """`verify_proofs` of many rollouts; faster together than one by one."""
    check_sizes(chunk_size, topk)
    parts = list_chunks(hiddens, chunk_size, prefills)
    claims: list[object] = []
    for chunks, given in zip(parts, proofs, strict=True):
        claims += [given[i] if i < len(given) else Fault.MISSING for i in range(len(chunks))]
    results = iter(_verify_chunks([chunk for chunks in parts for chunk in chunks], claims, topk))
    return [
        [next(results) for _ in chunks] + [_void_result(0, Fault.SURPLUS)] * (len(given) > len(chunks))
        for chunks, given in zip(parts, proofs, strict=True)
    ]


def _verify_chunks(chunks: Sequence[Bits], claims: Sequence[object], topk: int) -> list[ChunkResult]:
    """The result of each flat chunk with its claim: a proof, or anything else in its place."""
    found: dict[int, ChunkResult] = {}
    for k, members in group_chunks(chunks, topk).items():
        sound: list[tuple[int, bytes]] = []
        for i in members:
            claim = claims[i]
            fault = claim if isinstance(claim, Fault) else find_fault(claim, points=k, values=len(chunks[i]))
            if fault is None:
                assert isinstance(claim, bytes)
                sound.append((i, claim))
            else:
                found[i] = _void_result(k, fault)
        for start in range(0, len(sound), BATCH):
            part = sound[start : start + BATCH]
            results = _compare_chunks([chunks[i] for i, _ in part], [claim for _, claim in part], k)
            found.update(zip((i for i, _ in part), results, strict=True))
    return [found[i] for i in range(len(chunks))]


def _compare_chunks(chunks: Sequence[Bits], proofs: Sequence[bytes], k: int) -> list[ChunkResult]:
    """Results of chunks with well-formed proofs, all of k values."""
    moduli, coefficients = unpack_proofs(proofs)
    indices, own = select_top(chunks, k)
    steps = np.array([len(chunk) / OUTSIDE for chunk in chunks])
    # One position in each of OUTSIDE equal parts of a chunk; ascending, and repeated in a short one.
    spread = np.floor(_SHARES * steps[:, None]).astype(np.int64)
    places = np.concatenate((indices, spread), axis=1) % moduli[:, None]
    values = Vandermonde(places.astype(np.float64), k).evaluate(reduce(coefficients.astype(np.float64)))
    claimed = merge_nans(to_canonical(values).view(np.int16)).view(np.uint16)
    # Index of the last coefficient that is not zero, 0 if all are.
    last = k - 1 - (coefficients[:, ::-1] != 0).argmax(axis=1)
    degrees = np.where(coefficients.any(axis=1), last, 0)
    columns = (
        *_compare_patterns(claimed[:, :k], own),
        *_count_outside(claimed[:, k:], own, _find_outside(spread, places, k)),
        degrees,
    )
    rows = zip(*(column.tolist() for column in columns), _find_faults(coefficients, degrees), strict=True)
    return [
        _void_result(k, fault)
        if fault is Fault.COEFFICIENT
        else ChunkResult(exponents, mean, median, signs, hits, tried, degree, k, fault)
        for exponents, mean, median, signs, hits, tried, degree, fault in rows
    ]


def _compare_patterns(
    claimed: NDArray[np.uint16], own: NDArray[np.uint16]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Exponent mismatches, mean and median mantissa error, and sign mismatches of patterns (B, k)."""
    odd = claimed ^ own
    agree = (odd & _EXPONENT) == 0
    counts = agree.sum(axis=1)
    errors = np.abs((claimed & _MANTISSA).astype(np.int16) - (own & _MANTISSA).astype(np.int16))
    means = np.divide((errors * agree).sum(axis=1), counts, out=np.full(len(own), UNMEASURED), where=counts > 0)
    signs = (agree & (odd >= _SIGN) & (((claimed | own) & ~_SIGN) != 0)).sum(axis=1)
    return agree.shape[1] - counts, means, _find_medians(errors, agree, counts), signs


def _find_medians(
    errors: NDArray[np.int16], agree: NDArray[np.bool_], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Medians of the errors (B, k) where patterns agree; the others are sorted to the end."""
    ranked = np.sort(np.where(agree, errors, np.int16(0x7FFF)), axis=1)
    rows = np.arange(len(errors))
    middles = ranked[rows, (counts - 1) // 2].astype(np.float64) + ranked[rows, counts // 2]
    return np.where(counts > 0, middles / 2, UNMEASURED)


def _find_outside(spread: NDArray[np.int64], places: NDArray[np.int64], k: int) -> NDArray[np.bool_]:
    """Which of the spread positions (B, OUTSIDE) belong to no top value and differ from the one before."""
    short = places.astype(np.uint16)  # residues of at most P
    known = (short[:, k:, None] == short[:, None, :k]).any(axis=2)
    fresh = np.diff(spread, axis=1, prepend=-1) > 0
    return fresh & ~known


def _count_outside(
    claimed: NDArray[np.uint16], own: NDArray[np.uint16], outside: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hits and trials among positions outside the top values."""
    exponents = (own & _EXPONENT) >> 7
    lowest = exponents.min(axis=1, keepdims=True)
    highest = np.minimum(exponents.max(axis=1, keepdims=True), lowest + (BAND - 1))
    shown = (claimed & _EXPONENT) >> 7
    hits = outside & (lowest <= shown) & (shown <= highest)
    return hits.sum(axis=1), outside.sum(axis=1)


def _find_faults(coefficients: NDArray[np.uint16], degrees: NDArray[np.int64]) -> list[Fault | None]:
    k = coefficients.shape[1]
    faults: list[Fault | None] = [Fault.DEGREE if d < k - 1 - MISSING_DEGREES else None for d in degrees.tolist()]
    for row in np.flatnonzero((coefficients >= P).any(axis=1)):
        faults[row] = Fault.COEFFICIENT
    return faults


def _void_result(points: int, fault: Fault) -> ChunkResult:
    """The worst numbers, for a chunk with an invalid proof."""
    return ChunkResult(
        exp_mismatches=points,
        mant_err_mean=UNMEASURED,
        mant_err_median=UNMEASURED,
        sign_mismatches=points,
        outside_hits=OUTSIDE,
        outside_points=OUTSIDE,
        degree=-1,
        points=points,
        fault=fault,
    )
