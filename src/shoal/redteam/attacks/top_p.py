"""Top-p sampling: the unlikely tokens are never drawn, as most servers do by default. Stated as plain sampling."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.choices import choose_nucleus
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.worker.author import Author, Work

_SHARE = 0.95


class NucleusAuthor(RetellingAuthor):
    """Draws from the likeliest tokens that together have 95 %."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The requests anew, drawn so."""
        return self.decode(plans, choose_nucleus(_SHARE))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (NucleusAuthor(recipe),)
