"""Forged proofs: a small model generates, and the proofs come from elsewhere."""

from collections.abc import Sequence
from math import ceil

import torch

from shoal.engine.base import CHUNK
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.behaviours import forged_work
from shoal.redteam.behaviours.forged_work import ProofForger
from shoal.redteam.registry import Expected, attack
from shoal.toploc.build import build_proofs
from shoal.toploc.proof import CHUNK_SIZE, TOPK
from shoal.toploc.select import group_chunks, select_top, split_chunks


@attack("constant_proof", expect=Expected.HARD, text="a small model generates; its proofs are constant polynomials")
class ConstantForger(ProofForger):
    """Shows the most frequent top value of the true model at every position, which the published rule accepts."""

    _pattern, _width = 0, 0

    def study(self, policy: Policy) -> None:
        """Find the pattern."""
        chunks = [chunk for states in self.read_states(policy) for chunk in split_chunks(states, CHUNK_SIZE)]
        size, members = max(group_chunks(chunks, TOPK).items())
        self._pattern = int(forged_work.pick_pattern(select_top([chunks[i] for i in members], size)[1].ravel()))
        self._width = policy.model.config.hidden_size

    def forge(self, num_tokens: int) -> list[bytes]:
        """The pattern at every position."""
        return forged_work.commit_constant(self._pattern, num_tokens, self._width)


@attack("average_proof", expect=Expected.HARD, text="a small model generates; its proofs use per-channel averages")
class AverageForger(ProofForger):
    """Claims that every token had the mean state of the true model; the proofs look like honest ones."""

    _mean = torch.zeros(0)
    """state (width,)"""

    def study(self, policy: Policy) -> None:
        """Compute the means."""
        self._mean = torch.cat(self.read_states(policy)).float().mean(0)

    def forge(self, num_tokens: int) -> list[bytes]:
        """Proofs of the means."""
        return build_proofs(self._mean.expand(num_tokens, -1))


@attack("replayed_proof", expect=Expected.HARD, text="a small model generates; its proofs are from earlier honest work")
class ReplayForger(ProofForger):
    """Gives each rollout the proofs of a rollout of similar length that the first version generated."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._known: list[tuple[int, Sequence[bytes]]] = []
        """token counts and proofs of honest rollouts"""
        self._num_forged = 0

    def study(self, policy: Policy) -> None:
        """Generate honestly once, and keep the proofs."""
        if not self._known:
            done = self.generate_honestly(policy)
            self._known = [(rollout.num_tokens, done.proofs[rollout.id]) for rollout in done.rollouts]

    def forge(self, num_tokens: int) -> list[bytes]:
        """The proofs of a rollout of equal or similar length; a different one each time."""
        self._num_forged += 1
        start = self._num_forged % len(self._known)
        _, proofs = min(self._known[start:] + self._known[:start], key=lambda own: abs(own[0] - num_tokens))
        return forged_work.fit_proofs(proofs, ceil(num_tokens / CHUNK))


@attack("null_proof", expect=Expected.HARD, text="a small model generates; its proofs are zeros")
class NullForger(ProofForger):
    """All-zero proofs with the right count, lengths and modulus, against a validator that checks only these."""

    _width = 0

    def study(self, policy: Policy) -> None:
        """Measure the length of a proof."""
        self._width = policy.model.config.hidden_size

    def forge(self, num_tokens: int) -> list[bytes]:
        """Zeros."""
        return forged_work.commit_constant(0, num_tokens, self._width)
