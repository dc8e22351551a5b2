"""A whole run with the local engine: text in, a trained model out, resumable after every round.

    RUN/config.toml  metrics.jsonl  checkpoints/step-N/  policy/ (at the end)

Peers are driven in turn in one thread, so the same settings give the same bits every time. A run that was stopped
goes on from its last checkpoint with the same command.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import build_config, dump_config, flatten_config
from shoal.diloco.checkpoint import Member, load_outer, restore_member, save_crew
from shoal.diloco.data import LaneReader, find_alphabet, pack_sequences, read_texts
from shoal.diloco.fragments import map_model
from shoal.diloco.local import LocalGroup
from shoal.diloco.outer import warn_rounds
from shoal.diloco.peer import Habits, Peer, RoundReport
from shoal.diloco.plan import Plan
from shoal.diloco.settings import DilocoConfig, InnerConfig
from shoal.diloco.state import OuterState, start_state
from shoal.errors import ConfigError
from shoal.files import atomic_dir, repair_jsonl, sweep_leftovers, write_atomic
from shoal.learner.checkpoint import find_newest, list_checkpoints, prune_checkpoints
from shoal.policy.model import Policy, load_policy, save_policy
from shoal.rundir import append_metrics, lock_dir
from shoal.toml import read_toml

Note = Callable[[str], None]
RESUMABLE = {"out", "save_every", "keep"}
"""Keys that may differ when a run is resumed: none of them changes what a step computes."""


@dataclass(frozen=True)
class Sequences:
    """Packed text, and which rows of it are for what."""

    train: np.ndarray
    held_out: np.ndarray


def run_local(config: DilocoConfig, note: Note) -> Path:
    """Train to the end, or go on from where the last call stopped; the folder of the trained model."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = Path(config.out).expanduser() / f"{config.name}-seed{config.seed}"
    with open_folder(folder, config):
        run = LocalRun(config, folder, note)
        if warning := warn_rounds(config.rules.outer, config.num_rounds, from_random=not config.policy.path):
            note(f"warning: {warning}")
        run.train()
        with atomic_dir(folder / "policy") as target:
            save_policy(run.policy, target)
    return folder / "policy"


class LocalRun:
    """Peers, data and outer state of one run in this process."""

    def __init__(self, config: DilocoConfig, folder: Path, note: Note) -> None:
        self.config, self.folder, self.note = config, folder, note
        texts = list(read_texts(config.data.source, config.data.field))
        self.policy = load_policy(config.policy, alphabet=find_alphabet(texts), seed=config.seed)
        self.data = split_sequences(pack_sequences(self.policy.tokenizer, texts, config.data.length), config)
        fragments = map_model(self.policy.model, config.fragments)
        plan = Plan(config.name, fragments.sizes, config.rules, config.data.lanes)
        checkpoint = find_newest(folder / "checkpoints")
        self.group = LocalGroup(plan, start_state(_read_all(self.policy, config.fragments), config.data.lanes))
        if checkpoint is not None:
            self.group.state, self.group.residuals = load_outer(checkpoint, plan.sizes)
            cut_metrics(folder / "metrics.jsonl", self.group.state.step)
            note(f"going on from step {self.group.state.step}")
        self.readers: dict[str, LaneReader] = {}
        self.crew = {name: self._seat_peer(name) for name in _name_peers(config.peers)}
        for name, member in self.crew.items():
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
        """Inner steps and rounds up to the last."""
        losses: list[float] = []
        while self.state.step < self.config.steps:
            reports: list[RoundReport | None] = []
            for name in self.crew:
                loss, report = self._step_peer(name)
                losses.append(loss)
                reports.append(report)
            # The last to hand in closes the round; the others learn of it here.
            reports += [member.peer.poll() for member in self.crew.values()]
            ended = [report for report in reports if report is not None]
            if ended:
                self._end_round(ended, losses)
                losses = []
        self._load_outer_weights()

    def _step_peer(self, name: str) -> tuple[float, RoundReport | None]:
        member = self.crew[name]
        rows = self.data.train[self.readers[name].draw(self.config.data.batch)]
        loss = measure_loss(member.model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        report = member.peer.step(tokens=rows.size - len(rows))
        return float(loss.detach()), report

    def _end_round(self, reports: list[RoundReport], losses: list[float]) -> None:
        hashes = {report.state for report in reports}
        assert len(reports) == len(self.crew) and len(hashes) == 1, "every peer ends a round in the same state"
        for reader in self.readers.values():
            reader.assign(self.state)
        self._load_outer_weights()
        with torch.no_grad():
            held_out = float(measure_loss(self.policy.model, self.data.held_out))
        metrics = {
            "train_loss": float(np.mean(losses)),
            "held_out_loss": held_out,
            "bytes_up": float(reports[0].bytes_up),
            "peers": float(len(reports[0].peers)),
        }
        append_metrics(self.folder / "metrics.jsonl", self.state.step, metrics)
        self.note(f"step {self.state.step}: train {metrics['train_loss']:.4f}, held out {held_out:.4f}")
        number = sum(part.round for part in self.state.fragments)
        if number % self.config.save_every == 0 or self.state.step >= self.config.steps:
            save_crew(self.folder / "checkpoints", self.state, self.group.residuals, self.crew)
            prune_checkpoints(self.folder / "checkpoints", self.config.keep)

    def _seat_peer(self, name: str) -> Member:
        config = self.config
        model = copy.deepcopy(self.policy.model)
        fragments = map_model(model, config.fragments)
        self.readers[name] = LaneReader(len(self.data.train), config.data.lanes, config.seed, name)
        peer = Peer(
            name,
            self.group.plan,
            fragments,
            build_inner(model, config.inner),
            self.group.seat(name),
            schedule=lambda step: config.inner.rate_at(step, config.steps),
            habits=Habits(wait_s=0.0, clip_norm=config.inner.clip_norm),
            report_lanes=self.readers[name].report,
        )
        return Member(peer, model)

    def _load_outer_weights(self) -> None:
        fragments = map_model(self.policy.model, self.config.fragments)
        for part in self.state.fragments:
            fragments.write(part.index, part.theta)


@contextmanager
def open_folder(folder: Path, config: DilocoConfig) -> Iterator[None]:
    """Make the run's folder or open it to go on, for this process alone."""
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
    """Why a run folder cannot go on with these settings; None if it can or nothing began."""
    if not (folder / "checkpoints").is_dir() or not list_checkpoints(folder / "checkpoints"):
        return None
    old = flatten_config(build_config(DilocoConfig, read_toml(folder / "config.toml"), ()))
    new = flatten_config(config)
    changed = sorted(key for key in new if old.get(key) != new[key] and key not in RESUMABLE)
    if not changed:
        return None
    shown = ", ".join(f"{key} = {json.dumps(old.get(key))}" for key in changed[:3])
    return f"{folder}: holds a run with other settings ({shown}); set them so to go on, or use another name or seed"


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of later steps, which a resumed run will write again."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if int(json.loads(line)["step"]) <= step]
    if len(kept) < len(lines):
        write_atomic(path, b"".join(kept))


def split_sequences(rows: np.ndarray, config: DilocoConfig) -> Sequences:
    """Rows to train on, and every so many-th to evaluate on."""
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


def build_inner(model: nn.Module, inner: InnerConfig) -> torch.optim.AdamW:
    """The inner optimizer; one group, as checkpoints expect it."""
    betas = (inner.beta1, inner.beta2)
    return torch.optim.AdamW(model.parameters(), lr=inner.lr, betas=betas, weight_decay=inner.weight_decay)


def measure_loss(model: nn.Module, rows: np.ndarray) -> Tensor:
    """Mean cross-entropy of every token but the first of each row."""
    tokens = torch.from_numpy(rows.astype(np.int64))
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1))


def _read_all(policy: Policy, num_fragments: int) -> tuple[np.ndarray, ...]:
    fragments = map_model(policy.model, num_fragments)
    return tuple(fragments.read(index) for index in range(num_fragments))


def _name_peers(count: int) -> list[str]:
    return [f"peer-{number:02d}" for number in range(count)]
