"""Version 0 of a run, on disk and calibrated: the one step of preparing a swarm that needs torch."""

from itertools import islice
from pathlib import Path
from statistics import mean

import torch

from shoal.calibrate.calibrate import CalibrationPlan, calibrate_policy
from shoal.calibrate.power import list_attacks
from shoal.calibrate.prompts import PromptSource, draw_requests
from shoal.calibrate.variants import list_setups
from shoal.config.run import RunConfig
from shoal.policy.model import Policy, open_policy, save_policy
from shoal.tasks.open import open_tasks
from shoal.toploc.calibration import Calibration
from shoal.toploc.rivals import Rival
from shoal.train.loop import settle_config
from shoal.train.sft import load_start
from shoal.util.files import atomic_dir
from shoal.util.process import tune_memory, tune_process

_SKIPPED = {"1 slot", "replayed alone", "transformers, batch 1", "transformers, batch 7"}
"""Ways that take most of the time. In float32 thresholds are floors above the noise of all ways, and these are skipped;
`shoal calibrate` measures every one, for a run whose strangers bring other machines."""
CHUNKS_PER_ATTACK, LEAST_ATTACKS, FEWEST_ATTACKS = 8, 16, 8
"""Honest chunks for each rollout of an attack whose power is measured, the least number of these, and the least under a
limit of operations. All that is concluded from them are confidence bounds, so that fewer only make weaker claims."""
_SAMPLED_PROMPTS = 16


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


def calibrate_start(policy: Policy, config: RunConfig, *, chunks: int, tokens: int, tflop: float = 0.0) -> Calibration:
    """What honest rollouts of v0 look like. In float32 it holds for all versions that follow.

    `tflop` limits the operations for measuring power; 0: no limit.
    """
    longest = policy.model.config.max_position_embeddings // 2
    source = PromptSource(
        tokens=max(32, min(tokens, longest)),
        temperature=config.engine.temperature,
        seed=config.seed,
        task=config.tasks.name,
        family=open_tasks(config) if config.tasks.set or config.length.mode != "none" else None,
    )
    ways = list_setups(config.policy.publish_dtype, threads=1, mixed=False)
    if config.policy.publish_dtype == "float32":
        ways = [way for way in ways if way.name not in _SKIPPED]
    attacks, answer = max(LEAST_ATTACKS, chunks // CHUNKS_PER_ATTACK), min(config.engine.max_tokens, longest)
    if tflop:
        most = int(1e12 * tflop / _count_operations(policy, source, len(ways), answer))
        attacks = max(FEWEST_ATTACKS, min(attacks, most))
    plan = CalibrationPlan(
        source=source,
        samples=chunks,
        threads=1,
        attacks=attacks,
        answer_tokens=answer,
        step=config.learner.lr,
    )
    return calibrate_policy(policy, ways, plan, name=config.name)


def _count_operations(policy: Policy, source: PromptSource, ways: int, answer: int) -> float:
    """Operations for one rollout of every attack, and in bfloat16 of every way, which are compared with all rivals."""
    prompts = [len(request.prompt_ids) for request in islice(draw_requests(policy, source, "cost"), _SAMPLED_PROMPTS)]
    workers, replays = len(list_attacks(0.0)), 1
    if policy.model.dtype == torch.bfloat16:
        workers, replays = workers + ways, 1 + len(Rival)
    return 2.0 * policy.num_parameters * workers * (answer + replays * (answer + mean(prompts)))
