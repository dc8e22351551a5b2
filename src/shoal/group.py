"""From seeds to scored groups.

Group i of step n is a pure function of (n, beacon, i, weights): task and seeds derive from beacon and index, and the
set of tasks from the step if the run has a schedule. So every machine computes the same rollouts, and no worker chooses
its tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from shoal.engine.base import Engine
from shoal.policy.tokenizer import decode_completion, encode_chat, encode_prompt
from shoal.rollout import Group, Request, Rollout
from shoal.seeds import GroupSeeds, derive_group_seeds
from shoal.tasks.base import Family, Task, at_step, score_texts
from shoal.tasks.split import train_task


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The settings that all groups of a run share."""

    size: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A group before it is generated."""

    index: int
    task: Task
    requests: tuple[Request, ...]


def plan_group(
    family: Family,
    tokenizer: PreTrainedTokenizerBase,
    shape: GroupShape,
    *,
    step: int,
    beacon: int,
    index: int,
    task: Task | None = None,
) -> GroupPlan:
    """Task, seeds and requests of group `index` of a step. Only a curriculum overrides the seed's task."""
    seeds = derive_group_seeds(beacon, index, shape.size)
    task = task or train_task(at_step(family, step), seeds.task)
    return _plan_seeds(tokenizer, shape, task, index, seeds)


def plan_groups(
    family: Family,
    tokenizer: PreTrainedTokenizerBase,
    shape: GroupShape,
    *,
    step: int,
    beacon: int,
    first: int,
    count: int,
) -> list[GroupPlan]:
    """Groups first .. first + count - 1 of the step with this beacon."""
    indices = range(first, first + count)
    return [plan_group(family, tokenizer, shape, step=step, beacon=beacon, index=index) for index in indices]


def plan_leased(
    family: Family,
    tokenizer: PreTrainedTokenizerBase,
    shape: GroupShape,
    *,
    step: int,
    first: int,
    seeds: Sequence[GroupSeeds],
) -> list[GroupPlan]:
    """The same for groups whose seeds are known while the step's beacon is not."""
    tasks = [train_task(at_step(family, step), own.task) for own in seeds]
    pairs = zip(tasks, seeds, strict=True)
    return [_plan_seeds(tokenizer, shape, task, index, own) for index, (task, own) in enumerate(pairs, first)]


def _plan_seeds(
    tokenizer: PreTrainedTokenizerBase, shape: GroupShape, task: Task, index: int, seeds: GroupSeeds
) -> GroupPlan:
    requests = request_rollouts(tokenizer, task, shape, f"g{index}", seeds.rollouts)
    return GroupPlan(index=index, task=task, requests=requests)


def request_rollouts(
    tokenizer: PreTrainedTokenizerBase, task: Task, shape: GroupShape, name: str, seeds: Sequence[int]
) -> tuple[Request, ...]:
    """One request per seed for a task, with ids `name.0`, `name.1`, ..."""
    prompt_ids = tuple(encode_task(tokenizer, task))
    return tuple(
        Request(
            id=f"{name}.{sample}",
            prompt_ids=prompt_ids,
            seed=seed,
            max_tokens=shape.max_tokens,
            temperature=shape.temperature,
        )
        for sample, seed in enumerate(seeds)
    )


def encode_task(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[int]:
    """The tokens of a task's prompt: a chat or plain text."""
    if task.messages:
        return encode_chat(tokenizer, [(message.role, message.content) for message in task.messages])
    return encode_prompt(tokenizer, task.prompt)


def generate_groups(
    engine: Engine, family: Family, tokenizer: PreTrainedTokenizerBase, plans: Sequence[GroupPlan]
) -> list[Group]:
    """Generate and score planned groups, in the order of the plans."""
    requests = [request for plan in plans for request in plan.requests]
    rollouts = {rollout.id: rollout for rollout in engine.generate(requests)}
    return [score_group(family, tokenizer, plan, rollouts) for plan in plans]


def score_group(
    family: Family, tokenizer: PreTrainedTokenizerBase, plan: GroupPlan, rollouts: Mapping[str, Rollout]
) -> Group:
    """Build the group of a plan from rollouts by id, and score it."""
    own = tuple(rollouts[request.id] for request in plan.requests)
    texts = [decode_completion(tokenizer, rollout.token_ids) for rollout in own]
    scores = tuple(score_texts(family, plan.task, texts))
    return Group(index=plan.index, task_id=plan.task.id, rollouts=own, scores=scores)
