"""Building proofs: one per 32 tokens, over the 128 values of largest magnitude; of whole rollouts (`build_proofs`,
`build_batch`), or during generation (`ProofBuilder`): hidden states go in as they are computed, proofs come out when a
rollout is done.

The proof of a chunk is a function of its values alone. Proofs of the published package differ only where several values
tie for the last place: here the lowest index is taken.

- A chunk with fewer values than `topk` commits to all of them, and its proof is shorter.
- No tokens: no proofs.
- The largest modulus up to P that keeps the indices distinct is found by trying downwards; with at most P values per
  chunk it is P.

`ProofBuilder`:
- Feed the rows of a rollout in order, any number at a time. A gap or a repeat is a bug in the engine, and asserted.
- Of a full chunk only the committed values are kept, 128 indices and patterns. Full chunks wait for selection in a
  buffer of at most `WAITING_BYTES`, and selected values wait for interpolation until there are `BATCH` chunks of any
  rollouts: processed one by one, either would cost many times more.
- It does not matter which weights computed a row; a swap during a rollout changes nothing.

Life of a chunk there: rows -> full -> values -> proof; a rollout's last, shorter chunk counts as full when it is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.toploc.field import P, interpolate, to_canonical
from shoal.toploc.proof import CHUNK_SIZE, TOPK, pack_proofs
from shoal.toploc.select import Bits, States, check_sizes, group_chunks, select_top, split_chunks

BATCH = 128
"""Chunks processed at once: enough to amortise the cost of calls, few enough for a core's cache."""
WAITING_BYTES = 1 << 22
"""Full chunks that wait for selection, unless a single one is larger."""


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


@dataclass(slots=True)
class _OpenRollout:
    """A rollout in progress."""

    num_rows: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    """bfloat16 rows of the current chunk"""
    proofs: list[bytes] = field(default_factory=list)
    """one per full chunk, empty until it is built"""


_Slot = tuple[_OpenRollout, int]
"""Where a proof belongs."""
_Values = tuple[NDArray[np.int64], NDArray[np.uint16]]


class ProofBuilder:
    """A sink for an engine's hidden states; `take` and `take_many` return the proofs of finished rollouts."""

    def __init__(self, *, topk: int = TOPK, chunk_size: int = CHUNK_SIZE) -> None:
        check_sizes(chunk_size, topk)
        self._topk, self._chunk_size = topk, chunk_size
        self._drafts: dict[str, _OpenRollout] = {}
        self._buffer = torch.empty(0, chunk_size, 0, dtype=torch.bfloat16)
        self._places: tuple[Tensor, ...] = ()
        self._full: list[tuple[_Slot, int]] = []  # slot and number of values of each chunk in the buffer
        self._values: dict[int, list[tuple[list[_Slot], _Values]]] = {}
        self._num_values = 0

    def __call__(self, rollout_id: str, start: int, hidden: Tensor) -> None:
        """Add rows (rows, width) of a rollout, starting with token `start`."""
        draft = self._drafts.setdefault(rollout_id, _OpenRollout())
        assert start == draft.num_rows, f"{rollout_id}: got rows from {start}, expected {draft.num_rows}"
        if hidden.requires_grad:
            hidden = hidden.detach()
        room = self._chunk_size - start % self._chunk_size
        if hidden.shape[0] <= room:
            self._add_rows(draft, hidden)
            return
        for rows in (hidden[:room], *hidden[room:].split(self._chunk_size)):
            self._add_rows(draft, rows)

    def add_proofs(self, rollout_id: str, proofs: list[bytes]) -> None:
        """Keep the proofs of a finished rollout that were built elsewhere, until they are taken."""
        self._drafts[rollout_id] = _OpenRollout(proofs=proofs)

    def take(self, rollout_id: str) -> list[bytes]:
        """The proofs of all rows of a rollout, which is then forgotten; none if it has no rows."""
        return self.take_many([rollout_id])[0]

    def take_many(self, rollout_ids: Sequence[str]) -> list[list[bytes]]:
        """`take` of each; their last chunks are built together, which is several times faster than one by one."""
        drafts = [self._drafts.pop(rollout_id, _OpenRollout()) for rollout_id in rollout_ids]
        for draft in drafts:
            if draft.pieces:
                self._join_pieces(draft)
        if not all(proof for draft in drafts for proof in draft.proofs):
            self._select_values()
            self._build_proofs()
        return [draft.proofs for draft in drafts]

    def drop(self, rollout_id: str) -> None:
        """Forget a cancelled rollout; its waiting chunks are built and discarded."""
        self._drafts.pop(rollout_id, None)

    def _add_rows(self, draft: _OpenRollout, hidden: Tensor) -> None:
        """Add rows that fit into the current chunk."""
        rows, width = hidden.shape
        draft.num_rows += rows
        if rows == self._chunk_size:
            self._find_place(draft, rows, width).copy_(hidden)
        elif rows:
            draft.pieces.append(hidden.to("cpu", torch.bfloat16, copy=True))
            if not draft.num_rows % self._chunk_size:
                self._join_pieces(draft)

    def _join_pieces(self, draft: _OpenRollout) -> None:
        """Close the current chunk."""
        rows = torch.cat(draft.pieces)
        draft.pieces.clear()
        self._find_place(draft, *rows.shape)[: len(rows)] = rows

    def _find_place(self, draft: _OpenRollout, rows: int, width: int) -> Tensor:
        """The buffer in which a rollout's next full chunk waits for selection."""
        if len(self._full) == len(self._places) or width != self._places[0].shape[1]:
            self._select_values()
            if self._buffer.shape[2] != width:
                places = min(BATCH, max(1, WAITING_BYTES // (2 * self._chunk_size * width)))
                with torch.inference_mode(False):  # the buffer outlives the inference mode of the calling engine
                    self._buffer = torch.empty(places, self._chunk_size, width, dtype=torch.bfloat16)
                    self._places = self._buffer.unbind(0)
        self._full.append(((draft, len(draft.proofs)), rows * width))
        draft.proofs.append(b"")
        return self._places[len(self._full) - 1]

    def _select_values(self) -> None:
        slots = [slot for slot, _ in self._full]
        rows = self._buffer[: len(slots)].view(torch.int16).flatten(1).numpy()
        chunks = [row[:values] for row, (_, values) in zip(rows, self._full, strict=True)]
        self._full = []
        for k, members in group_chunks(chunks, self._topk).items():
            values = select_top([chunks[i] for i in members], k)
            self._values.setdefault(k, []).append(([slots[i] for i in members], values))
        self._num_values += len(chunks)
        if self._num_values >= BATCH:
            self._build_proofs()

    def _build_proofs(self) -> None:
        waiting, self._values, self._num_values = self._values, {}, 0
        for parts in waiting.values():
            slots = [slot for some, _ in parts for slot in some]
            indices = np.concatenate([values[0] for _, values in parts])
            bits = np.concatenate([values[1] for _, values in parts])
            for (draft, position), proof in zip(slots, commit_values(indices, bits), strict=True):
                draft.proofs[position] = proof
