"""Packs: which state predicts which token, and where the samples of a group go."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.learner.advantage import build_samples
from shoal.learner.logprobs import score_tokens
from shoal.policy.model import Policy
from shoal.policy.packing import Sample, build_packs
from shoal.rollout import Group

MakeGroup = Callable[..., Group]
MakePolicy = Callable[[int], Policy]


def fix_tokens(group: Group, prompt: list[int], completions: list[list[int]]) -> Group:
    """The group with the given tokens in place of its own."""
    prompt_ids = np.array(prompt, dtype=np.int32)
    rollouts = tuple(
        replace(rollout, prompt_ids=prompt_ids, token_ids=np.array(tokens, dtype=np.int32))
        for rollout, tokens in zip(group.rollouts, completions, strict=True)
    )
    return replace(group, rollouts=rollouts)


def test_a_pack_holds_each_token_once_and_knows_the_state_that_predicts_it(make_group: MakeGroup) -> None:
    first = fix_tokens(make_group(0, (3, 2), (0, 1)), [10, 11, 12], [[5, 6, 7], [8, 9]])
    second = fix_tokens(make_group(1, (2, 1), (0, 1)), [14], [[4, 5], [6]])
    (pack,) = build_packs(build_samples([first, second], "zscore"), 100)
    # The last token of a completion predicts nothing and is not fed; `6` has only that one.
    assert pack.token_ids.tolist() == [10, 11, 12, 5, 6, 8, 14, 4]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert pack.targets.tolist() == [5, 6, 7, 8, 9, 4, 5, 6]
    assert pack.rows.tolist() == [2, 3, 4, 2, 5, 6, 7, 6]
    assert pack.segment.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]


def test_what_a_group_wrote_more_than_once_is_fed_once(make_group: MakeGroup) -> None:
    same = [[5, 6, 7], [5, 6, 9], [5, 6, 7], [5, 6], [8], [9]]  # the last token of each is not fed
    first = fix_tokens(make_group(0, (3, 3, 3, 2, 1, 1), [0] * 6), [10, 11], same)
    second = fix_tokens(make_group(1, (3, 1), (0, 1)), [10, 11], [[5, 6, 7], [8]])
    (pack,) = build_packs(build_samples([first, second], "zscore"), 100)
    assert pack.token_ids.tolist() == [10, 11, 5, 6, 5, 10, 11, 5, 6]  # groups share nothing
    assert pack.rows.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 4, 1, 1, 6, 7, 8, 6]
    assert pack.targets.tolist() == [5, 6, 7, 5, 6, 9, 5, 6, 7, 5, 6, 8, 9, 5, 6, 7, 8]
    assert pack.segment.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 6, 6, 7]
    (apart,) = build_packs(build_samples([first, second], "zscore"), 100, share=False)
    assert apart.token_ids.tolist() == [10, 11, 5, 6, 5, 6, 5, 6, 5, 10, 11, 5, 6]
    assert apart.targets.tolist() == pack.targets.tolist()


def test_every_per_token_array_of_a_pack_has_the_length_of_its_completions(groups: list[Group]) -> None:
    for pack in build_packs(build_samples(groups, "zscore"), 40):
        num = sum(sample.rollout.num_tokens for sample in pack.samples)
        arrays = (pack.rows, pack.targets, pack.segment, pack.temperatures, pack.behaviour)
        assert {len(array) for array in arrays} == {num}
        assert pack.behaviour.tolist() == [x for sample in pack.samples for x in sample.rollout.logprobs.tolist()]


def test_samples_of_a_group_share_one_prompt_per_pack(groups: list[Group]) -> None:
    for pack in build_packs(build_samples(groups, "zscore"), 40):
        prompts = {sample.group: len(sample.rollout.prompt_ids) for sample in pack.samples}
        fed = sum(sample.rollout.num_tokens - 1 for sample in pack.samples)
        assert len(pack.token_ids) == sum(prompts.values()) + fed


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10_000])
def test_each_sample_is_in_exactly_one_pack(groups: list[Group], max_tokens: int) -> None:
    samples = build_samples(groups, "zscore")
    packs = build_packs(samples, max_tokens)
    assert Counter(s.rollout.id for pack in packs for s in pack.samples) == Counter(s.rollout.id for s in samples)


def test_the_limit_decides_how_many_packs_there_are(groups: list[Group]) -> None:
    samples = build_samples(groups, "zscore")
    assert len(build_packs(samples, 1)) == len(samples)
    assert 1 < len(build_packs(samples, 45)) < len(samples)
    assert len(build_packs(samples, 10_000)) == 1


def test_a_sample_scores_the_same_alone_and_among_others(groups: list[Group], make_policy: MakePolicy) -> None:
    model, samples = make_policy(0).model, build_samples(groups, "zscore")
    scored: dict[str, list[torch.Tensor]] = {}
    for max_tokens in (1, 20, 45, 10_000):
        for pack in build_packs(samples, max_tokens):
            with torch.no_grad():
                logprobs = score_tokens(model, pack).logprobs
            for index, sample in enumerate(pack.samples):
                scored.setdefault(sample.rollout.id, []).append(logprobs[pack.segment == index])
    for alone, *others in scored.values():
        for other in others:
            torch.testing.assert_close(alone, other, rtol=0, atol=1e-5)


def test_a_group_of_single_tokens_feeds_its_prompt_alone(make_group: MakeGroup) -> None:
    (pack,) = build_packs(build_samples([make_group(3, (1, 1), (0, 1), prompt=4)], "zscore"), 100)
    assert len(pack.token_ids) == 4
    assert pack.rows.tolist() == [3, 3]


def test_numbers_per_sample_are_spread_over_its_tokens(make_group: MakeGroup) -> None:
    (pack,) = build_packs(build_samples([make_group(0, (3, 1), (0, 1))], "centred"), 100)
    assert pack.spread([0.5, -2.0]).tolist() == [0.5, 0.5, 0.5, -2.0]


def test_temperature_is_that_of_each_sample(make_group: MakeGroup) -> None:
    samples = [Sample(0, make_group(0, (2,), (1,), temperature=0.5).rollouts[0], 1.0)]
    samples += [Sample(1, make_group(1, (1,), (1,), temperature=2.0).rollouts[0], 1.0)]
    (pack,) = build_packs(samples, 100)
    assert pack.temperatures.tolist() == [0.5, 0.5, 2.0]


@pytest.mark.parametrize("kind", ["zscore", "centred"])
def test_advantages_sum_to_zero_within_each_group(groups: list[Group], kind: str) -> None:
    samples = build_samples(groups, kind)  # type: ignore[arg-type]
    for group in groups:
        own = [sample.advantage for sample in samples if sample.group == group.index]
        assert len(own) == len(group.rollouts)
        assert sum(own) == pytest.approx(0, abs=1e-6)
        assert any(own) == (group.rewards.min() != group.rewards.max())


def test_an_empty_batch_has_no_packs() -> None:
    assert build_packs(build_samples([], "zscore"), 100) == []
