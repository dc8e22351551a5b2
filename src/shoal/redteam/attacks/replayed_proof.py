"""Replayed proofs: those of honest work that was done before, handed in again for other texts."""

from collections.abc import Sequence
from math import ceil

from shoal.engine.base import CHUNK
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.forge import lend_proofs
from shoal.redteam.proofs import ProofForger
from shoal.worker.author import Author


class ReplayForger(ProofForger):
    """A small model writes; each rollout gets the proofs of one of like length that the first version wrote."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._stock: list[tuple[int, Sequence[bytes]]] = []
        """tokens and proofs of honest rollouts"""
        self._turn = 0

    def study(self, policy: Policy) -> None:
        """Work honestly for once, and keep the proofs."""
        if not self._stock:
            done = self.work_honestly(policy)
            self._stock = [(rollout.num_tokens, done.proofs[rollout.id]) for rollout in done.rollouts]

    def forge(self, num_tokens: int) -> list[bytes]:
        """The proofs of a rollout of the same length, or of about that; another one each time."""
        self._turn += 1
        turned = self._stock[self._turn % len(self._stock) :] + self._stock[: self._turn % len(self._stock)]
        _, proofs = min(turned, key=lambda own: abs(own[0] - num_tokens))
        return lend_proofs(proofs, ceil(num_tokens / CHUNK))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (ReplayForger(recipe),)
