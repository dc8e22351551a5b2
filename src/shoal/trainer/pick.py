"""Whether a group that a stranger wrote may be trained on.

Validators judged it before. This is the last look, at what would otherwise end the trainer or poison its weights if a
validator were wrong or bought; it takes no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.rollout import Group, Rollout
from shoal.swarm.messages import BatchEntry
from shoal.tasks.length import read_target

MAX_LOGPROB = 1e-3
"""a probability is at most 1, but for rounding"""


class UnreadableError(Exception):
    """A file or group that cannot be trained on, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every group of a run is like."""

    group_size: int
    max_tokens: int
    vocab_size: int
    context: int
    """longest prompt and completion together"""
    temperature: float
    targets: frozenset[int] = frozenset()
    """target lengths; none: tasks have no target"""


def pick_group(groups: Sequence[Group], entry: BatchEntry, expected: Expected) -> Group:
    """The group that an entry of a batch names, out of the groups of its file."""
    if not entry.place < len(groups):
        raise UnreadableError(f"the file has {len(groups)} groups, not the one at place {entry.place}")
    group = groups[entry.place]
    if group.index != entry.index:
        raise UnreadableError(f"the file has group {group.index} where group {entry.index} should be")
    if len(group.rollouts) != expected.group_size:
        raise UnreadableError(f"{len(group.rollouts)} rollouts instead of {expected.group_size}")
    if not all(np.isfinite(score.value) and 0.0 <= score.value <= 1.0 for score in group.scores):
        raise UnreadableError("a reward outside 0 to 1")
    if read_target(group.task_id) not in (expected.targets or {0}):
        raise UnreadableError("a task with a target length that is none of the run's")
    prompt = group.rollouts[0].prompt_ids
    for rollout in group.rollouts:
        if not np.array_equal(rollout.prompt_ids, prompt):
            raise UnreadableError("rollouts of different prompts")
        _check_rollout(rollout, entry, expected)
    return group


def _check_rollout(rollout: Rollout, entry: BatchEntry, expected: Expected) -> None:
    if {span.version for span in rollout.versions} != {entry.version}:
        raise UnreadableError(f"a rollout of another version than v{entry.version}")
    if not 1 <= rollout.num_tokens <= expected.max_tokens:
        raise UnreadableError(f"a rollout of {rollout.num_tokens} tokens")
    if not 1 <= len(rollout.prompt_ids) <= expected.context - rollout.num_tokens:
        raise UnreadableError(f"a prompt of {len(rollout.prompt_ids)} tokens")
    for ids in (rollout.prompt_ids, rollout.token_ids):
        if ids.min() < 0 or ids.max() >= expected.vocab_size:
            raise UnreadableError("a token that is none of the model's")
    if not np.isfinite(rollout.logprobs).all() or rollout.logprobs.max() > MAX_LOGPROB:
        raise UnreadableError("a log-prob that is none")
    if rollout.temperature != expected.temperature:
        raise UnreadableError(f"sampled at temperature {rollout.temperature:g}")
