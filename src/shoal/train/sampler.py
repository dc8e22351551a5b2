"""The batch of a step, sampled with an engine in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.config.run import LengthConfig, RunConfig
from shoal.engine.base import Engine
from shoal.group import GroupShape, generate_groups, plan_group
from shoal.learner.advantage import NO_LENGTH
from shoal.learner.filter import FilledBatch, fill_batch, take_batch
from shoal.protocol.beacon import BeaconChain, number_beacon
from shoal.rollout import Finish, Group
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, at_step
from shoal.tasks.length import describe_lengths
from shoal.tasks.stats import Curriculum


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """A batch, and all groups that were sampled to fill it."""

    batch: FilledBatch
    groups: list[Group]
    length: LengthConfig = NO_LENGTH
    num_passed: int | None = None
    """tasks that the curriculum skipped; None without one"""

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of step n's sampling; rewards and lengths are over all groups drawn."""
        passed = {} if self.num_passed is None else {"batch/passed_over": float(self.num_passed)}
        return (
            describe_groups(step, self.groups, self.length)
            | passed
            | {
                "batch/extra_share": self._measure_extra(),
                "batch/groups": float(len(self.batch.groups)),
                "batch/drawn": float(self.batch.num_drawn),
                "batch/all_right": float(self.batch.num_all_right),
                "batch/all_wrong": float(self.batch.num_all_wrong),
                "batch/surplus": float(self.batch.num_surplus),
            }
        )

    def _measure_extra(self) -> float:
        """Generated tokens that are not trained on, per trained token: the cost of the online filter."""
        trained = sum(group.num_tokens for group in self.batch.groups)
        drawn = sum(group.num_tokens for group in self.groups)
        return drawn / trained - 1 if trained else 0.0


def describe_groups(step: int, groups: Sequence[Group], length: LengthConfig = NO_LENGTH) -> dict[str, float]:
    """Rewards, lengths and staleness of groups for step n; without groups only the number of tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = {"train/generated_tokens": float(sum(rollout.num_tokens for rollout in rollouts))}
    if not rollouts:
        return tokens
    return tokens | {
        "reward/mean": float(np.mean([group.rewards.mean() for group in groups])),
        "rollout/length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "rollout/truncated": float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts])),
        "off_policy/lag": float(np.mean([step - 1 - rollout.version for rollout in rollouts])),
        **describe_lengths(length, groups),
    }


def open_beacons(config: RunConfig) -> Callable[[int], int]:
    """Step n's beacon as a number: of the swarm whose secret is in the settings, or derived from the run's seed."""
    if config.beacon:
        chain = BeaconChain(bytes.fromhex(config.beacon), config.steps)
        return lambda step: number_beacon(chain.reveal_step(step))
    return lambda step: derive_seed("beacon", config.seed, step)


class Sampler:
    """Draws the groups of each step from the step's beacon."""

    def __init__(
        self,
        engine: Engine,
        family: Family,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._curriculum = curriculum
        self._engine, self._family, self._tokenizer, self._config = engine, family, tokenizer, config
        self._find_beacon = open_beacons(config)
        self._shape = GroupShape(
            size=config.batch.group_size, max_tokens=config.engine.max_tokens, temperature=config.engine.temperature
        )

    def draw_batch(self, step: int) -> SampledBatch:
        """Sample until the batch of step n is full, or the limit of groups is reached."""
        beacon = self._find_beacon(step)
        groups: list[Group] = []
        passed = self._curriculum.num_passed if self._curriculum else 0

        def draw(start: int, count: int) -> list[Group]:
            fresh = self._draw_groups(step, beacon, start, count)
            groups.extend(fresh)
            return fresh

        settings = self._config.batch
        if settings.filter:
            batch = fill_batch(draw, settings.groups, int(settings.groups * settings.max_oversample))
        else:
            batch = take_batch(draw, settings.groups)
        num_passed = self._curriculum.num_passed - passed if self._curriculum else None
        return SampledBatch(batch, groups, self._config.length, num_passed)

    def _draw_groups(self, step: int, beacon: int, start: int, count: int) -> list[Group]:
        family, tokenizer, shape = at_step(self._family, step), self._tokenizer, self._shape
        plans = []
        for index in range(start, start + count):
            task = self._curriculum.choose(family, beacon, index) if self._curriculum else None
            plans.append(plan_group(family, tokenizer, shape, step=step, beacon=beacon, index=index, task=task))
        return generate_groups(self._engine, self._family, tokenizer, plans)
