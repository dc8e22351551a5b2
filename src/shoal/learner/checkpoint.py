"""Exact checkpoints: a resumed run computes the same weights, bit for bit, as one that was never interrupted.

    checkpoints/step-000010/
      policy/                   Hugging Face folder of v10; with adapters only these, in peft's format
      optimizer.safetensors     AdamW moments and counters by parameter name, torch's random state
      versions/v000009.safetensors ...   older versions that the sampler still needs (async level > 0)
      state.json                step, updates, hash of every other file; written last
    checkpoints/v000000/        with adapters: Hugging Face folder of their base, written once

Tasks and seeds derive from the step, so the step is the data position. Folders appear under their name only when
complete, and are used only if every file matches its hash; nothing is pickled.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.config.run import PolicyConfig
from shoal.errors import ConfigError
from shoal.learner.learner import Learner, list_trained
from shoal.policy.adapter import read_adapter
from shoal.policy.lora import attach_adapters, find_adapted, load_adapters
from shoal.policy.model import Policy, reopen_policy, save_policy, save_trained
from shoal.util.files import atomic_dir, hash_file, remove_dir

_NAME = re.compile(r"step-(\d{6,})")
_VERSION_NAME = re.compile(r"v(\d+)\.safetensors")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_RNG = "rng.torch"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_BASE = "v000000"

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The part of a checkpoint that is not tensors."""

    step: int
    num_updates: int
    sha256: Mapping[str, str]
    """hash of every other file, by its path from the folder"""


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by ascending step."""
    return sorted((int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def find_newest(folder: Path) -> Path | None:
    """The checkpoint to resume from, if there is one."""
    found = list_checkpoints(folder)
    return found[-1][1] if found else None


def save_checkpoint(folder: Path, step: int, policy: Policy, learner: Learner, versions: Mapping[int, Weights]) -> None:
    """Write the state after `step`; `versions` are older weights that later steps will sample with."""
    base = _save_base(folder, policy) if find_adapted(policy.model) else {}
    with atomic_dir(folder / f"step-{step:06d}") as target:
        save_trained(policy, target / "policy")
        save_optimizer(learner.model, learner.optimizer, target / _OPTIMIZER)
        (target / "versions").mkdir()
        for version, weights in versions.items():
            save_file(weights, target / "versions" / f"v{version:06d}.safetensors")
        state = CheckpointState(step, learner.num_updates, hash_files(target) | base)
        (target / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")


def _save_base(folder: Path, policy: Policy) -> dict[str, str]:
    """Write the base of adapters once; the hashes of its files, by their paths from a checkpoint."""
    base, newest = folder / _BASE, find_newest(folder)
    if newest is not None:
        known = json.loads((newest / _STATE).read_text())["sha256"]
        return {name: digest for name, digest in known.items() if name.startswith(f"../{_BASE}/")}
    with atomic_dir(base) as target:
        save_policy(policy, target)
    return {f"../{_BASE}/{name}": digest for name, digest in hash_files(base).items()}


def read_state(checkpoint: Path) -> CheckpointState:
    """Step and counters of a checkpoint, after checking the hash of every file."""
    try:
        state = CheckpointState(**json.loads((checkpoint / _STATE).read_text()))
        complete = f"step-{state.step:06d}" == checkpoint.name and isinstance(state.sha256, dict)
    except (OSError, ValueError, TypeError):
        complete = False
    if not complete:
        raise refuse_checkpoint(checkpoint, _STATE, "is missing or damaged")
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
    """The policy of a checkpoint, as it is evaluated: without adapters."""
    return reopen_policy(checkpoint / "policy", config)


def load_trained_policy(checkpoint: Path, config: PolicyConfig) -> Policy:
    """The policy of a checkpoint, as it is trained: with the adapters of the settings, if there are any."""
    if not config.lora.rank:
        return load_checkpoint_policy(checkpoint, config)
    policy = reopen_policy(checkpoint.parent / _BASE, config)
    attach_adapters(policy.model, config.lora, seed=0)  # replaced at once
    load_adapters(policy.model, read_adapter(checkpoint / "policy").weights)
    return policy


def restore_learner(learner: Learner, checkpoint: Path, state: CheckpointState) -> None:
    """Restore the optimizer state of a learner whose model already has the checkpoint's weights."""
    load_optimizer(learner.model, learner.optimizer, checkpoint / _OPTIMIZER)
    learner.num_updates = state.num_updates


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write AdamW's state by parameter name, and torch's random state."""
    tensors: Weights = {_RNG: torch.get_rng_state()}
    for name, parameter in list_trained(model).items():
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = tensor
    save_file(tensors, path)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read what `save_optimizer` wrote."""
    tensors = load_file(path)
    state = {
        index: {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
        for index, name in enumerate(list_trained(model))
        if f"step.{name}" in tensors
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors[_RNG])


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest."""
    for _, path in list_checkpoints(folder)[:-keep]:
        remove_dir(path)
