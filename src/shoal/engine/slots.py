"""State of the active rollouts as arrays, one row each: a step touches no Python object per row."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.rollout import Request
from shoal.seeds import uniform_rows

_DRAWS = 64
"""Uniforms drawn ahead per row."""


class SlotTable:
    """Tokens, log-probs, counters and uniforms of each row; the engine keeps rows dense."""

    def __init__(self, slots: int, max_tokens: int = 64) -> None:
        self.tokens = torch.zeros(slots, max_tokens, dtype=torch.int32)
        self.logprobs = torch.zeros(slots, max_tokens)
        self.counts = torch.zeros(slots, dtype=torch.long)
        self.limits = torch.zeros(slots, dtype=torch.long)
        self.last = torch.zeros(slots, dtype=torch.long)
        self.temperatures = torch.zeros(slots)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._draws = torch.zeros(slots, _DRAWS, dtype=torch.float64)
        self._drawn = torch.full((slots,), -1)

    def reserve(self, max_tokens: int) -> None:
        """Make room for longer completions."""
        grow = max(0, max_tokens - self.tokens.shape[1])
        self.tokens, self.logprobs = F.pad(self.tokens, (0, grow)), F.pad(self.logprobs, (0, grow))

    def open_rows(self, start: int, requests: Sequence[Request], last: Sequence[int]) -> None:
        """Start rows from `start` on with no tokens; `last` are the tokens that they feed first."""
        rows = slice(start, start + len(requests))
        self.counts[rows] = 0
        self.limits[rows] = torch.tensor([request.max_tokens for request in requests])
        self.temperatures[rows] = torch.tensor([request.temperature for request in requests])
        self.last[rows] = torch.tensor(last)
        self._seeds[rows] = [request.seed for request in requests]
        self._drawn[rows] = -1

    def restore_row(self, row: int, tokens: list[int], logprobs: list[float]) -> None:
        """Give an opened row the tokens that it had before a weight swap."""
        count = len(tokens)
        self.tokens[row, :count] = torch.tensor(tokens, dtype=torch.int32)
        self.logprobs[row, :count] = torch.tensor(logprobs)
        self.counts[row] = count

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows over free ones."""
        for array in (self.tokens, self.logprobs, self.counts, self.limits, self.last, self.temperatures):
            array[target] = array[source]
        self._draws[target], self._drawn[target] = self._draws[source], self._drawn[source]
        self._seeds[target.numpy()] = self._seeds[source.numpy()]

    def next_uniforms(self, rows: int) -> Tensor:
        """u_t of the token that each row chooses next."""
        counts = self.counts[:rows]
        block = counts // _DRAWS
        due = (self._drawn[:rows] != block).nonzero()[:, 0]
        if len(due):
            fresh = uniform_rows(self._seeds[due.numpy()], (block[due] * _DRAWS).numpy(), _DRAWS)
            self._draws[due] = torch.from_numpy(fresh)
            self._drawn[due] = block[due]
        return self._draws[:rows].gather(1, (counts % _DRAWS)[:, None])[:, 0]

    def record(self, rows: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one token to each row."""
        index = torch.arange(rows)
        counts = self.counts[:rows]
        self.tokens[index, counts] = tokens.int()
        self.logprobs[index, counts] = logprobs
        self.last[:rows] = tokens
        counts += 1
