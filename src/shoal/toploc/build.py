"""Building proofs: one per 32 tokens, over the 128 values of largest magnitude, many rollouts at once.

The proof of a chunk is a function of its values alone. Proofs of the published package differ only where several values
tie for the last place: here the lowest index is taken.

- A chunk with fewer values than `topk` commits to all of them, and its proof is shorter.
- No tokens: no proofs.
- The largest modulus up to P that keeps the indices distinct is found by trying downwards; with at most P values per
  chunk it is P.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.toploc.field import P, interpolate, to_canonical
from shoal.toploc.proof import CHUNK_SIZE, TOPK, pack_proofs
from shoal.toploc.select import Bits, States, check_sizes, group_chunks, select_top, split_chunks

BATCH = 128
"""Chunks processed at once: enough to amortise the cost of calls, few enough for a core's cache."""


def build_proofs(
    hidden: States, *, chunk_size: int = CHUNK_SIZE, topk: int = TOPK, prefill: States | None = None
) -> list[bytes]:
    """Proofs of one rollout's hidden states (tokens, width), one per `chunk_size` tokens; the last may cover fewer.

    With `prefill`, the prompt's states, a proof over all of them comes first.
    """
    return build_batch([hidden], chunk_size=chunk_size, topk=topk, prefills=None if prefill is None else [prefill])[0]


def build_batch(
    hiddens: Sequence[States],
    *,
    chunk_size: int = CHUNK_SIZE,
    topk: int = TOPK,
    prefills: Sequence[States | None] | None = None,
) -> list[list[bytes]]:
    """`build_proofs` of many rollouts; faster together than one by one."""
    check_sizes(chunk_size, topk)
    parts = list_chunks(hiddens, chunk_size, prefills)
    proofs = iter(build_chunks([chunk for chunks in parts for chunk in chunks], topk))
    return [[next(proofs) for _ in chunks] for chunks in parts]


def list_chunks(
    hiddens: Sequence[States], chunk_size: int, prefills: Sequence[States | None] | None
) -> list[list[Bits]]:
    """The flat chunks of each rollout, in the order of its proofs."""
    pairs = zip(hiddens, [None] * len(hiddens) if prefills is None else prefills, strict=True)
    return [  # the prompt's states are one chunk of any length
        ([] if prefill is None else split_chunks(prefill, max(1, len(prefill)))) + split_chunks(hidden, chunk_size)
        for hidden, prefill in pairs
    ]


def build_chunks(chunks: Sequence[Bits], topk: int) -> list[bytes]:
    """The proof of each flat chunk."""
    proofs = [b""] * len(chunks)
    for k, members in group_chunks(chunks, topk).items():
        for start in range(0, len(members), BATCH):
            part = members[start : start + BATCH]
            for position, proof in zip(part, commit_values(*select_top([chunks[i] for i in part], k)), strict=True):
                proofs[position] = proof
    return proofs


def commit_values(indices: NDArray[np.int64], bits: NDArray[np.uint16]) -> list[bytes]:
    """Proofs that commit to bfloat16 patterns (B, k) at flat indices (B, k)."""
    moduli = find_moduli(indices)
    points = (indices % moduli[:, None]).astype(np.float64)
    return pack_proofs(moduli, to_canonical(interpolate(points, bits.astype(np.float64))))


def find_moduli(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row of indices (B, k), the largest modulus up to P that leaves its residues distinct."""
    moduli = np.full(len(indices), P)
    left = np.flatnonzero(indices.max(axis=1) >= P)
    while len(left):
        residues = np.sort(indices[left] % moduli[left, None], axis=1)
        left = left[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        moduli[left] -= 1
        assert moduli.min() >= indices.shape[1], "no modulus keeps the indices distinct"
    return moduli
