"""Null proofs: polynomials that are zero, for a validator that checks only whether there is something."""

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.proofs import ProofForger, commit_constant
from shoal.worker.author import Author


class NullForger(ProofForger):
    """A small model writes; proofs have the right number, lengths and modulus, and say nothing."""

    _width = 0

    def study(self, policy: Policy) -> None:
        """Find out how long proofs are."""
        self._width = policy.model.config.hidden_size

    def forge(self, num_tokens: int) -> list[bytes]:
        """Zeros."""
        return commit_constant(0, num_tokens, self._width)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (NullForger(recipe),)
