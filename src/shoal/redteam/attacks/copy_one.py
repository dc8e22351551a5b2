"""One copied rollout in each submission, among honest ones."""

from shoal.recipe import Recipe
from shoal.redteam.copying import Copier, Leak, Supplier
from shoal.worker.author import Author


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """Who copies, and who lets it."""
    leak = Leak()
    return Copier(recipe, leak, most=1), Supplier(recipe, leak)
