"""A swarm in a folder: batches of a `shoal train` run, a ledger of versions, an origin; no sockets.

For step n it serves what `shoal train` trained on in step n, through submission files. So a correct trainer gets the
same weights and optimizer, bit for bit. Everything is on disk, and outlives a trainer's process.
"""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.config.run import RunConfig, load_config
from shoal.identity.documents import Tag, sign_document
from shoal.identity.keys import Key
from shoal.learner.checkpoint import find_newest, list_checkpoints, read_state
from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError
from shoal.protocol.messages import Batch, BatchAnswer, BatchEntry, VersionAnswer, VersionStatement
from shoal.protocol.params import RunParams, hash_batch
from shoal.rollout import Group
from shoal.shardcast.growing import is_growing
from shoal.shardcast.origin import SHARD_BYTES, compute_root
from shoal.shardcast.origin_watch import PublishedVersion
from shoal.submission.limits import FormError, SubmissionLimits
from shoal.submission.parse import parse_submission
from shoal.submission.read import read_claims
from shoal.submission.write import write_submission
from shoal.train.loop import run_training
from shoal.train.report import read_metrics
from shoal.train.resume import open_state
from shoal.train.rollout_files import read_groups
from shoal.train.rundir import RunDir
from shoal.train.trackers import NullTracker
from shoal.trainer.batch import BatchReader, RunTerms, UnreadableError, limit_files
from shoal.trainer.evaluator import list_awaited
from shoal.trainer.publish import Publisher
from shoal.trainer.run import describe_policy
from shoal.trainer.trainer import Trainer, TrainerReporter
from shoal.trainer.versions import Versions
from shoal.util.console import Console
from shoal.util.files import append_line, hash_file
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits

TINY = Path(__file__).parents[1] / "tiny.toml"
BEACON = "5a" * 32
STEPS = 4
RUN = "demo"


class CrashError(BaseException):
    """The trainer's process ends here."""


def make_config(out: Path, *overrides: str) -> RunConfig:
    return load_config(TINY, [f"out={out}", f"steps={STEPS}", "checkpoint.every=1", *overrides])


def train_reference(config: RunConfig, secret: str = BEACON) -> Path:
    """`shoal train` with the beacons of a swarm; its run directory."""
    assert run_training(config.model_copy(update={"beacon": secret})) == 0
    return Path(config.out) / f"{config.name}-seed{config.seed}"


def copy_sft(source: Path, target: Path) -> None:
    """Copy the SFT cache of another run, so that not every test computes it; valid only for equal settings."""
    if not (target / "sft").exists():
        shutil.copytree(source / "sft", target / "sft")


class FakeSwarm:
    """Coordinator and origin. `crash` names the point at which the trainer's process ends, once."""

    def __init__(self, folder: Path, reference: Path, key: Key | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = load_config(reference / "config.toml")
        self.folder, self.reference, self.async_level = folder, reference, config.async_level
        self.key = key or _load_key(folder / "coordinator.key")
        self.crash = ""
        self.has_start = True
        """whether its trainers find v0 in the cache, or compute SFT first"""
        self.served_keep = 2
        self.lost: dict[str, Exception] = {}
        """submissions whose files are unavailable, and the error of each"""
        self.batches = {step: self._make_batch(step) for step in range(1, config.steps + 1)}
        self.params = RunParams(
            steps=config.steps,
            async_level=config.async_level,
            groups_per_batch=config.batch.groups,
            group_size=config.batch.group_size,
            max_tokens=config.engine.max_tokens,
            groups_per_lease=2,
        )

    # The ledger

    @property
    def announced(self) -> list[dict[str, Any]]:
        """The ledger's versions, in order."""
        path = self.folder / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def publish_version(self, version: VersionStatement) -> VersionAnswer:
        self.reach("before announcement")
        known = self.announced
        if version.version < len(known):
            if known[version.version] != version.model_dump():
                raise _refuse("published", "published with different hashes")
        elif version.version > len(known):
            raise _refuse("version_order", f"the next version is v{len(known)}")
        else:
            expected = self.batches[version.version].hash if version.version else ""
            if version.batch != expected:
                raise _refuse("other_batch", "different batch than was cut")
            append_line(self.folder / "ledger.jsonl", version.model_dump_json())
        self.reach("after announcement")
        return VersionAnswer(version=version.version, open_steps=(), finished=version.version == self.params.steps)

    async def cut_batch(self, step: int, *, wait_s: int = 0) -> BatchAnswer:
        if step not in self.batches or len(self.announced) - 1 < step - 1 - self.async_level:
            return BatchAnswer(batch=None, reason=f"step {step} is not open yet", retry_after_s=0)
        batch = self.batches[step]
        body = {"run": RUN, "step": step, "hash": batch.hash, "groups": len(batch.groups), "time_ms": 1}
        return BatchAnswer(batch=batch, document=sign_document(self.key, Tag.BATCH, body).decode())

    async def fetch_blob(self, submission: str, blob: str, size: int, path: Path) -> None:
        if submission in self.lost:
            raise self.lost[submission]
        shutil.copyfile(self.folder / "blobs" / submission, path)

    # The origin

    async def hand_over(self, path: Path, version: int) -> PublishedVersion:
        self.reach("before hand-over")
        while is_growing(path):  # as the real origin does before a version ends
            await asyncio.sleep(0.005)
        root = compute_root(path, SHARD_BYTES)
        (self.folder / f"served-{version}").touch()
        self.reach("after hand-over")
        return PublishedVersion(version, root, hashlib.sha256(f"{version} {root}".encode()).hexdigest(), SHARD_BYTES)

    def list_served(self) -> set[int]:
        served = sorted(int(path.name.removeprefix("served-")) for path in self.folder.glob("served-*"))
        return set(served[-self.served_keep :])

    def reach(self, point: str) -> None:
        if self.crash == point:
            self.crash = ""
            raise CrashError(point)

    def _make_batch(self, step: int) -> Batch:
        """The groups of the reference's step, two per file if they are neighbours."""
        groups = read_groups(self.reference / "rollouts" / f"step-{step:06d}.parquet")
        (self.folder / "blobs").mkdir(exist_ok=True)
        entries = []
        for number in range(0, len(groups), 2):
            part = groups[number : number + 2]
            name = f"s{100 * step + number}"
            proofs = {rollout.id: () for group in part for rollout in group.rollouts}
            written = write_submission(self.folder / "blobs" / name, part, proofs)
            for place, group in enumerate(part):
                version = group.rollouts[0].version
                entries.append(
                    BatchEntry(index=group.index, submission=name, place=place, version=version, blob=written.sha256)
                )
        return Batch(run=RUN, step=step, hash=hash_batch(entries), groups=tuple(entries))


def _load_key(path: Path) -> Key:
    if not path.exists():
        Key.generate().save(path)
    return Key.load(path)


def _refuse(code: str, text: str) -> RefusedError:
    return RefusedError(ApiError(409, code, text))


class PlainReader:
    """Reads files in this process: the sandbox has tests of its own."""

    def __init__(self, bounds: SubmissionLimits) -> None:
        self._bounds = bounds

    async def __call__(self, path: Path) -> Sequence[Group]:
        try:
            return read_claims(parse_submission(path.read_bytes(), self._bounds), self._bounds).groups
        except FormError as error:
            raise UnreadableError(str(error)) from None


class Life:
    """One lifetime of a trainer: opened on a run directory, run, closed as a dead process leaves it."""

    def __init__(self, config: RunConfig, swarm: FakeSwarm) -> None:
        self.config, self.swarm = config, swarm
        self.run = RunDir.open(config)
        self.stopping = asyncio.Event()
        self.waits = RoleWaits("trainer", spans=SpanLog(self.run.path / "spans.jsonl", "trainer"))
        self.versions = Versions(self.run.path / "versions")
        if swarm.has_start:
            copy_sft(swarm.reference.parent, Path(config.out))
        checkpoint = find_newest(self.run.checkpoints_path)
        state = open_state(config, checkpoint)
        self.run.truncate_after(state.step if checkpoint is not None else -1)
        expected = describe_policy(config, state.policy)
        terms = RunTerms(
            run=RUN,
            coordinator=swarm.key.public,
            async_level=swarm.async_level,
            expected=expected,
        )
        read = PlainReader(limit_files(swarm.params, expected))
        self.batches = BatchReader(swarm, read, self.waits, self.run.path / "batches", terms)
        self.publisher = Publisher(
            self.versions,
            swarm,
            swarm,
            self.waits,
            newest=len(swarm.announced) - 1,
            list_awaited=lambda: list_awaited(config, self.run.path),
        )
        self.console = Console(self.run.log_path)
        desk = TrainerReporter(
            run=self.run, console=self.console, tracker=NullTracker(), spans=SpanLog(None, "trainer")
        )
        self.trainer = Trainer(
            config,
            desk,
            self.batches,
            self.publisher,
            self.versions,
            self.waits,
            stopping=self.stopping,
            state=state,
        )

    async def go(self) -> None:
        try:
            async with asyncio.timeout(120):
                await self.trainer.run()
        finally:
            self.console.close()
            self.run.close()


def run_life(config: RunConfig, swarm: FakeSwarm) -> Life:
    """One lifetime from start to end."""

    async def live() -> Life:
        life = Life(config, swarm)
        await life.go()
        return life

    return asyncio.run(live())


def assert_whole(run: Path, swarm: FakeSwarm) -> None:
    """Assert that the run has the reference's bits, and the ledger its versions, each once and in order."""
    assert hash_state(run) == hash_state(swarm.reference)
    assert list_lines(run) == list_lines(swarm.reference)
    assert [line["version"] for line in swarm.announced] == list(range(STEPS + 1))
    last = run / "versions" / f"v{STEPS:06d}"
    assert swarm.announced[-1]["root"] == compute_root(last, SHARD_BYTES)
    weights = swarm.reference / "checkpoints" / f"step-{STEPS:06d}" / "policy" / "model.safetensors"
    assert hash_file(last / "model.safetensors") == hash_file(weights)


def hash_state(run: Path) -> dict[str, str]:
    """Hashes of weights and optimizer after the last step."""
    newest = list_checkpoints(run / "checkpoints")[-1]
    found = read_state(newest[1]).sha256
    return {name: found[name] for name in ("policy/model.safetensors", "optimizer.safetensors")} | {
        "step": str(newest[0])
    }


def list_lines(run: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on the clock, of training steps."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "train/tokens" in line]
    names = {"step", "train/tokens", "loss/total", "optim/grad_norm", "off_policy/lag"}
    return [{name: line[name] for name in names if name in line} for line in lines]
