"""The online filter: which groups make the batch, and how many are drawn."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.learner.filter import Draw, FilledBatch, fill_batch, has_signal, size_round
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange

KINDS = {"+": (0.0, 1.0), "r": (1.0, 1.0), "w": (0.0, 0.0), "p": (0.5, 0.5)}


def make_group(index: int, rewards: tuple[float, ...]) -> Group:
    rollouts = tuple(
        Rollout(
            id=f"{index}/{sample}",
            prompt_ids=np.array([1], dtype=np.int32),
            token_ids=np.array([2], dtype=np.int32),
            logprobs=np.zeros(1, dtype=np.float32),
            finish=Finish.STOP,
            versions=(VersionRange(0, 0, 1),),
            temperature=1.0,
            seed=0,
        )
        for sample in range(len(rewards))
    )
    scores = tuple(Score(value, "") for value in rewards)
    return Group(index=index, task_id=str(index), rollouts=rollouts, scores=scores)


def make_draw(world: str, calls: list[tuple[int, int]] | None = None) -> Draw:
    """A source of groups written as text: + has signal, r is all right, w all wrong, p all at one half."""

    def draw(start: int, count: int) -> list[Group]:
        if calls is not None:
            calls.append((start, count))
        groups = [make_group(index, KINDS[world[index]]) for index in range(start, start + count)]
        random.Random(start).shuffle(groups)
        return groups

    return draw


def kept_indices(batch: FilledBatch) -> list[int]:
    return [group.index for group in batch.groups]


def test_signal_is_a_difference_in_reward() -> None:
    assert has_signal(np.array([0.0, 0.0, 1.0]))
    assert not has_signal(np.array([1.0, 1.0]))
    assert not has_signal(np.array([0.0]))


def test_a_batch_full_of_signal_is_drawn_in_one_round() -> None:
    calls: list[tuple[int, int]] = []
    batch = fill_batch(make_draw("++++", calls), wanted=4, max_groups=16)
    assert calls == [(0, 4)] and kept_indices(batch) == [0, 1, 2, 3]
    assert (batch.num_all_right, batch.num_all_wrong, batch.num_surplus, batch.exhausted) == (0, 0, 0, False)


def test_sampling_continues_and_the_lowest_indices_with_signal_are_kept() -> None:
    calls: list[tuple[int, int]] = []
    batch = fill_batch(make_draw("+rw+" + "+w++" + "++++", calls), wanted=4, max_groups=100)
    assert calls == [(0, 4), (4, 4)]
    assert kept_indices(batch) == [0, 3, 4, 6]
    assert (batch.num_drawn, batch.num_surplus, batch.exhausted) == (8, 1, False)


def test_groups_without_signal_are_counted_by_side() -> None:
    batch = fill_batch(make_draw("rrwp+"), wanted=5, max_groups=5)
    assert (batch.num_all_right, batch.num_all_wrong) == (3, 1)


def test_an_exhausted_batch_trains_what_there_is() -> None:
    batch = fill_batch(make_draw("w" * 9 + "+" + "w" * 10), wanted=4, max_groups=10)
    assert kept_indices(batch) == [9]
    assert (batch.num_drawn, batch.exhausted) == (10, True)


def test_a_batch_without_any_signal_is_empty() -> None:
    batch = fill_batch(make_draw("w" * 16), wanted=4, max_groups=16)
    assert (batch.groups, batch.num_drawn, batch.exhausted) == ((), 16, True)


def test_the_bound_may_lie_below_what_is_wanted() -> None:
    batch = fill_batch(make_draw("++++"), wanted=4, max_groups=2)
    assert (kept_indices(batch), batch.num_drawn, batch.exhausted) == ([0, 1], 2, True)


@pytest.mark.parametrize(
    ("num_kept", "num_drawn", "expected"),
    [(0, 0, 12), (8, 12, 6), (11, 12, 2), (1, 12, 12), (0, 12, 12), (6, 24, 24), (11, 48, 5)],
)
def test_rounds_are_sized_by_the_keep_rate(num_kept: int, num_drawn: int, expected: int) -> None:
    # 4 missing at a rate of 8/12: 6 more; 1 at 11/12: 2 more (rounded up); never more than were drawn so far.
    assert size_round(12, num_kept, num_drawn) == expected


def test_a_draw_with_a_gap_is_refused() -> None:
    def draw(start: int, count: int) -> list[Group]:
        return [make_group(start, KINDS["+"])] * count

    with pytest.raises(AssertionError, match="gap or a duplicate"):
        fill_batch(draw, wanted=2, max_groups=4)


@given(world=st.text("+rw", min_size=24, max_size=24), wanted=st.integers(1, 8), max_groups=st.integers(1, 24))
def test_the_batch_is_the_first_groups_with_signal_whatever_the_rounds(
    world: str, wanted: int, max_groups: int
) -> None:
    batch = fill_batch(make_draw(world), wanted=wanted, max_groups=max_groups)
    with_signal = [index for index in range(max_groups) if world[index] == "+"]
    assert kept_indices(batch) == with_signal[:wanted]
    assert batch.exhausted == (len(with_signal) < wanted)
    assert batch.num_drawn <= max_groups
    assert len(batch.groups) + batch.num_all_right + batch.num_all_wrong + batch.num_surplus == batch.num_drawn
