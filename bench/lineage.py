"""Whether a swarm's run that has ended is whole: ledger, batches, versions and files, each held against the others.

Nothing here believes what a role says of itself: what a batch must be follows from the outcomes in the ledger, what a
version is called from the bytes of its files, and that the ledger holds from `shoal ledger verify`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.files import hash_file
from shoal.launch.layout import Layout
from shoal.launch.settings import LaunchConfig
from shoal.launch.start import find_root
from shoal.parquet import read_groups
from shoal.report import read_metrics
from shoal.rundir import run_path
from shoal.swarm.db import open_engine, read_snapshot
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import BatchEntry, SubmissionState
from shoal.swarm.rows import MAX_SEQ, read_events
from shoal.swarm.rules.age import is_allowed
from shoal.swarm.rules.batch import hash_batch
from shoal.swarm.state.spans import list_batch
from shoal.trainer.versions import list_due, list_versions, path_of

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a ledger says of its batches and versions."""

    right: dict[int, list[int]]
    """by step: indices of the accepted groups with a signal at the moment of its cut, the lowest first"""
    cuts: dict[int, str]
    """by step: the hash of its batch"""
    entries: dict[int, list[BatchEntry]]
    versions: list[dict[str, Any]]
    """contents of `version.publish`, in order"""
    times: dict[int, tuple[int, int]] = field(default_factory=dict)
    """by step: when its batch was cut and its version published, in ms"""


def find_flaws(config: LaunchConfig) -> list[str]:
    """Everything that is not as it must be after the last step; a sentence each."""
    layout = Layout.of(config)
    story = read_story(layout, config)
    return [
        *_check_ledger(layout),
        *_check_batches(story, config),
        *_check_versions(story, config, layout.root),
        *_check_trained(story, config, layout.root),
    ]


def compare_alone(config: LaunchConfig, out: Path) -> list[str]:
    """Train the same run with `shoal train` and the swarm's beacons; what differs in the last weights."""
    layout = Layout.of(config)
    secret = (layout.coordinator / "beacon.secret").read_text()
    _run_shoal("train", str(layout.run_settings), f"out={out}", f"beacon={secret}")
    alone = run_path(config.core.model_copy(update={"out": str(out)}))
    names = [f"checkpoints/step-{config.steps:06d}/{name}" for name in (f"policy/{_WEIGHTS}", "optimizer.safetensors")]
    return [f"{name}: not that of `shoal train`" for name in names if _differ(layout.root / name, alone / name)]


def read_story(layout: Layout, config: LaunchConfig) -> Story:
    """Read a ledger that nobody writes to any more."""
    engine = open_engine(str(layout.ledger))
    try:
        with read_snapshot(engine) as connection:
            events = list(read_events(connection, 0, MAX_SEQ))
            entries = {step: list_batch(connection, step) for step in range(1, config.steps + 1)}
    finally:
        engine.dispose()
    return _tell_story(events, entries)


def _tell_story(events: Sequence[Event], entries: dict[int, list[BatchEntry]]) -> Story:
    signals: dict[int, list[int]] = {}
    story = Story(right={}, cuts={}, entries=entries, versions=[])
    for event in events:
        content = event.content
        if event.kind == Kind.SUB_OUTCOME and content["state"] == SubmissionState.ACCEPTED and content["fills"]:
            found = [content["first"] + place for place, signal in enumerate(content["signals"]) if signal]
            signals.setdefault(content["step"], []).extend(found)
        elif event.kind == Kind.BATCH_CUT:
            step = content["step"]
            assert step not in story.cuts, "a batch is cut once"
            story.cuts[step] = content["hash"]
            story.right[step] = sorted(signals.get(step, []))
            story.times[step] = event.time_ms, 0
        elif event.kind == Kind.VERSION_PUBLISH:
            story.versions.append(content)
            if content["version"]:
                story.times[content["version"]] = story.times[content["version"]][0], event.time_ms
    return story


def _check_ledger(layout: Layout) -> Iterator[str]:
    done = _try_shoal("ledger", "verify", str(layout.ledger))
    if done.returncode:
        yield f"shoal ledger verify: {done.stdout}{done.stderr}"


def _check_batches(story: Story, config: LaunchConfig) -> Iterator[str]:
    steps = list(range(1, config.steps + 1))
    if sorted(story.cuts) != steps:
        yield f"batches were cut for steps {sorted(story.cuts)}"
        return
    for step in steps:
        found = [entry.index for entry in story.entries[step]]
        right = story.right[step]
        if found != right[: config.batch.groups] or len(set(right)) != len(right):
            yield f"step {step} has groups {found}, right are {right}"
        if hash_batch(story.entries[step]) != story.cuts[step]:
            yield f"the batch of step {step} does not have its hash"
        old = [
            entry.version for entry in story.entries[step] if not is_allowed(step, entry.version, config.async_level)
        ]
        if old:
            yield f"step {step} has groups of versions {old}"
    places = [(entry.submission, entry.place) for step in steps for entry in story.entries[step]]
    if len(set(places)) != len(places):
        yield "a group is in two batches"


def _check_versions(story: Story, config: LaunchConfig, root: Path) -> Iterator[str]:
    """The ledger's lineage is that of the folders, and the last folder is the policy of the last checkpoint."""
    numbers = [content["version"] for content in story.versions]
    if numbers != list(range(config.steps + 1)):
        yield f"versions {numbers} are in the ledger"
        return
    batches = {content["version"]: content["batch"] for content in story.versions if content["version"]}
    if batches != story.cuts:
        yield "a version names another batch than that of its step"
    records = {line["version"]: line for line in _read_lines(root / "versions" / "published.jsonl")}
    for content in story.versions:
        version = content["version"]
        if any(records[version][name] != content[name] for name in ("root", "manifest", "batch")):
            yield f"v{version} is in the ledger with other hashes than the trainer wrote down"
    for version in list_versions(root / "versions"):
        if find_root(path_of(root / "versions", version)) != story.versions[version]["root"]:
            yield f"the folder of v{version} does not have the root of the ledger"
    last = path_of(root / "versions", config.steps) / _WEIGHTS
    if _differ(last, root / "checkpoints" / f"step-{config.steps:06d}" / "policy" / _WEIGHTS):
        yield "the last checkpoint has other weights than the last version"


def _check_trained(story: Story, config: LaunchConfig, root: Path) -> Iterator[str]:
    """What the trainer and the evaluator wrote down, each step and version once."""
    steps = list(range(1, config.steps + 1))
    if [line["step"] for line in read_metrics(root / "metrics.jsonl")] != steps:
        yield "metrics.jsonl does not have each step once, in order"
    if [line["step"] for line in read_metrics(root / "eval.jsonl")] != list_due(config.core):
        yield "eval.jsonl does not have each version that is due once, in order"
    for step in steps:
        trained = [group.index for group in read_groups(root / "rollouts" / f"step-{step:06d}.parquet")]
        if trained != [entry.index for entry in story.entries[step]]:
            yield f"step {step} was trained on groups {trained}"


def _differ(one: Path, other: Path) -> bool:
    return not (one.exists() and other.exists()) or hash_file(one) != hash_file(other)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run_shoal(*words: str) -> None:
    done = _try_shoal(*words)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _try_shoal(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "shoal", *words], capture_output=True, text=True, check=False)
