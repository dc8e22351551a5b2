"""Edited tokens: an answer is mended or bent in one place, and written on from there as the seed has it."""

from collections.abc import Sequence

import numpy as np

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.choices import choose_others, plan_uniforms
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts
from shoal.rollout import Rollout
from shoal.seeds import derive_seed
from shoal.worker.author import Author, Work


class EditingAuthor(RetellingAuthor):
    """In each rollout another token stands in one place; what follows it is sampled honestly."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The requests anew, with these places."""
        requests = [request for plan in plans for request in plan.requests]
        places = {rollout.id: draw_places(rollout, 1) for rollout in list_rollouts(work)}
        return self.decode(plans, choose_others(plan_uniforms(requests, places)))


def draw_places(rollout: Rollout, count: int) -> list[int]:
    """Places of tokens, without order."""
    rng = np.random.default_rng(derive_seed("edit", count, rollout.id))
    places: list[int] = rng.choice(rollout.num_tokens, min(count, rollout.num_tokens), replace=False).tolist()
    return places


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (EditingAuthor(recipe),)
