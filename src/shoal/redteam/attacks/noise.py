"""What is left where tokens follow from a seed: two tokens that are a hair apart, closer than honest machines agree.

Where the draw lies so close to the edge of a token's interval that either side could be rounding, both ends are
written, and the one with the better reward is handed in. No check can tell this from an honest machine whose last bits
fall the other way; how seldom there is such a place bounds what can be done (bench/power.py measures it).
"""

from collections.abc import Sequence

from shoal.group import Plan, score_group
from shoal.recipe import Recipe
from shoal.redteam.choices import CloseChoice
from shoal.redteam.forge import RetellingAuthor, Retold, Tokens, list_rollouts, list_tokens
from shoal.toploc.finding import Check
from shoal.toploc.fit import FLOORS
from shoal.worker.author import Author, Work

TOLERANCE = FLOORS[Check.SAMPLING] / 2
"""Half of the least distance that any calibration allows."""


class NoisyAuthor(RetellingAuthor):
    """Takes every such place that leads to a better end, and works honestly otherwise."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """Of each rollout the better of the honest one and the one of the other side."""
        choice = CloseChoice(TOLERANCE)
        others = self.decode(plans, choice)
        kept = dict[str, Tokens](list_tokens(list_rollouts(work)))
        if not choice.openings:
            return kept
        for plan, group in zip(plans, work.groups, strict=True):
            told = {r.id: self.tell(r, others[r.id], work.version) for r in plan.requests}
            other = score_group(self.family, self.policy.tokenizer, plan, told)
            better = other.rewards > group.rewards
            kept |= {r.id: others[r.id] for r, is_better in zip(plan.requests, better, strict=True) if is_better}
        return kept


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (NoisyAuthor(recipe),)
