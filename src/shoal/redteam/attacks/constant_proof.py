"""Constant polynomials: proofs that show the commonest top value at every place, which the published rule lets pass."""

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.proofs import ProofForger, commit_constant, pick_pattern
from shoal.toploc.proof import CHUNK_SIZE, TOPK
from shoal.toploc.select import group_chunks, select_top, split_chunks
from shoal.worker.author import Author


class ConstantForger(ProofForger):
    """A small model writes; the pattern is the commonest among the top values of the true one."""

    _pattern, _width = 0, 0

    def study(self, policy: Policy) -> None:
        """Find the pattern."""
        chunks = [chunk for states in self.read_states(policy) for chunk in split_chunks(states, CHUNK_SIZE)]
        size, members = max(group_chunks(chunks, TOPK).items())
        self._pattern = int(pick_pattern(select_top([chunks[i] for i in members], size)[1].ravel()))
        self._width = policy.model.config.hidden_size

    def forge(self, num_tokens: int) -> list[bytes]:
        """That pattern everywhere."""
        return commit_constant(self._pattern, num_tokens, self._width)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (ConstantForger(recipe),)
