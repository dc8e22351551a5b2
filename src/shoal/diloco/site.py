"""One site of a run over the network: its own data and optimizer, and a reducer for the rest.

    RUN/config.toml  metrics.jsonl  site.key  checkpoints/step-N/  policy/ (at the end)

A site that starts takes weights, momentum, schedule and data position from the run, and from its own disk what nobody
else has: its inner optimizer, and, if no round has passed since and nothing was on its way, its weights and what its
codec lost. While the reducer is away inner steps go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.diloco.checkpoint import Member, load_outer, restore_member, save_crew, was_settled
from shoal.diloco.data import LaneReader, find_alphabet, pack_sequences, read_texts
from shoal.diloco.fragments import map_model
from shoal.diloco.http.averager import HttpAverager
from shoal.diloco.peer import Habits, Peer, RoundReport
from shoal.diloco.plan import Plan
from shoal.diloco.settings import DilocoConfig
from shoal.diloco.state import OuterState, start_state
from shoal.diloco.train import Note, build_inner, cut_metrics, measure_loss, open_folder, split_sequences
from shoal.errors import ConfigError
from shoal.files import atomic_dir
from shoal.keys import Key
from shoal.learner.checkpoint import find_newest, load_optimizer, prune_checkpoints
from shoal.policy.model import load_policy, save_policy
from shoal.rundir import append_metrics
from shoal.swarm.link import Place

WAIT_S = 120.0
"""for one outcome, before inner steps go on without it"""


@dataclass(frozen=True)
class Way:
    """How a site reaches its reducer."""

    places: Sequence[Place]
    reducer: str
    delay: int = 0
    """inner steps that go on while an update is on its way"""


def make_start(config: DilocoConfig) -> tuple[Plan, OuterState]:
    """Plan and first state of a run with these settings, for its reducer."""
    texts = list(read_texts(config.data.source, config.data.field))
    policy = load_policy(config.policy, alphabet=find_alphabet(texts), seed=config.seed)
    fragments = map_model(policy.model, config.fragments)
    thetas = tuple(fragments.read(index) for index in range(config.fragments))
    plan = Plan(config.name, fragments.sizes, config.rules, config.data.lanes, config.seed)
    return plan, start_state(thetas, config.data.lanes)


def run_site(config: DilocoConfig, plan: Plan, way: Way, note: Note) -> Path:
    """Train as one site to the end of the run; the folder of the trained model."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = Path(config.out).expanduser() / f"{config.name}-site{config.seed}"
    with open_folder(folder, config):
        site = Site(config, plan, way, folder, note)
        try:
            site.train()
            site.load_outer()
            with atomic_dir(folder / "policy") as target:
                save_policy(site.policy, target)
        finally:
            site.peer.close()
    return folder / "policy"


class Site:
    """The model, data and peer of one site."""

    def __init__(self, config: DilocoConfig, plan: Plan, way: Way, folder: Path, note: Note) -> None:
        self.config, self.folder, self.note = config, folder, note
        texts = list(read_texts(config.data.source, config.data.field))
        self.policy = load_policy(config.policy, alphabet=find_alphabet(texts), seed=config.seed)
        self.data = split_sequences(pack_sequences(self.policy.tokenizer, texts, config.data.length), config)
        fragments = map_model(self.policy.model, config.fragments)
        if fragments.sizes != plan.sizes:
            raise ConfigError("policy: another model than the run's, or cut into other fragments")
        key = _load_key(folder / "site.key")
        averager = HttpAverager(plan, key, way.places, way.reducer, note=note)
        self.reader = LaneReader(len(self.data.train), plan.num_lanes, plan.seed, key.public)
        try:
            self.peer = Peer(
                key.public,
                plan,
                fragments,
                build_inner(self.policy.model, config.inner),
                averager,
                schedule=lambda step: config.inner.rate_at(step, config.steps),
                habits=Habits(way.delay, wait_s=WAIT_S, clip_norm=config.inner.clip_norm, aside=way.delay > 0),
                report_lanes=self.reader.report,
            )
        except BaseException:
            averager.close()
            raise
        averager.hold_state = lambda: self.peer.state
        self._member = Member(self.peer, self.policy.model)
        self.reader.rewind(self.peer.state)
        self._resume()

    def train(self) -> None:
        """Inner steps and rounds up to the last."""
        losses: list[float] = []
        while self.peer.state.step < self.config.steps:
            rows = self.data.train[self.reader.draw(self.config.data.batch)]
            loss = measure_loss(self.policy.model, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            if (report := self.peer.step(tokens=rows.size - len(rows))) is not None:
                self._end_round(report, losses)
                losses = []

    def load_outer(self) -> None:
        """Leave the model with the run's weights, instead of where this site's own steps led."""
        for part in self.peer.state.fragments:
            self.peer.fragments.write(part.index, part.theta)

    def _end_round(self, report: RoundReport, losses: list[float]) -> None:
        state, peer = self.peer.state, self.peer
        if report.is_dropped:
            self.reader.rewind(state)
        else:
            self.reader.assign(state)
        busy = peer.compute_s / max(1e-9, peer.compute_s + peer.waited_s)
        metrics = {
            "train_loss": float(np.mean(losses)),
            "peers": float(len(report.peers)),
            "bytes_up": float(report.bytes_up),
            "bytes_down": float(report.bytes_down),
            "utilisation": busy,
        }
        append_metrics(self.folder / "metrics.jsonl", state.step, metrics)
        why = f" ({report.note})" if report.note else ""
        said = f"step {state.step}: train {metrics['train_loss']:.4f}, {len(report.peers)} peers, {busy:.0%} busy"
        self.note(f"{said}, state {report.state[:12]}{why}")
        if sum(part.round for part in state.fragments) % self.config.save_every == 0:
            save_crew(self.folder / "checkpoints", state, {}, {peer.name: self._member})
            prune_checkpoints(self.folder / "checkpoints", self.config.keep)

    def _resume(self) -> None:
        checkpoint = find_newest(self.folder / "checkpoints")
        if checkpoint is None:
            return
        saved, _ = load_outer(checkpoint, self.peer.plan.sizes)
        cut_metrics(self.folder / "metrics.jsonl", self.peer.state.step)
        if saved.hash == self.peer.state.hash and was_settled(checkpoint, self.peer.name):
            restore_member(checkpoint, self._member)
        else:
            path = checkpoint / "peers" / self.peer.name / "optimizer.safetensors"
            load_optimizer(self.policy.model, self.peer.inner, path)
        self.note(f"going on from step {self.peer.state.step}, with the optimizer of step {saved.step}")


def _load_key(path: Path) -> Key:
    if path.exists():
        return Key.load(path)
    key = Key.generate()
    key.save(path)
    return key
