"""Consistency of a finished swarm run: ledger, batches, versions and files, each compared with the others.

Nothing here relies on what a role states about itself: the right batch follows from the outcomes in the ledger, a
version's name from the bytes of its files, and the validity of the ledger from `shoal ledger verify`.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from shoal.cli import main
from shoal.coordinator.state.leases import list_batch
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import find_root
from shoal.launch.settings import LaunchConfig
from shoal.ledger.db import open_database, read_snapshot
from shoal.ledger.event import Event, EventKind
from shoal.ledger.reader import MAX_SEQ, read_events
from shoal.protocol.messages import BatchEntry, SubmissionState
from shoal.protocol.params import hash_batch, is_allowed
from shoal.train.report import read_metrics
from shoal.train.rollout_files import read_groups
from shoal.train.rundir import run_path
from shoal.trainer.versions import list_due, list_versions, path_of
from shoal.util.files import hash_file

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRecord:
    """The batches and versions in a ledger."""

    right: dict[int, list[int]]
    """by step: indices of the accepted groups with a signal when it was cut, lowest first"""
    cuts: dict[int, str]
    """by step: the hash of its batch"""
    entries: dict[int, list[BatchEntry]]
    versions: list[dict[str, Any]]
    """contents of `version.publish`, in order"""
    times: dict[int, tuple[int, int]] = field(default_factory=dict)
    """by step: when its batch was cut and its version published, in ms"""


def find_flaws(config: LaunchConfig) -> list[str]:
    """Everything that is wrong after the last step, one text each."""
    layout = SwarmPaths.of(config)
    record = read_record(layout, config)
    return [
        *_check_ledger(layout),
        *_check_batches(record, config),
        *_check_versions(record, config, layout.root),
        *_check_trained(record, config, layout.root),
    ]


def compare_alone(config: LaunchConfig, out: Path) -> list[str]:
    """Train the same run with `shoal train` and the swarm's beacons; returns differences in the final weights."""
    layout = SwarmPaths.of(config)
    secret = (layout.coordinator / "beacon.secret").read_text()
    _run_shoal("train", str(layout.run_settings), f"out={out}", f"beacon={secret}")
    alone = run_path(config.core.model_copy(update={"out": str(out)}))
    names = [f"checkpoints/step-{config.steps:06d}/{name}" for name in (f"policy/{_WEIGHTS}", "optimizer.safetensors")]
    return [f"{name}: differs from `shoal train`" for name in names if _differ(layout.root / name, alone / name)]


def read_record(layout: SwarmPaths, config: LaunchConfig) -> LedgerRecord:
    """Read a ledger that is no longer written to."""
    engine = open_database(str(layout.ledger))
    try:
        with read_snapshot(engine) as connection:
            events = list(read_events(connection, 0, MAX_SEQ))
            entries = {step: list_batch(connection, step) for step in range(1, config.steps + 1)}
    finally:
        engine.dispose()
    return _build_record(events, entries)


def _build_record(events: Sequence[Event], entries: dict[int, list[BatchEntry]]) -> LedgerRecord:
    signals: dict[int, list[int]] = {}
    record = LedgerRecord(right={}, cuts={}, entries=entries, versions=[])
    for event in events:
        content = event.content
        if event.kind == EventKind.SUB_OUTCOME and content["state"] == SubmissionState.ACCEPTED and content["fills"]:
            found = [content["first"] + place for place, signal in enumerate(content["signals"]) if signal]
            signals.setdefault(content["step"], []).extend(found)
        elif event.kind == EventKind.BATCH_CUT:
            step = content["step"]
            assert step not in record.cuts, "a batch was cut twice"
            record.cuts[step] = content["hash"]
            record.right[step] = sorted(signals.get(step, []))
            record.times[step] = event.time_ms, 0
        elif event.kind == EventKind.VERSION_PUBLISH:
            record.versions.append(content)
            if content["version"]:
                record.times[content["version"]] = record.times[content["version"]][0], event.time_ms
    return record


def _check_ledger(layout: SwarmPaths) -> Iterator[str]:
    code, said = _try_shoal("ledger", "verify", str(layout.ledger))
    if code:
        yield f"shoal ledger verify: {said}"


def _check_batches(record: LedgerRecord, config: LaunchConfig) -> Iterator[str]:
    steps = list(range(1, config.steps + 1))
    if sorted(record.cuts) != steps:
        yield f"batches were cut for steps {sorted(record.cuts)}"
        return
    for step in steps:
        found = [entry.index for entry in record.entries[step]]
        right = record.right[step]
        if found != right[: config.batch.groups] or len(set(right)) != len(right):
            yield f"step {step} has groups {found}, expected {right}"
        if hash_batch(record.entries[step]) != record.cuts[step]:
            yield f"the batch of step {step} does not match its hash"
        old = [
            entry.version for entry in record.entries[step] if not is_allowed(step, entry.version, config.async_level)
        ]
        if old:
            yield f"step {step} has groups of versions {old}"
    places = [(entry.submission, entry.place) for step in steps for entry in record.entries[step]]
    if len(set(places)) != len(places):
        yield "a group is in two batches"


def _check_versions(record: LedgerRecord, config: LaunchConfig, root: Path) -> Iterator[str]:
    """The versions in the ledger are those of the folders, and the last folder is the policy of the last checkpoint."""
    numbers = [content["version"] for content in record.versions]
    if numbers != list(range(config.steps + 1)):
        yield f"versions {numbers} are in the ledger"
        return
    batches = {content["version"]: content["batch"] for content in record.versions if content["version"]}
    if batches != record.cuts:
        yield "a version names a batch other than that of its step"
    records = {line["version"]: line for line in _read_lines(root / "versions" / "published.jsonl")}
    for content in record.versions:
        version = content["version"]
        if any(records[version][name] != content[name] for name in ("root", "manifest", "batch")):
            yield f"v{version} has different hashes in the ledger and in the trainer's record"
    for version in list_versions(root / "versions"):
        if find_root(path_of(root / "versions", version)) != record.versions[version]["root"]:
            yield f"the folder of v{version} does not match the root in the ledger"
    last = path_of(root / "versions", config.steps) / _WEIGHTS
    if _differ(last, root / "checkpoints" / f"step-{config.steps:06d}" / "policy" / _WEIGHTS):
        yield "the last checkpoint and the last version have different weights"


def _check_trained(record: LedgerRecord, config: LaunchConfig, root: Path) -> Iterator[str]:
    """The records of the trainer and the evaluator: each step and version once."""
    steps = list(range(1, config.steps + 1))
    if [line["step"] for line in read_metrics(root / "metrics.jsonl")] != steps:
        yield "metrics.jsonl does not have each step once, in order"
    if [line["step"] for line in read_metrics(root / "eval.jsonl")] != list_due(config.core):
        yield "eval.jsonl does not have each version that is due once, in order"
    for step in steps:
        trained = [group.index for group in read_groups(root / "rollouts" / f"step-{step:06d}.parquet")]
        if trained != [entry.index for entry in record.entries[step]]:
            yield f"step {step} was trained on groups {trained}"


def _differ(one: Path, other: Path) -> bool:
    return not (one.exists() and other.exists()) or hash_file(one) != hash_file(other)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run_shoal(*words: str) -> None:
    code, said = _try_shoal(*words)
    if code:
        raise SystemExit(f"shoal {' '.join(words)}: {said[-4000:]}")


def _try_shoal(*words: str) -> tuple[int, str]:
    """Run a command in this process; its exit code and what it printed."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        code = main(words)
    return code, said.getvalue()
