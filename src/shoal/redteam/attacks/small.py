"""Half of the layers: half of the cost. Claimed as the whole model."""

from transformers import PreTrainedModel

from shoal.recipe import Recipe
from shoal.redteam.altered import AlteredAuthor, drop_layers
from shoal.worker.author import Author


class SmallAuthor(AlteredAuthor):
    """Leaves every second layer out."""

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """The shorter model."""
        return drop_layers(model)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (SmallAuthor(recipe),)
