"""The state of a training run: what a checkpoint holds, opened from the newest one or from the start.

`shoal train` and the trainer of a swarm share it, so that both resume with the same bits.

In several ranks every method of `TrainState` is one call that all ranks make: rank 0, which alone knows what is next,
announces it, and the others make it in `follow_calls`, which is all that they do.

    rank 0   open_state -> train, gather, write, read, save ... -> finish
    others   follow_calls
"""

import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shoal.config.run import RunConfig
from shoal.learner.checkpoint import (
    SavingCheckpoint,
    load_trained_policy,
    load_versions,
    prune_checkpoints,
    read_state,
    restore_learner,
    save_checkpoint,
)
from shoal.learner.learner import Learner, Metrics
from shoal.learner.parallel import ONE, Ranks, join_ranks, leave_ranks
from shoal.learner.sharded import Begun, Weights, gather_weights, is_equal, read_rows, write_rows, write_trained
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.seeds import derive_seed
from shoal.train.rank_calls import decode_groups, encode_groups
from shoal.train.sft import load_start, run_sft
from shoal.util.process import tune_memory, tune_process

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
    _saving: "_Saving | None" = field(default=None, repr=False)

    @property
    def ranks(self) -> Ranks:
        return self.learner.ranks

    def train(self, groups: Sequence[Group]) -> Metrics:
        """One training step; also finishes a checkpoint that was begun before it."""
        self.ranks.announce("train", payload=encode_groups(groups) if self.ranks.mesh is not None else b"")
        metrics = self.learner.train_step(groups)
        self._finish()
        return metrics

    def gather(self, dtype: torch.dtype) -> Weights:
        """Copies of all weights, on rank 0; adapters are merged in `dtype`."""
        self.ranks.announce("gather", dtype=_name_type(dtype))
        return gather_weights(self.policy.model, self.ranks, dtype)

    def write(
        self,
        folder: Path,
        dtype: torch.dtype,
        shard_bytes: int,
        *,
        is_base: bool = False,
        begun: Begun = lambda _sizes: None,
    ) -> None:
        """Write the policy as a Hugging Face folder, or its adapters, unless it is the base of later adapters.

        `begun` is called before the weights are written.
        """
        name = _name_type(dtype)
        self.ranks.announce("write", folder=str(folder), dtype=name, shard_bytes=shard_bytes, is_base=is_base)
        write = write_rows if is_base else write_trained
        write(self.policy, folder, self.ranks, dtype=dtype, shard_bytes=shard_bytes, begun=begun)

    def matches(self, folder: Path, dtype: torch.dtype) -> bool:
        """Whether a folder has the policy's weights, rounded to `dtype`, or its adapters."""
        self.ranks.announce("matches", folder=str(folder), dtype=_name_type(dtype))
        return is_equal(self.policy, folder, self.ranks, dtype)

    def read(self, folder: Path) -> None:
        """Continue with the weights, or adapters, of a folder; the optimizer state stays."""
        self.ranks.announce("read", folder=str(folder))
        read_rows(self.policy.model, folder)

    def save(self, folder: Path, keep: int) -> None:
        """Write a checkpoint, and remove all but the newest `keep`; in several ranks begin to, see `train`."""
        self.ranks.announce("save", folder=str(folder), keep=keep, step=self.step)
        self._finish()
        older = {version: weights for version, weights in self.versions.items() if version != self.step}
        if self.ranks.mesh is None:
            save_checkpoint(folder, self.step, self.policy, self.learner, older)
            prune_checkpoints(folder, keep)
        else:
            self._saving = _Saving(folder, keep, SavingCheckpoint(folder, self.step, self.policy, self.learner, older))

    def finish(self) -> None:
        """Finish the checkpoint that was begun; it is on disk when this returns."""
        self.ranks.announce("finish")
        self._finish()

    def _finish(self) -> None:
        if self._saving is not None:
            self._saving.checkpoint.finish()
            if self.ranks.is_first:
                prune_checkpoints(self._saving.folder, self._saving.keep)
            self._saving = None


@dataclass(frozen=True, slots=True)
class _Saving:
    folder: Path
    keep: int
    checkpoint: SavingCheckpoint


def open_state(config: RunConfig, checkpoint: Path | None, ranks: Ranks = ONE) -> TrainState:
    """The state in a checkpoint, or the state before the first step."""
    ranks.announce("open", config=config.model_dump_json(), checkpoint=str(checkpoint or ""))
    if checkpoint is None:
        policy = load_start(config, ranks, adapters=config.seed if config.policy.lora.rank else None)
        torch.manual_seed(derive_seed("torch", config.seed))  # nothing draws from it, but its state is in checkpoints
        reference = _open_reference(config, ranks, policy.model)
        return TrainState(0, policy, _build_learner(config, policy, reference, ranks), OrderedDict())
    saved = read_state(checkpoint, is_checked=ranks.is_first)
    if ranks.is_first:
        logger.info(f"resuming after step {saved.step}")
    policy = load_trained_policy(checkpoint, config.policy, config.learner, ranks)
    # From here on the starting policy is only a reference, which is needed only with a KL term.
    reference = _open_reference(config, ranks, None)
    learner = _build_learner(config, policy, reference, ranks)
    restore_learner(learner, checkpoint, saved)
    return TrainState(saved.step, policy, learner, OrderedDict(load_versions(checkpoint) if ranks.is_first else {}))


def run_as_rank(device: str, work: Callable[[Ranks], int], follow: Callable[[Ranks], None] | None = None) -> int:
    """Run a command: all of it in a plain process or rank 0; the other ranks only follow. Its exit code."""
    if os.environ.get("RANK", "0") != "0":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 is asked to stop, and ends the others in order
    ranks = join_ranks(device)
    code = 0
    if ranks.is_first:
        code = work(ranks)
        ranks.announce("close")
    else:
        (follow or follow_calls)(ranks)
    leave_ranks(ranks)
    return code


def follow_calls(ranks: Ranks) -> None:
    """Make the calls that rank 0 announces until it closes."""
    state: TrainState | None = None
    while True:
        name, values, payload = ranks.hear()
        if name in ("open", "sft"):
            config = RunConfig.model_validate_json(values["config"])
            tune_process(ranks.divide_threads(config.threads))
            if name == "sft":
                run_sft(config, ranks)
            else:
                state = open_state(config, Path(values["checkpoint"]) if values["checkpoint"] else None, ranks)
            continue
        if name == "close":
            return
        assert state is not None, "a state is opened first"
        _follow(state, name, values, payload)


def _follow(state: TrainState, name: str, values: dict[str, Any], payload: bytes) -> None:
    folder, dtype = Path(values.get("folder", ".")), getattr(torch, values.get("dtype", "float32"))
    match name:
        case "train":
            state.train(decode_groups(payload))
        case "gather":
            state.gather(dtype)
        case "write":
            state.write(folder, dtype, values["shard_bytes"], is_base=values["is_base"])
        case "matches":
            state.matches(folder, dtype)
        case "read":
            state.read(folder)
        case "save":
            state.step = values["step"]
            state.save(folder, values["keep"])
        case "finish":
            state.finish()
        case _:
            raise AssertionError(f"unknown call {name!r}")


def _name_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_reference(config: RunConfig, ranks: Ranks, start: PreTrainedModel | None) -> PreTrainedModel | None:
    """The frozen starting policy, if there is a KL term; a sharded model is opened again, not copied.

    The base of adapters is itself the reference.
    """
    if config.learner.loss.kl <= 0 or config.policy.lora.rank:
        return None
    return deepcopy(start) if start is not None and ranks.mesh is None else load_start(config, ranks).model


def _build_learner(config: RunConfig, policy: Policy, reference: PreTrainedModel | None, ranks: Ranks) -> Learner:
    tune_memory(policy.num_bytes)
    frozen = None if reference is None else reference.eval()
    return Learner(
        policy.model,
        config.learner,
        max_tokens=config.engine.max_tokens,
        reference=frozen,
        length=config.length,
        ranks=ranks,
    )
