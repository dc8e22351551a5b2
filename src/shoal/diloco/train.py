"""A whole run with the local engine: text in, a trained model out, resumable after every round.

    RUN/config.toml  metrics.jsonl  checkpoints/step-N/  policy/ (at the end)

Peers are driven in turn in one thread, so the same settings give the same bits every time. The same command resumes a
stopped run from its last checkpoint.
"""

import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shoal.config.run import build_config, dump_config, flatten_config
from shoal.config.toml import read_toml
from shoal.diloco.checkpoint import PeerModel, load_outer, restore_member, save_peers
from shoal.diloco.data import LaneReader, find_alphabet, pack_sequences, read_texts
from shoal.diloco.fragments import FragmentMap, map_model
from shoal.diloco.inner import InnerModel, measure_loss
from shoal.diloco.local import LocalGroup
from shoal.diloco.outer import DilocoPlan, warn_rounds
from shoal.diloco.peer import Peer, PeerOptions, RoundReport
from shoal.diloco.round import Averager
from shoal.diloco.settings import DilocoConfig
from shoal.diloco.state import OuterState, start_state
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest, list_checkpoints
from shoal.policy.model import Policy, load_policy, save_policy
from shoal.train.rundir import append_metrics, cut_metrics, lock_dir
from shoal.util.files import atomic_dir, repair_jsonl, sweep_leftovers, write_atomic

logger = logging.getLogger(__name__)

RESUMABLE = {"out", "save_every", "keep"}
"""Keys that may differ when a run is resumed: none of them changes what a step computes."""


@dataclass(frozen=True)
class Sequences:
    """Packed text, and the rows for training and evaluation."""

    train: np.ndarray
    held_out: np.ndarray


def run_local(config: DilocoConfig) -> Path:
    """Train to the end, resuming where the last call stopped; returns the folder of the trained model."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = Path(config.out).expanduser() / f"{config.name}-seed{config.seed}"
    with open_folder(folder, config):
        run = LocalRun(config, folder)
        if warning := warn_rounds(config.rules.outer, config.num_rounds, from_random=not config.policy.path):
            logger.warning(warning)
        run.train()
        with atomic_dir(folder / "policy") as target:
            save_policy(run.policy, target)
    return folder / "policy"


class LocalRun:
    """Peers, data and outer state of one run in this process."""

    def __init__(self, config: DilocoConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        text = load_text(config)
        self.policy = load_policy(config.policy, alphabet=text.alphabet, seed=config.seed)
        self.data = text.pack(self.policy, config)
        self.fragments = map_model(self.policy.model, config.fragments)
        plan = DilocoPlan(config.name, self.fragments.sizes, config.rules, config.data.lanes)
        checkpoint = find_newest(folder / "checkpoints")
        self.group = LocalGroup(plan, start_state(self.fragments.read_all(), config.data.lanes))
        if checkpoint is not None:
            self.group.state, self.group.residuals = load_outer(checkpoint, plan.sizes)
            cut_metrics(folder / "metrics.jsonl", self.group.state.step)
            logger.info(f"resuming at step {self.group.state.step}")
        self.readers: dict[str, LaneReader] = {}
        self.members = {name: self._add_peer(name) for name in _name_peers(config.peers)}
        for name, member in self.members.items():
            self.readers[name].rewind(self.group.state)
            if checkpoint is None:
                member.peer.adopt_state(self.group.state)
            else:
                restore_member(checkpoint, member)

    @property
    def state(self) -> OuterState:
        """The outer state that all peers hold."""
        return self.group.state

    def train(self) -> None:
        """Run inner steps and rounds to the end."""
        losses: list[float] = []
        while self.state.step < self.config.steps:
            reports: list[RoundReport | None] = []
            for name in self.members:
                rows = self.data.train[self.readers[name].draw(self.config.data.batch)]
                loss, report = step_peer(self.members[name], rows)
                losses.append(loss)
                reports.append(report)
            # The last peer to submit closes the round; the others learn of it here.
            reports += [member.peer.poll() for member in self.members.values()]
            ended = [report for report in reports if report is not None]
            if ended:
                self._end_round(ended, losses)
                losses = []
        load_weights(self.fragments, self.state)

    def _end_round(self, reports: list[RoundReport], losses: list[float]) -> None:
        hashes = {report.state for report in reports}
        assert len(reports) == len(self.members) and len(hashes) == 1, "every peer must end a round in the same state"
        for reader in self.readers.values():
            reader.assign(self.state)
        load_weights(self.fragments, self.state)
        with torch.no_grad():
            held_out = float(measure_loss(self.policy.model, self.data.held_out))
        metrics = {
            "train_loss": float(np.mean(losses)),
            "held_out_loss": held_out,
            "bytes_up": float(reports[0].bytes_up),
            "peers": float(len(reports[0].peers)),
        }
        append_metrics(self.folder / "metrics.jsonl", self.state.step, metrics)
        logger.info(f"step {self.state.step}: train {metrics['train_loss']:.4f}, held out {held_out:.4f}")
        if sum(self.state.rounds) % self.config.save_every == 0 or self.state.step >= self.config.steps:
            save_peers(self.folder, self.state, self.group.residuals, self.members, keep=self.config.keep)

    def _add_peer(self, name: str) -> PeerModel:
        inner = InnerModel(replace(self.policy, model=copy.deepcopy(self.policy.model)), self.config)
        self.readers[name] = LaneReader(len(self.data.train), self.config.data.lanes, self.config.seed, name)
        options = PeerOptions(wait_s=0.0, clip_norm=self.config.inner.clip_norm)
        plan, averager = self.group.plan, self.group.join(name)
        return build_peer(name, plan, inner, self.config, averager, self.readers[name], options)


@contextmanager
def open_folder(folder: Path, config: DilocoConfig) -> Iterator[None]:
    """Create or reopen the run's folder, locked for this process."""
    lock = lock_dir(folder)
    try:
        if (conflict := find_conflict(folder, config)) is not None:
            raise ConfigError(conflict)
        (folder / "checkpoints").mkdir(exist_ok=True)
        sweep_leftovers(folder / "checkpoints")
        sweep_leftovers(folder)
        write_atomic(folder / "config.toml", dump_config(config).encode())
        (folder / "metrics.jsonl").touch()
        repair_jsonl(folder / "metrics.jsonl")
        yield
    finally:
        os.close(lock)


def find_conflict(folder: Path, config: DilocoConfig) -> str | None:
    """Why these settings cannot resume the run in a folder; None if they can, or if it is empty."""
    if not (folder / "checkpoints").is_dir() or not list_checkpoints(folder / "checkpoints"):
        return None
    old = flatten_config(build_config(DilocoConfig, read_toml(folder / "config.toml"), ()))
    new = flatten_config(config)
    changed = sorted(key for key in new if old.get(key) != new[key] and key not in RESUMABLE)
    if not changed:
        return None
    shown = ", ".join(f"{key} = {json.dumps(old.get(key))}" for key in changed[:3])
    return f"{folder}: the run there has different settings ({shown}); use these to resume, or another name or seed"


@dataclass(frozen=True)
class RunText:
    """The texts of a run, and their characters, which a tiny model's tokenizer knows."""

    texts: list[str]
    alphabet: str

    def pack(self, policy: Policy, config: DilocoConfig) -> Sequences:
        """The texts as sequences of tokens."""
        return split_sequences(pack_sequences(policy.tokenizer, self.texts, config.data.length), config)


def load_text(config: DilocoConfig) -> RunText:
    """Read the data that the settings name."""
    texts = list(read_texts(config.data.source, config.data.field))
    return RunText(texts, find_alphabet(texts))


def build_peer(
    name: str,
    plan: DilocoPlan,
    inner: InnerModel,
    config: DilocoConfig,
    averager: Averager,
    reader: LaneReader,
    options: PeerOptions,
) -> PeerModel:
    """Build a peer that trains this model."""
    peer = Peer(
        name,
        plan,
        inner.fragments,
        inner.optimizer,
        averager,
        schedule=lambda step: config.inner.rate_at(step, config.steps),
        options=options,
        report_lanes=reader.report,
    )
    return PeerModel(peer, inner)


def load_weights(fragments: FragmentMap, state: OuterState) -> None:
    """Copy the outer weights into a model."""
    for part in state.fragments:
        fragments.write(part.index, part.theta)


def split_sequences(rows: np.ndarray, config: DilocoConfig) -> Sequences:
    """Split rows into training and evaluation rows, the latter evenly spaced."""
    held_out = config.data.held_out
    if len(rows) < 2 * held_out + config.data.lanes:
        raise ConfigError(
            f"data.source: {len(rows)} sequences of {config.data.length} tokens are too few to hold out {held_out}"
            f" and train on {config.data.lanes} lanes"
        )
    chosen = np.linspace(0, len(rows) - 1, held_out).astype(int)
    mask = np.zeros(len(rows), dtype=bool)
    mask[chosen] = True
    return Sequences(rows[~mask], rows[mask])


def step_peer(member: PeerModel, rows: np.ndarray) -> tuple[float, RoundReport | None]:
    """Take one inner step of a peer on these rows; returns its loss, and the report if a round ended."""
    loss = member.inner.backward(rows)
    return loss, member.peer.step(tokens=rows.size - len(rows))


def _name_peers(count: int) -> list[str]:
    return [f"peer-{number:02d}" for number in range(count)]
