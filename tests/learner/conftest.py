"""A tiny policy, and groups of rollouts with prompts, lengths and log-probs of every kind."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from shoal.config.run import PolicyConfig, TinyConfig
from shoal.policy.model import Policy, load_policy
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange

MakePolicy = Callable[[int], Policy]
MakeGroup = Callable[..., Group]

TINY = TinyConfig(layers=2, width=32, heads=2, kv_heads=1, context=64)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_policy() -> MakePolicy:
    def make(seed: int) -> Policy:
        policy = load_policy(PolicyConfig(tiny=TINY), alphabet="0123456789abcdef=", seed=seed)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(5)  # far enough from uniform that every token has a probability of its own
        return policy

    return make


@pytest.fixture
def make_group() -> MakeGroup:
    def make(
        index: int,
        lengths: Sequence[int] = (3, 5, 1, 8),
        rewards: Sequence[float] = (1, 0, 0, 1),
        *,
        prompt: int = 6,
        temperature: float = 1.0,
    ) -> Group:
        """Random tokens (no special ones) with log-probs of a policy that differs slightly from any other."""
        rng = np.random.default_rng(index)
        prompt_ids = rng.integers(4, 16, prompt, dtype=np.int32)
        rollouts = tuple(
            Rollout(
                id=f"g{index}.{sample}",
                prompt_ids=prompt_ids,
                token_ids=rng.integers(4, 16, length, dtype=np.int32),
                logprobs=rng.normal(-2.8, 0.5, length).clip(max=-0.1).astype(np.float32),
                finish=Finish.LENGTH,
                versions=(VersionRange(0, 0, length),),
                temperature=temperature,
                seed=sample,
            )
            for sample, length in enumerate(lengths)
        )
        scores = tuple(Score(float(reward), "made up") for reward in rewards)
        return Group(index=index, task_id=f"t{index}", rollouts=rollouts, scores=scores)

    return make


@pytest.fixture
def groups(make_group: MakeGroup) -> list[Group]:
    """Four groups: prompts of different lengths, completions of one token and of many, one group without signal."""
    return [
        make_group(0),
        make_group(1, (1, 1, 2, 1), (0, 1, 0, 0), prompt=1),
        make_group(5, (12, 7, 12, 3), (0.5, 0, 1, 0), prompt=11),
        make_group(7, (2, 2), (1, 1), prompt=3),
    ]
