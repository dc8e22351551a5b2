"""Checkpoints of a peer, and of the group of a local run: what is resumed computes the same bits.

    checkpoints/step-000100/
      outer.bin                     outer state, as it goes to a newcomer
      reducer.safetensors           what the codec of the aggregate lost so far, by fragment
      peers/NAME/weights.safetensors      a peer's weights between rounds and what its codec lost, by fragment
      peers/NAME/optimizer.safetensors    its inner optimizer, by parameter name
      state.json                    counters, and the hash of every other file; written last

Whole comes back only a settled peer: nothing on its way, no step since the last round. Of another one the inner
optimizer does; its steps that are in no round are made again.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from shoal.diloco.peer import Peer, Tally
from shoal.diloco.state import OuterState, StateError, decode_state, encode_state
from shoal.errors import ConfigError
from shoal.files import atomic_dir, hash_file
from shoal.learner.checkpoint import load_optimizer, save_optimizer

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Member:
    """A peer with the model that it trains."""

    peer: Peer
    model: torch.nn.Module


def save_crew(
    folder: Path, state: OuterState, residuals: Mapping[int, np.ndarray | None], crew: Mapping[str, Member]
) -> Path:
    """Write a checkpoint of all peers right after a round."""
    path = folder / f"step-{state.step:06d}"
    with atomic_dir(path) as target:
        (target / "outer.bin").write_bytes(encode_state(state))
        save_file(_name_arrays("residual", dict(residuals)), target / "reducer.safetensors")
        tallies = {}
        for name, member in crew.items():
            assert _NAME.fullmatch(name), "a name fit for a folder"
            _save_member(target / "peers" / name, member)
            tallies[name] = [[tally.tokens, tally.steps] for tally in member.peer.tallies]
        hashes = {p.relative_to(target).as_posix(): hash_file(p) for p in sorted(target.rglob("*")) if p.is_file()}
        settled = sorted(name for name, member in crew.items() if member.peer.is_settled)
        counters = {"step": state.step, "tallies": tallies, "settled": settled, "sha256": hashes}
        text = json.dumps(counters, indent=2)
        (target / _STATE).write_text(f"{text}\n")
    return path


def load_outer(checkpoint: Path, sizes: tuple[int, ...]) -> tuple[OuterState, dict[int, np.ndarray | None]]:
    """The outer state and the aggregate's residuals, after checking every file of the checkpoint."""
    _read_counters(checkpoint)
    try:
        state = decode_state((checkpoint / "outer.bin").read_bytes(), sizes)
    except StateError as error:
        raise ConfigError(f"{checkpoint / 'outer.bin'}: {error}; was the model changed?") from None
    found = load_file(checkpoint / "reducer.safetensors")
    return state, {index: found.get(f"residual.{index}") for index in range(len(sizes))}


def was_settled(checkpoint: Path, name: str) -> bool:
    """Whether a peer had nothing on its way when it was saved."""
    return name in _read_counters(checkpoint)["settled"]


def restore_member(checkpoint: Path, member: Member) -> None:
    """Give a new peer its weights, residuals, counters and inner optimizer back."""
    peer, folder = member.peer, checkpoint / "peers" / member.peer.name
    tallies = _read_counters(checkpoint)["tallies"][peer.name]
    arrays = load_file(folder / "weights.safetensors")
    for index, (tokens, steps) in enumerate(tallies):
        peer.fragments.write(index, arrays[f"weights.{index}"])
        peer.tallies[index] = Tally(tokens, steps, residual=arrays.get(f"residual.{index}"))
    load_optimizer(member.model, peer.inner, folder / "optimizer.safetensors")


def _save_member(folder: Path, member: Member) -> None:
    folder.mkdir(parents=True)
    peer = member.peer
    weights = {index: peer.fragments.read(index) for index in range(len(peer.tallies))}
    residuals = {index: tally.residual for index, tally in enumerate(peer.tallies)}
    arrays = _name_arrays("weights", weights) | _name_arrays("residual", residuals)
    save_file(arrays, folder / "weights.safetensors")
    save_optimizer(member.model, peer.inner, folder / "optimizer.safetensors")


def _name_arrays(kind: str, arrays: Mapping[int, np.ndarray | None]) -> dict[str, np.ndarray]:
    return {f"{kind}.{index}": np.ascontiguousarray(array) for index, array in arrays.items() if array is not None}


def _read_counters(checkpoint: Path) -> dict[str, Any]:
    way_out = f"remove {checkpoint} to resume from an earlier checkpoint"
    try:
        counters: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        hashes = dict(counters["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"{checkpoint / _STATE}: is missing or damaged; {way_out}") from None
    for name, digest in hashes.items():
        path = checkpoint / name
        if not path.is_file() or hash_file(path) != digest:
            raise ConfigError(f"{path}: is missing or not what was written; {way_out}")
    return counters
