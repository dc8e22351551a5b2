"""The state of a training run: what a checkpoint holds, opened from the newest one or from the start.

`shoal train` and the trainer of a swarm share it, so that both resume with the same bits.
"""

import logging
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shoal.config.run import RunConfig
from shoal.learner.checkpoint import (
    Weights,
    load_trained_policy,
    load_versions,
    prune_checkpoints,
    read_state,
    restore_learner,
    save_checkpoint,
)
from shoal.learner.learner import Learner
from shoal.policy.lora import attach_adapters
from shoal.policy.model import Policy
from shoal.seeds import derive_seed
from shoal.train.sft import load_start

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainState:
    """The version after `step`, its learner, and the weights of older versions still needed for sampling.

    With adapters, the weights of a version are those of its adapters.
    """

    step: int
    policy: Policy
    learner: Learner
    versions: OrderedDict[int, Weights]


def open_state(config: RunConfig, checkpoint: Path | None) -> TrainState:
    """The state in a checkpoint, or the state before the first step."""
    lora = config.policy.lora
    needs_reference = config.learner.loss.kl > 0 and not lora.rank  # the base of adapters is itself the reference
    if checkpoint is None:
        policy = load_start(config)
        if lora.rank:
            attach_adapters(policy.model, lora, config.seed)
        torch.manual_seed(derive_seed("torch", config.seed))  # nothing draws from it, but its state is in checkpoints
        reference = deepcopy(policy.model) if needs_reference else None
        return TrainState(0, policy, _build_learner(config, policy, reference), OrderedDict())
    saved = read_state(checkpoint)
    logger.info(f"resuming after step {saved.step}")
    policy = load_trained_policy(checkpoint, config.policy)
    # From here on the starting policy is only a reference, which is needed only with a KL term.
    reference = load_start(config).model if needs_reference else None
    learner = _build_learner(config, policy, reference)
    restore_learner(learner, checkpoint, saved)
    return TrainState(saved.step, policy, learner, OrderedDict(load_versions(checkpoint)))


def save_state(folder: Path, state: TrainState, keep: int) -> None:
    """Write a checkpoint, and remove all but the newest `keep`."""
    older = {version: weights for version, weights in state.versions.items() if version != state.step}
    save_checkpoint(folder, state.step, state.policy, state.learner, older)
    prune_checkpoints(folder, keep)


def _build_learner(config: RunConfig, policy: Policy, reference: PreTrainedModel | None) -> Learner:
    frozen = None if reference is None else reference.eval()
    return Learner(
        policy.model,
        config.learner,
        max_tokens=config.engine.max_tokens,
        reference=frozen,
        length=config.length,
    )
