"""Another prompt, and stated: an easy task is answered instead of the leased one, and the file says so."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.policy.tokenizer import encode_prompt
from shoal.recipe import Recipe
from shoal.seeds import derive_seed
from shoal.tasks.split import train_task
from shoal.worker.author import Author
from shoal.worker.intake import Order

_TASKS = 16


class EasyAuthor(Author):
    """Answers the shortest prompt that it could find."""

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """The leased groups, all about the one prompt."""
        tasks = [train_task(self.family, derive_seed("easy", number)) for number in range(_TASKS)]
        easiest = tuple(encode_prompt(tokenizer, min((task.prompt for task in tasks), key=len)))
        return [
            replace(plan, requests=tuple(replace(request, prompt_ids=easiest) for request in plan.requests))
            for plan in super().plan(order, tokenizer)
        ]


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (EasyAuthor(recipe),)
