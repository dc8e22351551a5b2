"""Checkpoints of a peer, and of the group of a local run. A resumed run computes the same bits.

    checkpoints/step-000100/
      outer.bin                     outer state, as sent to a new peer
      reducer.safetensors           what the codec of the aggregate lost so far, by fragment
      peers/NAME/weights.safetensors      a peer's weights between rounds and what its codec lost, by fragment
      peers/NAME/optimizer.safetensors    its inner optimizer, by parameter name
      state.json                    counters, and the hash of every other file; written last

Only a settled peer is restored completely: nothing in flight, no step since the last round. For any other peer only the
inner optimizer is restored; its steps that are in no round are repeated.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shoal.diloco.inner import InnerModel
from shoal.diloco.peer import FragmentCounts, Peer
from shoal.diloco.state import OuterState, StateError, decode_state, encode_state
from shoal.errors import ConfigError
from shoal.learner.checkpoint import (
    check_files,
    hash_files,
    prune_checkpoints,
    refuse_checkpoint,
)
from shoal.util.files import atomic_dir

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A peer with the model that it trains."""

    peer: Peer
    inner: InnerModel


def save_peers(
    run: Path,
    state: OuterState,
    residuals: Mapping[int, np.ndarray | None],
    members: Mapping[str, PeerModel],
    *,
    keep: int,
) -> None:
    """Write a checkpoint of all peers right after a round, and remove all but the newest `keep` of the run."""
    with atomic_dir(run / "checkpoints" / f"step-{state.step:06d}") as target:
        (target / "outer.bin").write_bytes(encode_state(state))
        save_file(_name_arrays("residual", dict(residuals)), target / "reducer.safetensors")
        counts = {}
        for name, member in members.items():
            assert _NAME.fullmatch(name), "invalid name for a folder"
            _save_member(target / "peers" / name, member)
            counts[name] = [[count.tokens, count.steps] for count in member.peer.counts]
        settled = sorted(name for name, member in members.items() if member.peer.is_settled)
        counters = {"step": state.step, "tallies": counts, "settled": settled, "sha256": hash_files(target)}
        text = json.dumps(counters, indent=2)
        (target / _STATE).write_text(f"{text}\n")
    prune_checkpoints(run / "checkpoints", keep)


def load_outer(checkpoint: Path, sizes: tuple[int, ...]) -> tuple[OuterState, dict[int, np.ndarray | None]]:
    """Load the outer state and the aggregate's residuals, after checking every file of the checkpoint."""
    _read_counters(checkpoint)
    try:
        state = decode_state((checkpoint / "outer.bin").read_bytes(), sizes)
    except StateError as error:
        raise ConfigError(f"{checkpoint / 'outer.bin'}: {error}; was the model changed?") from None
    found = load_file(checkpoint / "reducer.safetensors")
    return state, {index: found.get(f"residual.{index}") for index in range(len(sizes))}


def was_settled(checkpoint: Path, name: str) -> bool:
    """Whether a peer had nothing in flight when it was saved."""
    return name in _read_counters(checkpoint)["settled"]


def restore_member(checkpoint: Path, member: PeerModel) -> None:
    """Restore the weights, residuals, counters and inner optimizer of a new peer."""
    peer, folder = member.peer, checkpoint / "peers" / member.peer.name
    counts = _read_counters(checkpoint)["tallies"][peer.name]
    arrays = load_file(folder / "weights.safetensors")
    for index, (tokens, steps) in enumerate(counts):
        peer.fragments.write(index, arrays[f"weights.{index}"])
        peer.counts[index] = FragmentCounts(tokens, steps, residual=arrays.get(f"residual.{index}"))
    member.inner.load_optimizer(folder / "optimizer.safetensors")


def _save_member(folder: Path, member: PeerModel) -> None:
    folder.mkdir(parents=True)
    peer = member.peer
    weights = {index: peer.fragments.read(index) for index in range(len(peer.counts))}
    residuals = {index: count.residual for index, count in enumerate(peer.counts)}
    arrays = _name_arrays("weights", weights) | _name_arrays("residual", residuals)
    save_file(arrays, folder / "weights.safetensors")
    member.inner.save_optimizer(folder / "optimizer.safetensors")


def _name_arrays(kind: str, arrays: Mapping[int, np.ndarray | None]) -> dict[str, np.ndarray]:
    return {f"{kind}.{index}": np.ascontiguousarray(array) for index, array in arrays.items() if array is not None}


def _read_counters(checkpoint: Path) -> dict[str, Any]:
    try:
        counters: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        hashes = dict(counters["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        raise refuse_checkpoint(checkpoint, _STATE, "is missing or damaged") from None
    check_files(checkpoint, hashes)
    return counters
