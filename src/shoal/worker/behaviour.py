"""What a worker does with a lease: which weights it runs, what it requests from the engine, what it submits.

`WorkerBehaviour` is the honest one. An attack in `shoal.redteam` replaces one of its methods and leaves the rest of the
worker unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from shoal.config.run import MAX_SLOTS
from shoal.errors import ConfigError
from shoal.group import GroupPlan, GroupShape, plan_leased
from shoal.node.weights import WeightsOpener
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_chat
from shoal.protocol.messages import Manifest
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.write import Proofs, WrittenSubmission, write_submission
from shoal.tasks.base import Family
from shoal.tasks.sets.family import SetFamily
from shoal.worker.orders import LeaseOrder, WorkLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedWork:
    """The finished work of a lease."""

    order: LeaseOrder
    version: int
    """version stated for all of it"""
    groups: tuple[Group, ...]
    proofs: Proofs
    seconds: float
    """time from its first token to its last"""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


class WorkerBehaviour:
    """The honest worker. The generator uses it to plan and finish, the lease table to write."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.family = recipe.open_family()
        self.shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)
        self._opener = WeightsOpener(recipe)
        self._policy: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The policy of a version that was pulled into a folder; ConfigError if it does not belong to this run.

        It takes the memory of the one before, which was opened here and must not be used any more.
        """
        self._policy = self._opener.open(version, folder, over=self._policy)
        return self._policy

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """The groups of an order, before they are generated."""
        return plan_leased(self.family, tokenizer, self.shape, step=order.step, first=order.first, seeds=order.seeds)

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The work that is submitted."""
        return work

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
        """Write the submission file; returns what the manifest states about it."""
        return write_submission(path, groups, proofs)


@dataclass(frozen=True, slots=True)
class PendingSubmission:
    """Work that is ready to submit."""

    manifest: Manifest
    path: Path


def pack_work(behaviour: WorkerBehaviour, work: FinishedWork, fence: int, path: Path) -> PendingSubmission:
    """Write the file of finished work, and build its manifest. Blocking."""
    written = behaviour.write(path, work.groups, work.proofs)
    manifest = Manifest(
        lease=work.order.lease,
        fence=fence,
        blob=written.sha256,
        size=written.size,
        version=work.version,
        rollouts=written.entries,
    )
    return PendingSubmission(manifest, path)


def fit_slots(
    config: PretrainedConfig, recipe: Recipe, limits: WorkLimits, slots: int, *, longest: int | None = None
) -> int:
    """Rollouts to decode at once: as many as requested or as memory allows; `longest` is the longest prompt."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Reserve what a rollout may need at most: the whole context if prompt lengths are unknown.
    prompt = limits.max_tokens if longest is None else longest
    length = min(config.max_position_embeddings, prompt + recipe.max_tokens)
    bytes_per_slot = 4 * (2 * config.num_hidden_layers * config.num_key_value_heads * head_size * length)
    fitting = (limits.memory_mb << 20) // bytes_per_slot
    if fitting < 1:
        raise ConfigError(
            f"memory_mb = {limits.memory_mb}: one rollout of this model may need {bytes_per_slot >> 20} MB; increase it"
        )
    return int(min(slots, fitting, MAX_SLOTS))


def bound_prompts(family: Family, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The longest possible prompt in tokens; None for families that make tasks one by one, where it is unknown.

    A token of a byte-level vocabulary covers at least one byte. Empty messages measure the template's overhead.
    """
    if not isinstance(family, SetFamily):
        return None
    tasks = family.list_tasks()
    forms = {tuple(message.role for message in task.messages) for task in tasks}
    frame = max(len(encode_chat(tokenizer, [(role, "") for role in form])) if form else 1 for form in forms)
    return frame + max(len(task.prompt.encode()) for task in tasks)
