"""One site of a run over the network: its own data and optimizer, and a reducer for the rest.

    RUN/config.toml  metrics.jsonl  site.key  checkpoints/step-N/  policy/ (at the end)

When it starts, a site takes weights, momentum, schedule and data position from the run. From its own disk it takes what
nobody else has: its inner optimizer and, if no round has passed since and nothing was in flight, its weights and what
its codec lost. While the reducer is unavailable, inner steps continue.

The model of a site may be sharded over several ranks (`inner`); to the run it is one site.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.diloco.checkpoint import load_outer, restore_member, save_peers, was_settled
from shoal.diloco.data import LaneReader
from shoal.diloco.fragments import map_model
from shoal.diloco.http.averager import HttpAverager
from shoal.diloco.inner import open_inner
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.peer import PeerOptions, RoundReport
from shoal.diloco.settings import DilocoConfig
from shoal.diloco.state import OuterState, start_state
from shoal.diloco.train import build_peer, load_text, load_weights, open_folder, step_peer
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.learner.checkpoint import find_newest
from shoal.learner.parallel import ONE, Ranks
from shoal.net.client import Endpoint
from shoal.policy.model import load_policy
from shoal.train.rundir import append_metrics, cut_metrics
from shoal.util.files import atomic_dir

logger = logging.getLogger(__name__)

WAIT_S = 120.0
"""wait for one outcome before inner steps continue without it"""


@dataclass(frozen=True)
class ReducerAccess:
    """How a site reaches its reducer."""

    places: Sequence[Endpoint]
    reducer: str
    delay: int = 0
    """inner steps that continue while an update is in flight"""


def make_start(config: DilocoConfig) -> tuple[DilocoPlan, OuterState]:
    """Plan and initial state of a run with these settings, for its reducer."""
    policy = load_policy(config.policy, alphabet=load_text(config).alphabet, seed=config.seed)
    fragments = map_model(policy.model, config.fragments)
    plan = DilocoPlan(config.name, fragments.sizes, config.rules, config.data.lanes, config.seed)
    return plan, start_state(fragments.read_all(), config.data.lanes)


def run_site(config: DilocoConfig, plan: DilocoPlan, access: ReducerAccess, ranks: Ranks = ONE) -> Path:
    """Train as one site to the end of the run; returns the folder of the trained model.

    In several ranks only rank 0 calls this; the others call `follow_inner`.
    """
    folder = find_folder(config)
    with open_folder(folder, config):
        site = Site(config, plan, access, folder, ranks)
        try:
            site.train()
            # The run's weights, not those after this site's own steps.
            load_weights(site.peer.fragments, site.peer.state)
            with atomic_dir(folder / "policy") as target:
                site.inner.write_policy(target)
        finally:
            site.peer.close()
    return folder / "policy"


def find_folder(config: DilocoConfig) -> Path:
    """The folder of a site's run."""
    return Path(config.out).expanduser() / f"{config.name}-site{config.seed}"


def open_site_key(config: DilocoConfig) -> Key:
    """The key of a site, created if there is none: the reducer has to know its public part before the site joins."""
    folder = find_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    return Key.open(folder / "site.key")


class Site:
    """The model, data and peer of one site."""

    def __init__(
        self, config: DilocoConfig, plan: DilocoPlan, access: ReducerAccess, folder: Path, ranks: Ranks = ONE
    ) -> None:
        self.config, self.folder = config, folder
        text = load_text(config)
        self.inner = open_inner(config, text.alphabet, ranks)
        self.data = text.pack(self.inner.policy, config)
        if self.inner.fragments.sizes != plan.sizes:
            raise ConfigError("policy: the model or its number of fragments differs from the run's plan")
        key = Key.open(folder / "site.key")
        averager = HttpAverager(plan, key, access.places, access.reducer)
        self.reader = LaneReader(len(self.data.train), plan.num_lanes, plan.seed, key.public)
        options = PeerOptions(access.delay, wait_s=WAIT_S, clip_norm=config.inner.clip_norm, threaded=access.delay > 0)
        try:
            self._member = build_peer(key.public, plan, self.inner, config, averager, self.reader, options)
        except BaseException:
            averager.close()
            raise
        self.peer = self._member.peer
        averager.hold_state = lambda: self.peer.state
        self.reader.rewind(self.peer.state)
        self._resume()

    def train(self) -> None:
        """Inner steps and rounds up to the last."""
        losses: list[float] = []
        while self.peer.state.step < self.config.steps:
            rows = self.data.train[self.reader.draw(self.config.data.batch)]
            loss, report = step_peer(self._member, rows)
            losses.append(loss)
            if report is not None:
                self._end_round(report, losses)
                losses = []

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
        text = f"step {state.step}: train {metrics['train_loss']:.4f}, {len(report.peers)} peers, {busy:.0%} busy"
        logger.info(f"{text}, state {report.state[:12]}{why}")
        if sum(state.rounds) % self.config.save_every == 0:
            save_peers(self.folder, state, {}, {peer.name: self._member}, keep=self.config.keep)

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
            self.inner.load_optimizer(path)
        logger.info(f"resuming at step {self.peer.state.step} with the optimizer of step {saved.step}")
