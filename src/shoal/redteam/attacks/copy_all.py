"""Copied work: all rollouts of a lease are another node's, read once and proven as one's own."""

from shoal.recipe import Recipe
from shoal.redteam.copying import Copier, Leak, Supplier
from shoal.worker.author import Author


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """Who copies, and who lets it."""
    leak = Leak()
    return Copier(recipe, leak), Supplier(recipe, leak)
