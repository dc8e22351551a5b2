"""The interface of a rollout engine: requests with seeds in, rollouts out.

- Row t of a rollout's hidden states is the post-norm state from which token t was sampled, so there are as many rows as
  tokens. The sink gets them in order, keyed by rollout id, in chunks of `CHUNK` rows; the last chunk may be shorter.
- Weights may be swapped at any time: active rollouts continue with the new weights, nothing computed with the old ones
  is reused, and `Rollout.versions` records which tokens came from which version.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from shoal.rollout import Request, Rollout

CHUNK = 32
"""Rows per hidden-state chunk. Changing breaks: TOPLOC proofs, which commit to 32 tokens each."""


class HiddenSink(Protocol):
    """Receives hidden states (rows, width) of one rollout's tokens from `start` on; must copy what it keeps."""

    def __call__(self, rollout_id: str, start: int, hidden: torch.Tensor) -> None: ...


class Engine(Protocol):
    """The interface of every engine."""

    @property
    def version(self) -> int:
        """Version of the loaded weights."""

    @property
    def busy(self) -> bool:
        """Whether a request is queued or active."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Rollouts of equal prompts submitted together share the prompt's computation."""

    def step(self) -> list[Rollout]:
        """Advance every active rollout by one token and return those that finished."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit and step until all are done; yields rollouts in order of finishing."""

    def cancel(self, ids: Iterable[str]) -> None:
        """Drop these requests, queued or active; ids of finished requests are ignored."""

    def swap_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights in place; every tensor must be given, with its shape."""
