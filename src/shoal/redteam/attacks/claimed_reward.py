"""Claimed rewards: the tokens are honest, and each is said to have solved its task."""

from dataclasses import replace

from shoal.recipe import Recipe
from shoal.rollout import Score
from shoal.worker.author import Author, Work


class ClaimingAuthor(Author):
    """Scores itself."""

    def finish(self, work: Work) -> Work:
        """The same rollouts with the best of all rewards."""
        full = Score(1.0, "correct")
        return replace(work, groups=tuple(replace(group, scores=(full,) * len(group.scores)) for group in work.groups))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (ClaimingAuthor(recipe),)
