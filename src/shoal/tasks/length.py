"""The length reward: how long a completion should be is drawn from the group's seed and told in the prompt.

With l the tokens of a completion (the end token among them), l_t the target, c the bound and r the task reward:

    exact   r - min(c, alpha |l_t - l|)                              INTELLECT-2's, bounded
    max     r (1 - c (1 - clip(alpha (l_t - l) + 1/2, 0, 1)))        L1's: shorter is better, half of it at the target
    clip    r (1 - c [l > l_t])

Invariants:
- c < 1: a right answer (r = 1) has at least 1 - c, a wrong one (r = 0) at most 0, whatever their lengths;
- a rollout's `Score` is its task reward, and so is what workers claim, validators compute again and the online filter
  goes by. The length reward is added where advantages are computed, from the target and the number of tokens, both of
  which were checked: no number of a worker's is in it;
- a target is part of the task: of its prompt, and of its id, `NAME@TARGET`. Group, file and verdict say the id, so
  nothing else need carry it. The side of the split and the score are those of the task without a target.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.config import LengthConfig
from shoal.rollout import Group, Score
from shoal.tasks.base import Family, Message, Task, at_step, score_texts

MARK = "@"


def name_target(task_id: str, target: int) -> str:
    """The id of a task with a target length."""
    return f"{task_id}{MARK}{target}"


def read_target(task_id: str) -> int:
    """The target length that an id names; 0: none."""
    text = task_id.rpartition(MARK)[2] if MARK in task_id else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0


def strip_target(task_id: str) -> str:
    """The id of the task without its target length."""
    return task_id.rpartition(MARK)[0] if MARK in task_id else task_id


class TargetFamily:
    """A family whose tasks have target lengths."""

    def __init__(self, inner: Family, config: LengthConfig) -> None:
        assert config.targets, "checked by the settings"
        self.inner, self.config = inner, config

    @property
    def name(self) -> str:
        return self.inner.name

    @cached_property
    def alphabet(self) -> str:
        extra = self.config.template.replace("{prompt}", "").replace("{target}", "0123456789")
        return self.inner.alphabet + "".join(sorted(set(extra)))

    @property
    def dear(self) -> bool:
        return bool(getattr(self.inner, "dear", False))

    def at_step(self, step: int) -> "TargetFamily":
        """The tasks of a step, with target lengths."""
        inner = at_step(self.inner, step)
        return self if inner is self.inner else TargetFamily(inner, self.config)

    def make_task(self, rng: random.Random) -> Task:
        # The problem first: it is the one that the same seed gives without targets.
        task = self.inner.make_task(rng)
        return add_target(task, rng.choice(self.config.targets), self.config.template)

    def demonstrate(self, task: Task) -> str:
        """As the family without targets does, unless it has demonstrations for them."""
        own: Callable[[Task, int], str] | None = getattr(self.inner, "demonstrate_target", None)
        plain = _find_plain(task)
        return self.inner.demonstrate(plain) if own is None else own(plain, read_target(task.id))

    def score(self, task: Task, completion: str) -> Score:
        return self.inner.score(_find_plain(task), completion)

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """The scores of several completions, as the family without targets gives them."""
        return score_texts(self.inner, _find_plain(task), completions)

    def stamp_verifiers(self) -> dict[str, str]:
        """Those of the family without targets."""
        stamps: dict[str, str] = getattr(self.inner, "stamp_verifiers", dict)()
        return stamps


def aim_family(family: Family, config: LengthConfig) -> Family:
    """The family with the target lengths that the settings name, if they name any."""
    return family if config.mode == "none" else TargetFamily(family, config)


def add_target(task: Task, target: int, template: str) -> Task:
    """The task with a target length in its prompt."""
    messages = task.messages
    if messages:
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        last = users[-1] if users else len(messages) - 1
        told = Message(messages[last].role, _fill(template, messages[last].content, target))
        messages = (*messages[:last], told, *messages[last + 1 :])
    prompt = _fill(template, task.prompt, target)
    return replace(task, id=name_target(task.id, target), prompt=prompt, messages=messages, plain=task)


def reward_length(config: LengthConfig, target: int, length: int, task_reward: float) -> float:
    """The total reward of a completion: its task reward, less what its length costs."""
    match config.mode:
        case "exact":
            return task_reward - min(config.bound, config.alpha * abs(target - length))
        case "max":
            share = min(1.0, max(0.0, config.alpha * (target - length) + 0.5))
            return task_reward * (1.0 - config.bound * (1.0 - share))
        case "clip":
            return task_reward * (1.0 - config.bound * (length > target))
        case "none":
            return task_reward


def total_rewards(config: LengthConfig, group: Group) -> np.ndarray:
    """The total reward of each rollout of a group, float64; without a target the task reward as it is."""
    target = read_target(group.task_id)
    if config.mode == "none" or not target:
        return group.rewards
    pairs = zip(group.scores, group.rollouts, strict=True)
    return np.array([reward_length(config, target, rollout.num_tokens, score.value) for score, rollout in pairs])


@dataclass(frozen=True, slots=True)
class Miss:
    """How far a completion is from its target."""

    target: int
    error: int
    """tokens, either way"""
    penalty: float
    """what it cost"""


def list_misses(config: LengthConfig, groups: Sequence[Group]) -> list[Miss]:
    """One for each rollout that has a target."""
    misses = []
    for group in groups:
        target = read_target(group.task_id)
        if not target:
            continue
        for score, rollout, total in zip(group.scores, group.rollouts, total_rewards(config, group), strict=True):
            misses.append(Miss(target, abs(target - rollout.num_tokens), score.value - float(total)))
    return misses


def describe_lengths(config: LengthConfig, groups: Sequence[Group], *, prefix: str = "length") -> dict[str, float]:
    """Length penalty and budget error, all in all and by target; nothing without targets."""
    misses = list_misses(config, groups)
    if not misses:
        return {}
    errors: defaultdict[int, list[int]] = defaultdict(list)
    for miss in misses:
        errors[miss.target].append(miss.error)
    return {
        f"{prefix}/penalty": float(np.mean([miss.penalty for miss in misses])),
        f"{prefix}/error": float(np.mean([miss.error for miss in misses])),
        **{f"{prefix}/error_{target}": float(np.mean(errors[target])) for target in sorted(errors)},
    }


def _find_plain(task: Task) -> Task:
    assert task.plain is not None, "made by `add_target`"
    return task.plain


def _fill(template: str, prompt: str, target: int) -> str:
    # The target first: what stands in a prompt is data, and may hold the words of the template.
    before, _, after = template.replace("{target}", str(target)).partition("{prompt}")
    return f"{before}{prompt}{after}"
