"""The batch of a step, sampled with an engine in this process."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.config import RunConfig
from shoal.engine.base import Engine
from shoal.group import GroupShape, generate_groups, plan_group
from shoal.learner.filter import FilledBatch, fill_batch, take_batch
from shoal.rollout import Finish, Group
from shoal.seeds import derive_seed
from shoal.tasks.base import Family


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch, and all groups that were sampled to fill it."""

    batch: FilledBatch
    groups: list[Group]

    def metrics(self, step: int) -> dict[str, float]:
        """Numbers of step n's sampling; those of rewards and lengths are over all groups drawn."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        return {
            "reward/mean": float(np.mean([group.rewards.mean() for group in self.groups])),
            "batch/groups": float(len(self.batch.groups)),
            "batch/drawn": float(self.batch.num_drawn),
            "batch/all_right": float(self.batch.num_all_right),
            "batch/all_wrong": float(self.batch.num_all_wrong),
            "batch/surplus": float(self.batch.num_surplus),
            "rollout/length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
            "rollout/truncated": float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts])),
            "off_policy/lag": float(np.mean([step - 1 - rollout.version for rollout in rollouts])),
            "train/generated_tokens": float(sum(rollout.num_tokens for rollout in rollouts)),
        }


class Sampler:
    """Draws the groups of each step from the step's beacon."""

    def __init__(self, engine: Engine, family: Family, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
        self._engine, self._family, self._tokenizer, self._config = engine, family, tokenizer, config
        self._shape = GroupShape(
            size=config.batch.group_size, max_tokens=config.engine.max_tokens, temperature=config.engine.temperature
        )

    def draw_batch(self, step: int) -> Drawn:
        """Sample until the batch of step n is full, or the bound on sampling is reached."""
        beacon = derive_seed("beacon", self._config.seed, step)
        groups: list[Group] = []

        def draw(start: int, count: int) -> list[Group]:
            fresh = self._draw_groups(beacon, start, count)
            groups.extend(fresh)
            return fresh

        settings = self._config.batch
        if not settings.filter:
            return Drawn(take_batch(draw, settings.groups), groups)
        limit = int(settings.groups * settings.max_oversample)
        return Drawn(fill_batch(draw, settings.groups, limit), groups)

    def _draw_groups(self, beacon: int, start: int, count: int) -> list[Group]:
        plans = [
            plan_group(self._family, self._tokenizer, self._shape, beacon=beacon, index=index)
            for index in range(start, start + count)
        ]
        return generate_groups(self._engine, self._family, self._tokenizer, plans)
