"""Proofs while an engine generates: hidden states go in as they are computed, proofs come out when a rollout is done.

- Feed rows of a rollout in order, any number at a time. A gap or a repeat is a bug of the engine's, and asserted.
- Of a full chunk only the committed values are kept, 128 indices and patterns. Full chunks wait for that in a buffer of
  at most `WAITING_BYTES`, and the values for interpolation, until `BATCH` chunks of any rollouts are together: one by
  one either would cost many times more.
- Which weights computed a row does not matter here; a swap in mid-rollout changes nothing.

Life of a chunk: rows -> full -> values -> proof; a rollout's last, shorter chunk is full when the rollout is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.toploc.build import BATCH, commit_values
from shoal.toploc.proof import CHUNK_SIZE, TOPK
from shoal.toploc.select import Bits, check_sizes, group_chunks, select_top

WAITING_BYTES = 1 << 22
"""Full chunks that wait for selection."""


@dataclass(slots=True)
class _Draft:
    """A rollout under way."""

    num_rows: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    """bfloat16 rows of the chunk under way"""
    proofs: list[bytes] = field(default_factory=list)
    """one per full chunk, empty until it is built"""


_Slot = tuple[_Draft, int]
"""Where a proof belongs."""
_Values = tuple[NDArray[np.int64], NDArray[np.uint16]]


class ProofBuilder:
    """A sink for an engine's hidden states; `take` and `take_many` give the proofs of finished rollouts."""

    def __init__(self, *, topk: int = TOPK, chunk_size: int = CHUNK_SIZE) -> None:
        check_sizes(chunk_size, topk)
        self._topk, self._chunk_size = topk, chunk_size
        self._drafts: dict[str, _Draft] = {}
        self._full: list[tuple[_Slot, Bits]] = []
        self._full_bytes = 0
        self._values: dict[int, list[tuple[list[_Slot], _Values]]] = {}
        self._num_values = 0

    def __call__(self, rollout_id: str, start: int, hidden: Tensor) -> None:
        """Add rows (rows, width) of a rollout from token `start` on."""
        draft = self._drafts.setdefault(rollout_id, _Draft())
        assert start == draft.num_rows, f"{rollout_id}: rows from {start} follow {draft.num_rows}"
        room = self._chunk_size - start % self._chunk_size
        while hidden.shape[0] > room:
            self._add_rows(draft, hidden[:room])
            hidden, room = hidden[room:], self._chunk_size
        self._add_rows(draft, hidden)

    def take(self, rollout_id: str) -> list[bytes]:
        """The proofs of all rows that a rollout was fed, which is then forgotten; none if it was never fed."""
        return self.take_many([rollout_id])[0]

    def take_many(self, rollout_ids: Sequence[str]) -> list[list[bytes]]:
        """`take` of each; their last chunks are built together, which is several times faster than one by one."""
        drafts = [self._drafts.pop(rollout_id, _Draft()) for rollout_id in rollout_ids]
        for draft in drafts:
            if draft.pieces:
                self._close_chunk(draft)
        if not all(proof for draft in drafts for proof in draft.proofs):
            self._select_values()
            self._build_proofs()
        return [draft.proofs for draft in drafts]

    def drop(self, rollout_id: str) -> None:
        """Forget a rollout that was cancelled; what waits of it is built and lost."""
        self._drafts.pop(rollout_id, None)

    def _add_rows(self, draft: _Draft, hidden: Tensor) -> None:
        """Add rows that do not reach beyond the chunk under way."""
        if not hidden.shape[0]:
            return
        draft.pieces.append(hidden.to("cpu", torch.bfloat16, copy=True))
        draft.num_rows += hidden.shape[0]
        if not draft.num_rows % self._chunk_size:
            self._close_chunk(draft)

    def _close_chunk(self, draft: _Draft) -> None:
        """Let the chunk under way wait for selection."""
        rows = draft.pieces[0] if len(draft.pieces) == 1 else torch.cat(draft.pieces)
        chunk = rows.view(torch.int16).numpy().reshape(-1)
        draft.pieces.clear()
        self._full.append(((draft, len(draft.proofs)), chunk))
        draft.proofs.append(b"")
        self._full_bytes += chunk.nbytes
        if self._full_bytes >= WAITING_BYTES or len(self._full) >= BATCH:
            self._select_values()

    def _select_values(self) -> None:
        slots, chunks = [slot for slot, _ in self._full], [chunk for _, chunk in self._full]
        self._full, self._full_bytes = [], 0
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
