"""The seeded choice of the rows of a batch, and what a request states for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engine.sampling import choose_tokens
from shoal.engine.vllm.recorder import RECORDER
from shoal.rollout import Request
from shoal.seeds import uniform_rows

_MAX_ID = 256


@dataclass(frozen=True, slots=True)
class SeededRow:
    """What a request states."""

    name: str
    seed: int
    temperature: float


def describe_row(request: Request) -> dict[str, Any]:
    """The `extra_args` of a request. The seed is text: JSON readers lose the last bits of large numbers."""
    return {"shoal_id": request.id, "shoal_seed": str(request.seed), "shoal_temperature": request.temperature}


def read_row(extra: Mapping[str, Any] | None) -> SeededRow | None:
    """The opposite of `describe_row`; None for a request without a seed, ValueError for an invalid one."""
    if not extra or "shoal_seed" not in extra:
        return None
    name, seed, temperature = (extra.get(f"shoal_{key}") for key in ("id", "seed", "temperature"))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID:
        raise ValueError(f"shoal_id must be a text of 1 to {_MAX_ID} characters")
    if not isinstance(seed, str) or not (seed.isascii() and seed.isdigit()) or int(seed) >= 2**64:
        raise ValueError("shoal_seed must be a whole number below 2^64, as text")
    if not isinstance(temperature, float | int) or not 0 <= temperature <= 1000:
        raise ValueError("shoal_temperature must be a number from 0 to 1000")
    return SeededRow(name, int(seed), float(temperature))


def choose_rows(logits: Tensor, places: Sequence[int], rows: Sequence[SeededRow], counts: Sequence[int]) -> None:
    """Choose token `counts[i]` of `rows[i]` from `logits[places[i]]`, and make those logits one-hot."""
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    uniforms = uniform_rows(seeds, np.array(counts), 1)[:, 0]
    where = torch.tensor(places, device=logits.device)
    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    tokens, logprobs = choose_tokens(
        logits.index_select(0, where).float(), temperatures, torch.from_numpy(uniforms).to(logits.device)
    )
    logits.index_fill_(0, where, float("-inf"))
    logits[where, tokens] = 0.0
    RECORDER.record([row.name for row in rows], counts, tokens, logprobs, where)
