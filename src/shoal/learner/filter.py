"""Online filter: keep sampling until the batch has enough groups with a learning signal.

Invariants:
- the signal is decided on the task reward, before any length reward: an all-wrong group whose samples differ by a token
  has no signal, although its z-scored total reward would look like one;
- groups are drawn over increasing indices without gaps, and the batch takes the lowest indices with signal. It is thus
  a function of the rewards alone: not of who was fast, nor of how the drawing was divided into rounds;
- at most `max_groups` are drawn; the batch may then be smaller than requested.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.rollout import Group

Draw = Callable[[int, int], list[Group]]
"""draw(start, count): the groups start .. start + count - 1, in any order"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch:
    """The groups to train on, by index, and counts of the others."""

    groups: tuple[Group, ...]
    num_drawn: int
    num_all_right: int
    """groups without signal whose common reward is at least 1/2"""
    num_all_wrong: int
    """groups without signal whose common reward is below 1/2"""
    num_surplus: int
    """groups with signal beyond the number requested (the highest indices)"""
    exhausted: bool
    """whether `max_groups` were drawn and fewer than requested have signal"""


def has_signal(task_rewards: np.ndarray) -> bool:
    """Whether the samples of a group differ in task reward, so that their advantages are not all zero."""
    return bool(task_rewards.min() != task_rewards.max())


def fill_batch(draw: Draw, wanted: int, max_groups: int) -> FilledBatch:
    """Draw groups from index 0 on until `wanted` of them have signal or `max_groups` are drawn."""
    drawn: list[Group] = []
    num_kept = 0
    while num_kept < wanted and len(drawn) < max_groups:
        count = min(size_round(wanted, num_kept, len(drawn)), max_groups - len(drawn))
        drawn += _draw_round(draw, len(drawn), count)
        num_kept = sum(has_signal(group.rewards) for group in drawn)
    return _cut_batch(drawn, wanted)


def take_batch(draw: Draw, wanted: int) -> FilledBatch:
    """Without the filter: the first `wanted` groups, including those without signal."""
    groups = _draw_round(draw, 0, wanted)
    return replace(_cut_batch(groups, wanted), groups=tuple(groups), exhausted=False)


def size_round(wanted: int, num_kept: int, num_drawn: int) -> int:
    """Groups to draw next: remaining / observed keep rate, rounded up, at most doubling what was drawn.

    The rate of a small first round is a rough estimate (0 if nothing was kept), hence the doubling bound.
    """
    if num_drawn == 0:
        return wanted
    remaining = wanted - num_kept
    return min(-(-remaining * num_drawn // num_kept), num_drawn) if num_kept else num_drawn


def _draw_round(draw: Draw, start: int, count: int) -> list[Group]:
    groups = sorted(draw(start, count), key=lambda group: group.index)
    assert [group.index for group in groups] == list(range(start, start + count)), "draw left a gap or a duplicate"
    return groups


def _cut_batch(drawn: Sequence[Group], wanted: int) -> FilledBatch:
    kept = [group for group in drawn if has_signal(group.rewards)]
    flat = [group.rewards for group in drawn if not has_signal(group.rewards)]
    num_all_right = sum(bool(rewards[0] >= 0.5) for rewards in flat)
    return FilledBatch(
        groups=tuple(kept[:wanted]),
        num_drawn=len(drawn),
        num_all_right=num_all_right,
        num_all_wrong=len(flat) - num_all_right,
        num_surplus=max(len(kept) - wanted, 0),
        exhausted=len(kept) < wanted,
    )
