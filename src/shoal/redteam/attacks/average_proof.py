"""Averages per channel: proofs of the states that the true model has on average. Their form is that of honest ones."""

import torch

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.proofs import ProofForger, average_channels
from shoal.toploc.build import build_proofs
from shoal.worker.author import Author


class AverageForger(ProofForger):
    """A small model writes; every token is said to have had the mean state."""

    _mean = torch.zeros(0)

    def study(self, policy: Policy) -> None:
        """Take the means."""
        self._mean = average_channels(self.read_states(policy))

    def forge(self, num_tokens: int) -> list[bytes]:
        """Proofs of these."""
        return build_proofs(self._mean.expand(num_tokens, -1))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (AverageForger(recipe),)
