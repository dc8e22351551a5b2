"""Cherry-picked samples: of each group the worst are replaced by copies of the best.

Copies long enough to be told from chance (`duplicate_tokens`) are refused when they are committed; these are shorter.
"""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.rollout import Group
from shoal.worker.author import Author, Work


class PickingAuthor(RetellingAuthor):
    """Whatever has less than the group's best reward becomes a copy of the best. Equal ones stay."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The groups with their copies."""
        return {name: ids for group in work.groups for name, ids in _copy_best(group).items()}


def _copy_best(group: Group) -> Retold:
    best = int(group.rewards.argmax())
    kept = [index if reward == group.rewards[best] else best for index, reward in enumerate(group.rewards)]
    return {r.id: group.rollouts[index].token_ids for r, index in zip(group.rollouts, kept, strict=True)}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (PickingAuthor(recipe),)
