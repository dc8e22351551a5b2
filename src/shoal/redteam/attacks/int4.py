"""Weights in int4: an eighth of the memory, at the price of other logits. Claimed as the real ones."""

from transformers import PreTrainedModel

from shoal.recipe import Recipe
from shoal.redteam.altered import AlteredAuthor, map_linears, round_groups
from shoal.worker.author import Author


class Int4Author(AlteredAuthor):
    """Rounds the matrices of all layers to 15 levels per 32 values, as inference on small machines does."""

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """The rounded model."""
        return map_linears(model, round_groups)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (Int4Author(recipe),)
