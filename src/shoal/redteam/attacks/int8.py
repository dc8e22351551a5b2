"""Weights in int8: half the memory or a quarter of it, at the price of other logits. Claimed as the real ones."""

from transformers import PreTrainedModel

from shoal.recipe import Recipe
from shoal.redteam.altered import AlteredAuthor, map_linears, round_channels
from shoal.worker.author import Author


class Int8Author(AlteredAuthor):
    """Rounds the matrices of all layers to 255 levels per row, as cheap inference servers do."""

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """The rounded model."""
        return map_linears(model, round_channels)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (Int8Author(recipe),)
