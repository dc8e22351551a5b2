"""Groups with given rewards and lengths."""

from collections.abc import Callable

import numpy as np
import pytest

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """A group of one task; the target length is part of its id."""

    def make(rewards: list[float], lengths: list[int], task_id: str = "sort-1@4") -> Group:
        rollouts = [
            Rollout(
                id=f"g0.{sample}",
                prompt_ids=np.array([1], dtype=np.int32),
                token_ids=np.arange(length, dtype=np.int32),
                logprobs=np.zeros(length, dtype=np.float32),
                finish=Finish.STOP,
                versions=(VersionRange(0, 0, length),),
                temperature=1.0,
                seed=sample,
            )
            for sample, length in enumerate(lengths)
        ]
        scores = tuple(Score(value, "") for value in rewards)
        return Group(index=0, task_id=task_id, rollouts=tuple(rollouts), scores=scores)

    return make
