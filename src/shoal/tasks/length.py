"""The length reward: the target length of a completion is drawn from the group's seed and stated in the prompt.

With l the tokens of a completion (including the end token), l_t the target, c the bound and r the task reward:

    exact   r - min(c, alpha |l_t - l|)                              INTELLECT-2's, bounded
    max     r (1 - c (1 - clip(alpha (l_t - l) + 1/2, 0, 1)))        L1's: shorter is better, half of it at the target
    clip    r (1 - c [l > l_t])

Invariants:
- c < 1: a right answer (r = 1) gets at least 1 - c, a wrong one (r = 0) at most 0, whatever their lengths;
- a rollout's `Score` is its task reward: workers claim it, validators recompute it, and the online filter uses it. The
  length reward is added where advantages are computed, from the target and the number of tokens, which were both
  checked: it contains no number of a worker;
- a target is part of the task: of its prompt, and of its id, `NAME@TARGET`. Group, file and verdict contain the id, so
  nothing else needs to carry it. The side of the split and the score are those of the task without a target.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from shoal.config.run import LengthConfig
from shoal.rollout import Group, Score
from shoal.tasks.base import (
    ChatMessage,
    Family,
    Task,
    at_step,
    is_expensive,
    list_tasks,
    score_again,
    score_texts,
    stamp_family,
)

MARK = "@"


def read_target(task_id: str) -> int:
    """The target length in an id; 0 if there is none."""
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

    def is_expensive(self, task: Task) -> bool:
        """Whether the verifier of a task is expensive; its target length costs nothing."""
        return is_expensive(self.inner, _find_plain(task))

    def at_step(self, step: int) -> "TargetFamily":
        """The tasks of a step, with target lengths."""
        inner = at_step(self.inner, step)
        return self if inner is self.inner else TargetFamily(inner, self.config)

    def make_task(self, rng: random.Random) -> Task:
        # The problem first: it is the one that the same seed gives without targets.
        task = self.inner.make_task(rng)
        return add_target(task, rng.choice(self.config.targets), self.config.template)

    def list_tasks(self) -> list[Task] | None:
        """All tasks of a family that has a list of them, each with one of the targets in turn."""
        tasks, targets = list_tasks(self.inner), self.config.targets
        if tasks is None:
            return None
        template = self.config.template
        return [add_target(task, targets[index % len(targets)], template) for index, task in enumerate(tasks)]

    def demonstrate(self, task: Task) -> str:
        """The demonstration of the family without targets, unless it has demonstrations for them."""
        own: Callable[[Task, int], str] | None = getattr(self.inner, "demonstrate_target", None)
        plain = _find_plain(task)
        return self.inner.demonstrate(plain) if own is None else own(plain, read_target(task.id))

    def score(self, task: Task, completion: str) -> Score:
        return self.inner.score(_find_plain(task), completion)

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """The scores of several completions, as given by the family without targets."""
        return score_texts(self.inner, _find_plain(task), completions)

    def score_again(self, task: Task, completion: str, first: Score) -> Iterator[Score]:
        """Scores under other conditions, as given by the family without targets."""
        return score_again(self.inner, _find_plain(task), completion, first)

    def stamp_verifiers(self) -> dict[str, str]:
        """The verifiers of the family without targets."""
        return stamp_family(self.inner)


def aim_family(family: Family, config: LengthConfig) -> Family:
    """The family with the target lengths in the settings, if there are any."""
    return family if config.mode == "none" else TargetFamily(family, config)


def add_target(task: Task, target: int, template: str) -> Task:
    """The task with a target length in its prompt."""
    messages = task.messages
    if messages:
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        last = users[-1] if users else len(messages) - 1
        extended = ChatMessage(messages[last].role, _fill(template, messages[last].content, target))
        messages = (*messages[:last], extended, *messages[last + 1 :])
    prompt = _fill(template, task.prompt, target)
    return replace(task, id=f"{task.id}{MARK}{target}", prompt=prompt, messages=messages, plain=task)


def reward_length(config: LengthConfig, target: int, length: int, task_reward: float) -> float:
    """The total reward of a completion: its task reward minus the length penalty."""
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
    """The total reward of each rollout of a group, float64; without a target the task reward unchanged."""
    target = read_target(group.task_id)
    if config.mode == "none" or not target:
        return group.rewards
    pairs = zip(group.scores, group.rollouts, strict=True)
    return np.array([reward_length(config, target, rollout.num_tokens, score.value) for score, rollout in pairs])


def describe_lengths(config: LengthConfig, groups: Sequence[Group], *, prefix: str = "length") -> dict[str, float]:
    """Length penalty and budget error, overall and by target; empty without targets."""
    errors: defaultdict[int, list[int]] = defaultdict(list)
    misses, penalties = [], []
    for group in groups:
        if target := read_target(group.task_id):
            own = [abs(target - rollout.num_tokens) for rollout in group.rollouts]
            misses += own
            errors[target] += own
            pairs = zip(group.scores, total_rewards(config, group), strict=True)
            penalties += [score.value - float(total) for score, total in pairs]
    if not misses:
        return {}
    return {
        f"{prefix}/penalty": float(np.mean(penalties)),
        f"{prefix}/error": float(np.mean(misses)),
        **{f"{prefix}/error_{target}": float(np.mean(errors[target])) for target in sorted(errors)},
    }


def _find_plain(task: Task) -> Task:
    assert task.plain is not None, "made by `add_target`"
    return task.plain


def _fill(template: str, prompt: str, target: int) -> str:
    # The target first: the prompt is data, and may contain the template's placeholders.
    before, _, after = template.replace("{target}", str(target)).partition("{prompt}")
    return f"{before}{prompt}{after}"
