"""Exact checkpoints: a resumed run computes the same weights, bit for bit, as one that was never interrupted.

    checkpoints/step-000010/
      policy/                   Hugging Face folder of v10
      optimizer.safetensors     AdamW moments and counters by parameter name, torch's random state
      optimizer/                the same of a learner in several ranks, each file the rows of one rank
      versions/v000009.safetensors ...   older versions that the sampler still needs (async level > 0)
      state.json                step, updates, hash of every other file; written last

Tasks and seeds derive from the step, so the step is the data position. Folders appear under their name only when
complete, and are used only if every file matches its hash; nothing is pickled.

Both forms open with any number of ranks; with the same number as before the state has the same bits. Ranks write
`optimizer/` with torch's distributed checkpoint (DCP), in the background: `SavingCheckpoint` copies the state, and is
finished one training step later.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from shoal.config.run import PolicyConfig
from shoal.errors import ConfigError
from shoal.learner.learner import Learner
from shoal.learner.parallel import ONE, Ranks, first_row, own_rows
from shoal.learner.sharded import Weights, shared_dir, write_rows
from shoal.policy.model import Policy, reopen_policy, save_policy
from shoal.util.files import atomic_dir, hash_file, remove_dir

_NAME = re.compile(r"step-(\d{6,})")
_VERSION_NAME = re.compile(r"v(\d+)\.safetensors")
_ROW_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTS = (*_ROW_MOMENTS, "step")
_RNG = "rng.torch"
_OPTIMIZER, _OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The part of a checkpoint that is not tensors."""

    step: int
    num_updates: int
    sha256: Mapping[str, str]
    """hash of every other file, by its path in the folder; that of policy/model.safetensors names the version"""


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by ascending step."""
    return sorted((int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def find_newest(folder: Path) -> Path | None:
    """The checkpoint to resume from, if there is one."""
    found = list_checkpoints(folder)
    return found[-1][1] if found else None


def save_checkpoint(folder: Path, step: int, policy: Policy, learner: Learner, versions: Mapping[int, Weights]) -> None:
    """Write the state after `step`; `versions` are older weights that later steps will sample with."""
    with atomic_dir(folder / f"step-{step:06d}") as target:
        save_policy(policy, target / "policy")
        save_optimizer(learner.model, learner.optimizer, target / _OPTIMIZER)
        (target / "versions").mkdir()
        for version, weights in versions.items():
            save_file(weights, target / "versions" / f"v{version:06d}.safetensors")
        state = CheckpointState(step, learner.num_updates, hash_files(target))
        (target / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")


class SavingCheckpoint:
    """A checkpoint of several ranks that is being written; every rank has one and finishes it at the same point."""

    def __init__(
        self, folder: Path, step: int, policy: Policy, learner: Learner, versions: Mapping[int, Weights]
    ) -> None:
        """Write the weights, copy the optimizer state, and begin to write that in the background."""
        self._ranks, self._step, self._num_updates = learner.ranks, step, learner.num_updates
        self._stack = ExitStack()
        self._target = self._stack.enter_context(shared_dir(folder / f"step-{step:06d}", self._ranks))
        write_rows(policy, self._target / "policy", self._ranks)
        if self._ranks.is_first:
            (self._target / "versions").mkdir()
            for version, weights in versions.items():
                save_file(weights, self._target / "versions" / f"v{version:06d}.safetensors")
        self._saving = start_saving(learner.model, learner.optimizer, self._target / _OPTIMIZER_FOLDER, self._ranks)

    def finish(self) -> None:
        """Wait until all ranks have written their rows, and give the folder its name."""
        with self._stack:
            self._saving.result()
            self._ranks.barrier()
            if self._ranks.is_first:
                state = CheckpointState(self._step, self._num_updates, hash_files(self._target))
                (self._target / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")


def read_state(checkpoint: Path, *, is_checked: bool = True) -> CheckpointState:
    """Step and counters of a checkpoint, after checking the hash of every file; one of several ranks does that."""
    try:
        state = CheckpointState(**json.loads((checkpoint / _STATE).read_text()))
        complete = f"step-{state.step:06d}" == checkpoint.name and isinstance(state.sha256, dict)
    except (OSError, ValueError, TypeError):
        complete = False
    if not complete:
        raise refuse_checkpoint(checkpoint, _STATE, "is missing or damaged")
    if is_checked:
        check_files(checkpoint, state.sha256)
    return state


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files}


def check_files(checkpoint: Path, hashes: Mapping[str, str]) -> None:
    """Raise if the files of a checkpoint do not match `hash_files`."""
    for name, digest in hashes.items():
        if not (checkpoint / name).is_file():
            raise refuse_checkpoint(checkpoint, name, "is missing")
        if hash_file(checkpoint / name) != digest:
            raise refuse_checkpoint(checkpoint, name, "does not match its hash")


def refuse_checkpoint(checkpoint: Path, name: str, problem: str) -> ConfigError:
    """The error for a damaged file of a checkpoint, with what to do."""
    return ConfigError(f"{checkpoint / name}: {problem}; remove {checkpoint} to resume from an earlier checkpoint")


def load_versions(checkpoint: Path) -> dict[int, Weights]:
    """Older weights by version."""
    files = (checkpoint / "versions").glob("*.safetensors")
    found = {int(match[1]): path for path in files if (match := _VERSION_NAME.fullmatch(path.name))}
    return {version: load_file(found[version]) for version in sorted(found)}


def load_checkpoint_policy(checkpoint: Path, config: PolicyConfig) -> Policy:
    """The policy of a checkpoint."""
    return reopen_policy(checkpoint / "policy", config)


def restore_learner(learner: Learner, checkpoint: Path, state: CheckpointState) -> None:
    """Restore the optimizer state of a learner whose model already has the checkpoint's weights."""
    load_optimizer(learner.model, learner.optimizer, checkpoint / _OPTIMIZER, learner.ranks)
    learner.num_updates = state.num_updates


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, ranks: Ranks = ONE) -> None:
    """Write AdamW's state by parameter name, and torch's random state; ranks write a folder without the suffix."""
    if ranks.mesh is not None:
        start_saving(model, optimizer, path.with_suffix(""), ranks).result()
        return
    save_file(_name_state(model, optimizer), path)


def start_saving(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, ranks: Ranks) -> "Future[Any]":
    """Copy the optimizer state of all ranks, and write it in the background; the result is None when it is written."""
    state = _name_state(model, optimizer)
    rows = {name: tensor if tensor.dim() else tensor.reshape(1) for name, tensor in state.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    saving = async_save(rows, storage_writer=writer, process_group=ranks.saving)
    assert isinstance(saving, Future), "without a stager of ours the copies are made before it returns"
    return saving


def _name_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Weights:
    tensors: Weights = {_RNG: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = tensor
    return tensors


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, ranks: Ranks = ONE) -> None:
    """Read what `save_optimizer` wrote, with any number of ranks."""
    if not path.exists():
        tensors = _read_folder(model, path.with_suffix(""), ranks)
    else:
        tensors = load_file(path) if ranks.mesh is None else _read_rows(model, path)
    state = {
        index: {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
        for index, (name, _) in enumerate(model.named_parameters())
        if f"step.{name}" in tensors
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors[_RNG])


def _read_rows(model: nn.Module, path: Path) -> Weights:
    """The rows of this rank from a file of whole tensors."""
    with safe_open(path, "pt") as file:
        found = set(file.keys())
        tensors: Weights = {_RNG: file.get_tensor(_RNG)}
        for name, parameter in model.named_parameters():
            if f"step.{name}" not in found:
                continue
            tensors[f"step.{name}"] = file.get_tensor(f"step.{name}")
            for moment in _ROW_MOMENTS:
                tensors[f"{moment}.{name}"] = blank = torch.zeros_like(parameter, requires_grad=False)
                own, first = own_rows(blank), first_row(parameter)
                own.copy_(file.get_slice(f"{moment}.{name}")[first : first + len(own)])
    return tensors


def _read_folder(model: nn.Module, folder: Path, ranks: Ranks) -> Weights:
    """The rows of this rank from a folder that any number of ranks wrote."""
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    tensors: Weights = {_RNG: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        if f"step.{name}" in found:
            tensors |= {f"{moment}.{name}": torch.zeros_like(parameter, requires_grad=False) for moment in _ROW_MOMENTS}
            tensors[f"step.{name}"] = torch.zeros(1)
    load(tensors, storage_reader=reader, process_group=ranks.saving, no_dist=ranks.mesh is None)
    return {name: tensor[0] if name.startswith("step.") else tensor for name, tensor in tensors.items()}


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest."""
    for _, path in list_checkpoints(folder)[:-keep]:
        remove_dir(path)
