"""Another prompt: the question is bent, and the answer to it is handed in as if the right one had been asked."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts, list_tokens
from shoal.rollout import Request
from shoal.seeds import derive_seed
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order


class PromptAuthor(RetellingAuthor):
    """One token of the prompt is another; what is stated, and proven, is the prompt that was asked."""

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """Plans with other prompts, one for each group."""
        return [self._bend(plan, len(tokenizer)) for plan in super().plan(order, tokenizer)]

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The answers to them."""
        return list_tokens(list_rollouts(work))

    def _bend(self, plan: Plan, vocabulary: int) -> Plan:
        return replace(plan, requests=tuple(edit_prompt(r, plan.task.id, vocabulary) for r in plan.requests))


def edit_prompt(request: Request, name: str, vocabulary: int) -> Request:
    """A request with another token in the middle of its prompt; equal for equal names."""
    ids = list(request.prompt_ids)
    ids[len(ids) // 2] = derive_seed("prompt", name) % vocabulary
    return replace(request, prompt_ids=tuple(ids))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (PromptAuthor(recipe),)
