"""The author: which weights are run, what is asked of them, and what is handed in.

This is the honest one. Whoever wants to cheat replaces one of its methods and leaves the rest of the worker as it is;
the attacks of `shoal.redteam` do so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from shoal.errors import ConfigError
from shoal.group import GroupShape, Plan, plan_groups
from shoal.node.weights import Opener
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_chat
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.write import Proofs, Written, write_submission
from shoal.tasks.base import Family
from shoal.tasks.sets import SetFamily
from shoal.worker.intake import Order, WorkLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a lease asked for."""

    order: Order
    version: int
    """that is stated for all of it"""
    groups: tuple[Group, ...]
    proofs: Proofs
    seconds: float
    """from its first token to its last"""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


class Author:
    """Makes plans of orders and work of what was generated, all as the recipe says."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.family = recipe.open_family()
        self.shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)
        self._opener = Opener(recipe)

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The policy of a version that was pulled into a folder; ConfigError if it is not one of this run."""
        return self._opener.open(version, folder)

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """The groups of an order, before they are generated."""
        return plan_groups(
            self.family,
            tokenizer,
            self.shape,
            step=order.step,
            beacon=order.beacon,
            first=order.first,
            count=order.count,
        )

    def finish(self, work: Work) -> Work:
        """What is handed in."""
        return work

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
        """The file of it, and what its manifest says."""
        return write_submission(path, groups, proofs)


def fit_slots(
    config: PretrainedConfig, recipe: Recipe, limits: WorkLimits, slots: int, *, longest: int | None = None
) -> int:
    """Rollouts decoded side by side, as many as asked for or as memory allows; `longest` is that of all prompts."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # What is reserved for one rollout is what it may need: where nobody knows the prompts, all of the context.
    prompt = limits.max_tokens if longest is None else longest
    length = min(config.max_position_embeddings, prompt + recipe.max_tokens)
    bytes_per_slot = 4 * (2 * config.num_hidden_layers * config.num_key_value_heads * head_size * length)
    fitting = (limits.memory_mb << 20) // bytes_per_slot
    if fitting < 1:
        raise ConfigError(
            f"memory_mb = {limits.memory_mb}: one rollout of this model may need {bytes_per_slot >> 20} MB; allow more"
        )
    return int(min(slots, fitting))


def bound_prompts(family: Family, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """How long prompts are at most, in tokens; None where tasks are made one by one, and nobody knows.

    A token of a byte-level vocabulary is a byte at least. What a template adds is measured on empty messages.
    """
    if not isinstance(family, SetFamily):
        return None
    tasks = family.list_tasks()
    forms = {tuple(message.role for message in task.messages) for task in tasks}
    frame = max(len(encode_chat(tokenizer, [(role, "") for role in form])) if form else 1 for form in forms)
    return frame + max(len(task.prompt.encode()) for task in tasks)
