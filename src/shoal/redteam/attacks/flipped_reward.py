"""Rewards turned round: the tokens are honest, what is right claims nothing and what is wrong the full reward.

It is what harms learning most where nobody checks: training goes the other way. A group in which all are right, or none
is, would be left out of training; half of it is turned, so that it counts.
"""

from dataclasses import replace

from shoal.recipe import Recipe
from shoal.rollout import Group, Score
from shoal.worker.author import Author, Work

_NOTHING, _FULL = Score(0.0, "wrong"), Score(1.0, "correct")


class FlippingAuthor(Author):
    """Scores itself, the wrong way round."""

    def finish(self, work: Work) -> Work:
        """The same rollouts with rewards that point the other way."""
        return replace(work, groups=tuple(flip_rewards(group) for group in work.groups))


def flip_rewards(group: Group) -> Group:
    """A group whose best have the worst reward and whose worst have the best; never without a signal."""
    values = [score.value for score in group.scores]
    usual = sum(values) / len(values)
    if min(values) == max(values):
        flipped = [_FULL if place % 2 else _NOTHING for place in range(len(values))]
    else:
        flipped = [_NOTHING if value > usual else _FULL for value in values]
    return replace(group, scores=tuple(flipped))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FlippingAuthor(recipe),)
