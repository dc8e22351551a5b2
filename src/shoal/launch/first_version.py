"""Version 0 of a run, on disk and calibrated: the one step of preparing a swarm that needs torch."""

from pathlib import Path

import torch

from shoal.calibrate.calibrate import CalibrationPlan, calibrate_policy
from shoal.calibrate.prompts import PromptSource
from shoal.calibrate.variants import list_setups
from shoal.config.run import RunConfig
from shoal.policy.model import Policy, open_policy, save_policy
from shoal.tasks.open import open_tasks
from shoal.toploc.calibration import Calibration
from shoal.train.loop import settle_config
from shoal.train.sft import load_start
from shoal.util.files import atomic_dir
from shoal.util.process import tune_memory, tune_process

_SKIPPED = {"1 slot", "replayed alone", "transformers, batch 1", "transformers, batch 7"}
"""Ways that take most of the time. In float32 thresholds are floors above the noise of all ways, and these are skipped;
`shoal calibrate` measures every one, for a run whose strangers bring other machines."""
CHUNKS_PER_ATTACK, LEAST_ATTACKS = 8, 16
"""Honest chunks for each rollout of an attack whose power is measured, and the least number of these."""


def write_start(config: RunConfig, folder: Path) -> Policy:
    """The folder of v0, as the trainer will write it, and its policy as others will open it."""
    config = settle_config(config)
    tune_process(config.threads)
    dtype = getattr(torch, config.policy.publish_dtype)
    with atomic_dir(folder) as target:
        save_policy(load_start(config), target, dtype=dtype, shard_bytes=config.policy.shard_bytes)
    policy = open_policy(folder, dtype=dtype)
    tune_memory(policy.num_bytes)
    return policy


def calibrate_start(policy: Policy, config: RunConfig, *, chunks: int, tokens: int) -> Calibration:
    """What honest rollouts of v0 look like. In float32 it holds for all versions that follow."""
    longest = policy.model.config.max_position_embeddings // 2
    source = PromptSource(
        tokens=max(32, min(tokens, longest)),
        temperature=config.engine.temperature,
        seed=config.seed,
        task=config.tasks.name,
        family=open_tasks(config) if config.tasks.set or config.length.mode != "none" else None,
    )
    plan = CalibrationPlan(
        source=source,
        samples=chunks,
        threads=1,
        attacks=max(LEAST_ATTACKS, chunks // CHUNKS_PER_ATTACK),
        answer_tokens=min(config.engine.max_tokens, longest),
        step=config.learner.lr,
    )
    ways = list_setups(config.policy.publish_dtype, threads=1, mixed=False)
    if config.policy.publish_dtype == "float32":
        ways = [way for way in ways if way.name not in _SKIPPED]
    return calibrate_policy(policy, ways, plan, name=config.name)
