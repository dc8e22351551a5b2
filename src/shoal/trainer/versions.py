"""The versions that a trainer wrote, each an ordinary Hugging Face folder, or an adapter over v0 (policy/adapter.py).

    <run>/versions/v000012/           appears complete; never written again, because the origin serves its files
    <run>/versions/published.jsonl    one line per version handed over: its hashes, before it is announced

Invariants:
- a step that is computed again must give the bits that exist already; other bits are a `TrainerError`;
- a folder is kept while the origin serves it, until it is announced, and until it is evaluated if that is due; v0 as
  long as there are adapters over it.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.config.run import PolicyConfig, RunConfig
from shoal.policy.adapter import is_adapter, read_adapter
from shoal.policy.lora import adapter_weights
from shoal.policy.model import Policy, save_policy, save_trained, saved_tensors
from shoal.policy.weights import WeightsReader, describe_tensors
from shoal.shardcast.origin import SHARD_BYTES, compute_root
from shoal.trainer.errors import TrainerError
from shoal.util.files import append_line, atomic_dir, remove_dir, repair_jsonl, sweep_leftovers

_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version that the origin has."""

    version: int
    root: str
    """hash over its files, computed by the origin"""
    manifest: str
    batch: str
    """hash of the batch it was trained on; empty for v0"""
    shard_bytes: int = SHARD_BYTES
    """size of the shards that the root hash covers"""


class Versions:
    """The folder of a run's versions. One process writes to it."""

    def __init__(self, folder: Path, config: PolicyConfig | None = None) -> None:
        """`config` says in which type and in how large files versions are written."""
        config = config or PolicyConfig()
        self._dtype, self._shard_bytes = getattr(torch, config.publish_dtype), config.shard_bytes
        folder.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(folder)
        self.folder = folder
        self._log = folder / "published.jsonl"
        repair_jsonl(self._log)
        self._records = _read_records(self._log)

    @property
    def records(self) -> Mapping[int, VersionRecord]:
        """Versions handed over, by number; if one was handed over twice, the last record."""
        return self._records

    def path_of(self, version: int) -> Path:
        """The folder of a version, whether it exists or not."""
        return path_of(self.folder, version)

    def write(self, version: int, policy: Policy) -> None:
        """Write a version; if it exists already, check that it is the same. Blocking."""
        path, record = self.path_of(version), self._records.get(version)
        if path.exists():
            if not _is_equal(path, policy, self._dtype):
                raise _report_mismatch(version, str(path))
            return
        with atomic_dir(path) as target:
            save = save_trained if version else save_policy
            save(policy, target, dtype=self._dtype, shard_bytes=self._shard_bytes)
        if record is not None and record.root != compute_root(path, record.shard_bytes):
            raise _report_mismatch(version, str(self._log))

    def record(self, record: VersionRecord) -> None:
        """Record that a version was handed over; on disk when this returns."""
        if self._records.get(record.version) != record:
            append_line(self._log, json.dumps(asdict(record)))
            self._records[record.version] = record

    def prune(self, below: int, needed: Collection[int]) -> None:
        """Remove versions below `below` that are not needed. Blocking."""
        found = list_versions(self.folder)
        if any(is_adapter(self.path_of(version)) for version in found):
            needed = {*needed, 0}
        for version in found:
            if version < below and version not in needed:
                remove_dir(self.path_of(version))


def path_of(folder: Path, version: int) -> Path:
    """The folder of a version."""
    return folder / f"v{version:06d}"


def list_versions(folder: Path) -> list[int]:
    """Versions in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def list_due(config: RunConfig) -> list[int]:
    """The versions to evaluate: the first, every `eval.every`-th, the last."""
    every = config.eval.every
    between = range(every, config.steps, every) if every else ()
    return sorted({0, *between, config.steps})


def _is_equal(folder: Path, policy: Policy, dtype: torch.dtype) -> bool:
    """Whether a folder holds the adapters, or the weights rounded to the published type."""
    if is_adapter(folder):
        found, own = read_adapter(folder).weights, adapter_weights(policy.model)
        return found.keys() == own.keys() and all(torch.equal(own[name].cpu(), found[name]) for name in own)
    weights = saved_tensors(policy.model)
    with WeightsReader(folder) as reader:
        same_kind = reader.specs == {spec.name: spec for spec in describe_tensors(weights, dtype)}
        return same_kind and all(reader.is_equal(name, tensor) for name, tensor in weights.items())


def _read_records(path: Path) -> dict[int, VersionRecord]:
    if not path.exists():
        return {}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        # Earlier versions of shoal also wrote a SHA-256 of the weights.
        records = [VersionRecord(**{name: line[name] for name in line if name != "weights"}) for line in lines]
    except (ValueError, TypeError):
        raise TrainerError(f"{path}: cannot be read; move it away to resume publishing from the ledger") from None
    return {record.version: record for record in records}


def _report_mismatch(version: int, where: str) -> TrainerError:
    return TrainerError(
        f"v{version} was computed again with different weights than {where}: the settings, the number of threads "
        "or a library changed; continue with the original ones, or start another run"
    )
