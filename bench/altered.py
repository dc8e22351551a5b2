"""A model that is one training step older than the true one."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig
from shoal.learner.learner import Learner
from shoal.rollout import Group, Rollout, Score
from stage import GROUP

_WARM_STEPS = 3


def step_back(model: PreTrainedModel, rollouts: Sequence[Rollout], rate: float) -> PreTrainedModel:
    """The weights before one AdamW step of RL.

    A few steps fill the optimizer's averages first, because Adam's very first step moves every weight by the full rate.
    The next step is then subtracted from the given weights.
    """
    trained = copy.deepcopy(model).float()
    config = LearnerConfig(lr=rate, warmup_steps=0, updates=1)
    learner = Learner(trained, config, max_tokens=max(rollout.num_tokens for rollout in rollouts))
    groups = [_score_group(index, rollouts[index * GROUP :][:GROUP]) for index in range(min(4, len(rollouts) // GROUP))]
    for turn in range(_WARM_STEPS):
        learner.train_step([groups[turn % len(groups)]])
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    learner.train_step([groups[_WARM_STEPS % len(groups)]])
    older = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in older.state_dict().items():
            tensor.copy_(tensor.float() - (trained.state_dict()[name] - before[name]))
    return older


def _score_group(index: int, rollouts: Sequence[Rollout]) -> Group:
    """A group whose rewards differ: shorter words, as encoded in the ids of the first tokens."""
    order = np.argsort(np.argsort([int(rollout.token_ids[:32].sum()) for rollout in rollouts]))
    scores = tuple(Score(float(rank) / (len(rollouts) - 1), "rank") for rank in order)
    return Group(index=index, task_id=str(index), rollouts=tuple(rollouts), scores=scores)
