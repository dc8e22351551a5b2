"""Target lengths: drawn from the seed, stated in the prompt, and never worth more than a right answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.run import LengthConfig
from shoal.learner.advantage import build_samples
from shoal.learner.filter import has_signal
from shoal.tasks.base import ChatMessage, Task
from shoal.tasks.length import (
    add_target,
    aim_family,
    describe_lengths,
    read_target,
    reward_length,
    strip_target,
    total_rewards,
)
from shoal.tasks.registry import load_family
from shoal.tasks.split import split_task, train_task

EXACT = LengthConfig(mode="exact", targets=[4, 8], alpha=0.1, bound=0.5, template="{target}:{prompt}")
lengths = st.integers(1, 10**6)
modes = st.sampled_from(["exact", "max", "clip"])


@pytest.mark.parametrize(
    ("mode", "length", "reward", "total"),
    [
        ("exact", 100, 1.0, 1.0),
        ("exact", 90, 1.0, 0.9),
        ("exact", 110, 1.0, 0.9),
        ("exact", 110, 0.0, -0.1),
        ("exact", 900, 1.0, 0.4),  # the bound
        ("max", 100, 1.0, 0.7),  # half of the bound at the target
        ("max", 50, 1.0, 1.0),
        ("max", 150, 1.0, 0.4),
        ("max", 150, 0.0, 0.0),
        ("clip", 100, 1.0, 1.0),
        ("clip", 101, 1.0, 0.4),
        ("clip", 101, 0.0, 0.0),
    ],
)
def test_rewards_worked_out_by_hand(mode: str, length: int, reward: float, total: float) -> None:
    config = LengthConfig(mode=mode, targets=[100], alpha=0.01, bound=0.6)
    assert reward_length(config, 100, length, reward) == pytest.approx(total, abs=1e-12)


@given(modes, st.floats(1e-6, 1.0), st.floats(0.01, 0.99), lengths, lengths, lengths)
def test_no_length_makes_a_wrong_answer_worth_more_than_a_right_one(mode, alpha, bound, target, right, wrong) -> None:
    config = LengthConfig(mode=mode, targets=[target], alpha=alpha, bound=bound)
    gap = reward_length(config, target, right, 1.0) - reward_length(config, target, wrong, 0.0)
    assert gap >= 1.0 - bound - 1e-12


def test_the_target_follows_from_the_seed_and_leaves_task_and_split_as_they_are() -> None:
    plain = load_family("sort", {})
    family = aim_family(plain, EXACT)
    tasks = [train_task(family, seed) for seed in range(200)]
    assert tasks == [train_task(family, seed) for seed in range(200)]
    assert {read_target(task.id) for task in tasks} == {4, 8}
    for seed, task in enumerate(tasks):
        alone = train_task(plain, seed)
        assert task.plain == alone and task.problem == alone.id == strip_target(task.id)
        assert task.prompt == f"{read_target(task.id)}:{alone.prompt}" and split_task(task) is split_task(alone)
        assert family.score(task, plain.demonstrate(alone)).value == 1.0
    assert set("48:0123456789") <= set(family.alphabet)
    assert aim_family(plain, LengthConfig()) is plain


def test_in_a_chat_the_target_is_in_the_last_user_message() -> None:
    chat = (ChatMessage("system", "s"), ChatMessage("user", "{target} {prompt}"), ChatMessage("assistant", "a"))
    task = Task(id="x", prompt="p", verifier="math", info={}, kin="x", messages=chat)
    aimed = add_target(task, 32, "{prompt} Think for {target} tokens.")
    assert [message.content for message in aimed.messages] == ["s", "{target} {prompt} Think for 32 tokens.", "a"]


@pytest.mark.parametrize("text", ["", "x", "x@", "x@y", "x@-1", "x@99999999999", "x@\u0663"])
def test_an_id_without_a_target_has_none(text: str) -> None:
    assert read_target(text) == 0


def test_signal_is_decided_on_task_reward_and_advantages_on_the_total(make_group) -> None:
    flat = make_group([0.0, 0.0], [4, 9])
    assert not has_signal(flat.rewards) and total_rewards(EXACT, flat)[0] != total_rewards(EXACT, flat)[1]
    group = make_group([1.0, 1.0, 0.0], [4, 6, 4])
    np.testing.assert_allclose(total_rewards(EXACT, group), [1.0, 0.8, 0.0])
    best, longer, wrong = (sample.advantage for sample in build_samples([group], "centred", EXACT))
    assert best > longer > wrong
    without = build_samples([make_group([1.0, 1.0, 0.0], [4, 6, 4], "sort-1")], "centred", EXACT)
    assert without[0].advantage == without[1].advantage


def test_metrics_report_penalty_and_error_by_target(make_group) -> None:
    groups = [make_group([1.0, 0.0], [4, 6]), make_group([1.0, 0.0], [8, 4], "sort-2@8")]
    found = describe_lengths(EXACT, groups)
    assert found["length/penalty"] == pytest.approx((0 + 0.2 + 0 + 0.4) / 4)
    assert (found["length/error"], found["length/error_4"], found["length/error_8"]) == (1.5, 1.0, 2.0)
    assert describe_lengths(EXACT, [make_group([1.0], [4], "sort-1")]) == {}
