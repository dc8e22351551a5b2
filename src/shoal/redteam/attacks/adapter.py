"""A low-rank adapter merged into the weights: a model of one's own taste, nearly the true one. Claimed as that."""

from transformers import PreTrainedModel

from shoal.recipe import Recipe
from shoal.redteam.altered import AlteredAuthor, add_adapter, map_linears
from shoal.worker.author import Author


class AdapterAuthor(AlteredAuthor):
    """Adds to the matrices of all layers an update of rank 8 and a thousandth of their norm."""

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """The adapted model."""
        return map_linears(model, add_adapter)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (AdapterAuthor(recipe),)
