"""The versions that a trainer wrote, each an ordinary Hugging Face folder, or an adapter over v0 (policy/adapter.py).

    <run>/versions/v000012/           complete if there is no v000012.writing; then never written again
    <run>/versions/v000012.writing    while it is written: its files, which the origin serves as they appear
    <run>/versions/published.jsonl    one line per version handed over: its hashes, before it is announced
    <run>/versions/written.jsonl      one line per version written: the devices that computed it

Invariants:
- a step that is computed again by the same number of the same devices must give the bits that exist already, after
  rounding to the published type; other bits are a `TrainerError`. Other devices, or another number, round differently:
  then the first version stands, and the trainer continues from its weights;
- a folder is kept while the origin serves it, until it is announced, and until it is evaluated if that is due; v0 as
  long as there are adapters over it.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.config.run import PolicyConfig, RunConfig
from shoal.errors import TrainerError
from shoal.policy.adapter import is_adapter
from shoal.shardcast.growing import list_growing, open_growing, remove_stale
from shoal.shardcast.origin import SHARD_BYTES, compute_root
from shoal.train.resume import TrainState
from shoal.util.files import append_line, remove_dir, repair_jsonl, sweep_leftovers

logger = logging.getLogger(__name__)

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
        remove_stale(folder)
        self.folder = folder
        self._log = folder / "published.jsonl"
        repair_jsonl(self._log)
        self._records = _read_records(self._log)
        self._kinds_log = folder / "written.jsonl"
        repair_jsonl(self._kinds_log)
        self._kinds = _read_kinds(self._kinds_log)

    @property
    def records(self) -> Mapping[int, VersionRecord]:
        """Versions handed over, by number; if one was handed over twice, the last record."""
        return self._records

    def path_of(self, version: int) -> Path:
        """The folder of a version, whether it exists or not."""
        return path_of(self.folder, version)

    def write(self, version: int, state: TrainState, begun: Callable[[], None] = lambda: None) -> None:
        """Write the current weights as a version; if it exists already, see above. Blocking.

        `begun` is called as soon as the origin can begin to publish it, while its weights are still being written.
        """
        path, record = self.path_of(version), self._records.get(version)
        if path.exists():
            self._compare(version, state)
            begun()
            return
        self._write_folder(version, state, (lambda: None) if record else begun)
        if record is not None:
            if record.root != compute_root(path, record.shard_bytes):
                self._check_kind(version, state, str(self._log))
                remove_dir(path)
                logger.warning(f"{self._explain(version, state)}; it is not here any more, so only later ones count")
            begun()

    def _compare(self, version: int, state: TrainState) -> None:
        path = self.path_of(version)
        if not state.matches(path, self._dtype):
            self._check_kind(version, state, str(path))
            logger.warning(f"{self._explain(version, state)}; continuing from the weights in {path}")
            state.read(path)

    def _write_folder(self, version: int, state: TrainState, begun: Callable[[], None]) -> None:
        with open_growing(self.path_of(version)) as announce:

            def start(sizes: Mapping[str, int]) -> None:
                if version not in self._kinds:  # before anybody can see the version
                    self._kinds[version] = state.ranks.kind
                    append_line(self._kinds_log, json.dumps({"version": version, "devices": state.ranks.kind}))
                announce(sizes)
                begun()

            state.write(self.path_of(version), self._dtype, self._shard_bytes, is_base=version == 0, begun=start)

    def _check_kind(self, version: int, state: TrainState, where: str) -> None:
        """Raise if these devices should have computed the same bits."""
        if self._kinds.get(version, state.ranks.kind) == state.ranks.kind:
            raise _report_mismatch(version, where)

    def _explain(self, version: int, state: TrainState) -> str:
        words = f"{self._kinds[version]}, which rounds differently than {state.ranks.kind}"
        return f"v{version} was first computed on {words}"

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
    """Complete versions in a folder, ascending."""
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()} - list_growing(folder)
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def list_due(config: RunConfig) -> list[int]:
    """The versions to evaluate: the first, every `eval.every`-th, the last."""
    every = config.eval.every
    between = range(every, config.steps, every) if every else ()
    return sorted({0, *between, config.steps})


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


def _read_kinds(path: Path) -> dict[int, str]:
    """The devices that computed each version; the first line counts, because the first version stands."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {int(line["version"]): str(line["devices"]) for line in reversed(lines)}


def _report_mismatch(version: int, where: str) -> TrainerError:
    return TrainerError(
        f"v{version} was computed again with different weights than {where}: the settings, the number of threads "
        "or a library changed; continue with the original ones, or start another run"
    )
