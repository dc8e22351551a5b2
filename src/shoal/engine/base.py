"""The interface of a rollout engine: requests with seeds in, rollouts out.

- Row t of a rollout's hidden states is the post-norm state from which token t was sampled, so there are as many rows as
  tokens. The sink gets them in order, in chunks of `CHUNK` rows, the last chunk shorter, keyed by rollout id.
- Swapping weights is allowed at any time: what is under way goes on with the new ones, nothing computed with the old
  ones is reused, and `Rollout.versions` says which tokens came from which version.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from shoal.rollout import Request, Rollout

CHUNK = 32
"""Rows per hidden-state chunk. Changing breaks: TOPLOC proofs, which commit to 32 tokens each."""


class HiddenSink(Protocol):
    """Receives hidden states (rows, width) of one rollout's tokens from `start` on; must copy what it keeps."""

    def __call__(self, rollout_id: str, start: int, hidden: torch.Tensor) -> None: ...


class Engine(Protocol):
    """What every engine offers."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Rollouts of equal prompts submitted together share the prompt's computation."""

    def step(self) -> list[Rollout]:
        """Advance every active rollout by one token and return those that finished."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit and step until these are done, in order of finishing."""

    def cancel(self, ids: Iterable[str]) -> None:
        """Forget these requests, wherever they are; those that finished already are no error."""

    def swap_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Replace the weights in place; every tensor must be given, with its shape."""
