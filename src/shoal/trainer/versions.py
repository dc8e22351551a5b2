"""The versions that a trainer wrote, each an ordinary Hugging Face folder.

    <run>/versions/v000012/           appears whole; never written again, for the origin serves its files from here
    <run>/versions/published.jsonl    one line per version that was handed over: its hashes, before it is announced

Invariants:
- a step that is computed again must give the bits that are there already; other bits are a `TrainerError`;
- a folder stays while the origin serves it, until it is announced, and until it was evaluated if it is to be.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from shoal.config import RunConfig
from shoal.files import append_line, atomic_dir, hash_file, remove_dir, repair_jsonl, sweep_leftovers
from shoal.policy.model import Policy, save_policy
from shoal.trainer.errors import TrainerError

_NAME = re.compile(r"v(\d{6,})")
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Record:
    """A version that the origin has."""

    version: int
    weights: str
    """SHA-256 of model.safetensors"""
    root: str
    manifest: str
    batch: str
    """hash of the batch it was trained on; empty for v0"""


class Versions:
    """The folder of a run's versions. One process writes to it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(folder)
        self.folder = folder
        self._log = folder / "published.jsonl"
        repair_jsonl(self._log)
        self._records = _read_records(self._log)

    @property
    def records(self) -> Mapping[int, Record]:
        """What was handed over, by version; of one that was handed over twice, the last."""
        return self._records

    def path_of(self, version: int) -> Path:
        """The folder of a version, whether it is there or not."""
        return path_of(self.folder, version)

    def list_versions(self) -> list[int]:
        """Versions that are there, ascending."""
        return list_versions(self.folder)

    def write(self, version: int, policy: Policy) -> None:
        """Write a version; where it is there already, check that it is this one. Blocking."""
        path = self.path_of(version)
        if not path.exists():
            with atomic_dir(path) as target:
                save_policy(policy, target)
        elif not _is_equal(path / _WEIGHTS, policy):
            raise _say_other(version, str(path))
        record = self._records.get(version)
        if record is not None and record.weights != self.hash_weights(version):
            raise _say_other(version, str(self._log))

    def hash_weights(self, version: int) -> str:
        """SHA-256 of a version's weights. Blocking."""
        return hash_file(self.path_of(version) / _WEIGHTS)

    def record(self, record: Record) -> None:
        """Note that a version was handed over; on disk when this returns."""
        if self._records.get(record.version) != record:
            append_line(self._log, json.dumps(asdict(record)))
            self._records[record.version] = record

    def prune(self, *, below: int, served: Iterable[int], awaited: Iterable[int]) -> None:
        """Remove versions below `below` that are neither served nor awaited by the evaluator. Blocking."""
        kept = {*served, *awaited}
        for version in self.list_versions():
            if version < below and version not in kept:
                remove_dir(self.path_of(version))


def path_of(folder: Path, version: int) -> Path:
    """The folder of a version."""
    return folder / f"v{version:06d}"


def list_versions(folder: Path) -> list[int]:
    """Versions that are in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def list_due(config: RunConfig) -> list[int]:
    """The versions that are evaluated: the first, every `eval.every`-th, the last."""
    every = config.eval.every
    between = range(every, config.steps, every) if every else ()
    return sorted({0, *between, config.steps})


def _is_equal(path: Path, policy: Policy) -> bool:
    weights = policy.model.state_dict()
    return all(torch.equal(weights[name], tensor) for name, tensor in load_file(path).items())


def _read_records(path: Path) -> dict[int, Record]:
    if not path.exists():
        return {}
    try:
        records = [Record(**json.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError):
        raise TrainerError(f"{path}: cannot be read; move it away to publish from what the ledger says") from None
    return {record.version: record for record in records}


def _say_other(version: int, where: str) -> TrainerError:
    return TrainerError(
        f"v{version} was computed again with other weights than those of {where}: the settings, the number of threads "
        "or a library changed; go on as it was begun, or start another run"
    )
