"""The work of leases without a swarm: what a worker generates and a validator checks, one lease at a time.

run = open_run(Path("runs/demo-seed0"))
generator = OfflineGenerator(WorkerBehaviour(run.recipe))
generator.load(0, run.folders[0])
reports = check_work(generator.write(make_order(run, 0, groups=1)), policy, run, seeded=True)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.config.run import EngineConfig
from shoal.engine import open_engine
from shoal.engine.base import Engine
from shoal.errors import ConfigError
from shoal.group import score_group
from shoal.policy.model import Policy
from shoal.recipe import Recipe, load_recipe
from shoal.redteam.behaviours.forged_work import list_rollouts
from shoal.seeds import derive_group_seeds, derive_seed
from shoal.toploc.build import ProofBuilder
from shoal.toploc.calibration import Calibration, load_calibration
from shoal.toploc.check import RolloutReport, check_rollouts
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import LeaseOrder


class OfflineGenerator:
    """Generates for a behaviour. Versions are loaded in order, as a worker would get them."""

    def __init__(self, behaviour: WorkerBehaviour, *, slots: int = 64) -> None:
        self.behaviour = behaviour
        self._slots = slots
        self._proofs = ProofBuilder()
        self._policy: Policy | None = None
        self._engine: Engine | None = None

    def load(self, version: int, folder: Path) -> None:
        """Switch to a version that was fetched into a folder."""
        policy = self.behaviour.open_policy(version, folder)
        if self._engine is None:
            config = EngineConfig(slots=self._slots)
            self._engine = open_engine(config, policy.model, eos_id=policy.eos_id, version=version, sink=self._proofs)
        else:
            self._engine.swap_weights(version, policy.model.state_dict())
        self._policy = policy

    def write(self, order: LeaseOrder) -> FinishedWork:
        """The submitted work for an order."""
        assert self._engine is not None and self._policy is not None, "no version was loaded"
        plans = self.behaviour.plan(order, self._policy.tokenizer)
        requests = [request for plan in plans for request in plan.requests]
        rollouts = {rollout.id: rollout for rollout in self._engine.generate(requests)}
        groups = tuple(score_group(self.behaviour.family, self._policy.tokenizer, plan, rollouts) for plan in plans)
        names = [request.id for request in requests]
        proofs = dict(zip(names, self._proofs.take_many(names), strict=True))
        version = self._engine.version
        return self.behaviour.finish(
            FinishedWork(order=order, version=version, groups=groups, proofs=proofs, seconds=0.0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What a worker needs from a run: its recipe, weights by version, and its calibration."""

    recipe: Recipe
    folders: Mapping[int, Path]
    """folders of versions, at least one"""
    calibration: Calibration

    @property
    def newest(self) -> int:
        return max(self.folders)


def open_run(folder: Path) -> OfflineRun:
    """Open the run in a swarm's folder: v0, and the versions that it still has."""
    launch = folder / "launch"
    if not (launch / "recipe.json").exists():
        raise ConfigError(f"{folder}: not the folder of a swarm; `shoal prepare` creates one")
    found = {int(path.name[1:]): path for path in sorted((folder / "versions").glob("v*")) if path.is_dir()}
    recipe = load_recipe((launch / "recipe.json").read_bytes())
    if recipe.set.hash:
        recipe = recipe.bring_set((launch / "tasks.jsonl").read_bytes())
    return OfflineRun(
        recipe=recipe,
        folders={0: launch / "v0"} | found,
        calibration=load_calibration(launch / "calibration.json"),
    )


def make_order(run: OfflineRun, number: int, *, groups: int, seed: int = 0) -> LeaseOrder:
    """A lease of a step that the newest version may generate for."""
    newest, beacon = run.newest, derive_seed("power", seed, number)
    return LeaseOrder(
        lease=f"l{number}",
        step=newest + 1,
        first=0,
        count=groups,
        seeds=tuple(derive_group_seeds(beacon, index, run.recipe.group_size) for index in range(groups)),
        version=newest,
        deadline_ms=0,
    )


def check_work(work: FinishedWork, policy: Policy, run: OfflineRun, *, seeded: bool) -> list[RolloutReport]:
    """A report on every rollout, as from a validator that checks all of them."""
    behaviour, order = WorkerBehaviour(run.recipe), work.order
    plans = behaviour.plan(order, policy.tokenizer)
    return check_rollouts(
        {work.version: policy.model},
        [request for plan in plans for request in plan.requests],
        list_rollouts(work),
        work.proofs,
        run.calibration,
        eos_id=policy.eos_id,
        seeded=seeded,
    )


def list_changed(done: FinishedWork, base: FinishedWork) -> list[bool]:
    """For each rollout, whether tokens or proofs differ from those of honest work."""
    pairs = zip(list_rollouts(done), list_rollouts(base), strict=True)
    return [
        not np.array_equal(own.token_ids, true.token_ids) or list(done.proofs[own.id]) != list(base.proofs[true.id])
        for own, true in pairs
    ]
