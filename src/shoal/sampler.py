"""The batch of a step, sampled with an engine in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.config import RunConfig
from shoal.engine.base import Engine
from shoal.group import GroupShape, generate_groups, plan_groups
from shoal.learner.filter import FilledBatch, fill_batch, take_batch
from shoal.rollout import Finish, Group
from shoal.seeds import derive_seed
from shoal.swarm.beacon import BeaconChain, number_beacon
from shoal.tasks.base import Family


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch, and all groups that were sampled to fill it."""

    batch: FilledBatch
    groups: list[Group]

    def metrics(self, step: int) -> dict[str, float]:
        """Numbers of step n's sampling; those of rewards and lengths are over all groups drawn."""
        return describe_groups(step, self.groups) | {
            "batch/groups": float(len(self.batch.groups)),
            "batch/drawn": float(self.batch.num_drawn),
            "batch/all_right": float(self.batch.num_all_right),
            "batch/all_wrong": float(self.batch.num_all_wrong),
            "batch/surplus": float(self.batch.num_surplus),
        }


def describe_groups(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and staleness of groups for step n; of no groups at all there is only their number of tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = {"train/generated_tokens": float(sum(rollout.num_tokens for rollout in rollouts))}
    if not rollouts:
        return tokens
    return tokens | {
        "reward/mean": float(np.mean([group.rewards.mean() for group in groups])),
        "rollout/length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "rollout/truncated": float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts])),
        "off_policy/lag": float(np.mean([step - 1 - rollout.version for rollout in rollouts])),
    }


def open_beacons(config: RunConfig) -> Callable[[int], int]:
    """Step n's beacon as a number: of the swarm whose secret the settings hold, or else of the run's seed."""
    if config.beacon:
        chain = BeaconChain(bytes.fromhex(config.beacon), config.steps)
        return lambda step: number_beacon(chain.reveal_step(step))
    return lambda step: derive_seed("beacon", config.seed, step)


class Sampler:
    """Draws the groups of each step from the step's beacon."""

    def __init__(self, engine: Engine, family: Family, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
        self._engine, self._family, self._tokenizer, self._config = engine, family, tokenizer, config
        self._find_beacon = open_beacons(config)
        self._shape = GroupShape(
            size=config.batch.group_size, max_tokens=config.engine.max_tokens, temperature=config.engine.temperature
        )

    def draw_batch(self, step: int) -> Drawn:
        """Sample until the batch of step n is full, or the bound on sampling is reached."""
        beacon = self._find_beacon(step)
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
        plans = plan_groups(self._family, self._tokenizer, self._shape, beacon=beacon, first=start, count=count)
        return generate_groups(self._engine, self._family, self._tokenizer, plans)
