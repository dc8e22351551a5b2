"""`shoal trainer`: the parts put together, from the settings and the run's own parameters."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from shoal.config import RunConfig
from shoal.console import Console
from shoal.disk import guard_disk
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest
from shoal.node.recipe import read_recipe
from shoal.node.room import outlast_disk
from shoal.node.session import Role, Session, State, open_session
from shoal.node.waits import Note, RoleWaits
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.resume import TrainState, open_state
from shoal.rundir import RunDir, run_path
from shoal.runtime import tune_process
from shoal.shardcast.pool import run_blocking
from shoal.submission.jail import Jail
from shoal.swarm.params import RunParams
from shoal.tasks.source import check_swarm
from shoal.track import open_tracker
from shoal.train import settle_config
from shoal.trainer.batch import BatchReader, ReadGroups, RunTerms
from shoal.trainer.evals import list_awaited
from shoal.trainer.handover import OriginFolder
from shoal.trainer.loop import Desk, Trainer
from shoal.trainer.pick import Expected
from shoal.trainer.publish import Publisher
from shoal.trainer.reading import JailReader, make_bounds
from shoal.trainer.versions import Versions

NUM_READERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlace:
    """Where a trainer finds the others, and keeps what is its own."""

    coordinator: str
    """address, or the file of the run's descriptor"""
    origin: Path
    """folder of the origin's store, on this machine"""
    folder: Path | None = None
    """of the node's keys and receipts; None: `node` in the run directory"""
    owner: Path | None = None
    """file of the owner's key; None: one is made in the folder"""
    authority: Path | None = None
    """file of certificates to trust; None: the system's"""


async def run_trainer(config: RunConfig, place: TrainerPlace, *, fresh: bool = False) -> int:
    """Train a swarm's policy to the last step, from the newest checkpoint if there is one."""
    config = check_config(settle_config(config))
    async with AsyncExitStack() as stack:
        run = RunDir.open(config, fresh)
        stack.callback(run.close)
        stack.enter_context(guard_disk(run.path))
        console = Console(run.log_path)
        stack.callback(console.close)
        tracker = open_tracker(config, run.path)
        stack.callback(tracker.close)
        session = await stack.enter_async_context(
            open_session(
                place.coordinator,
                find_folder(place, run),
                role=Role.TRAINER,
                owner=place.owner,
                authority=place.authority,
                note=console.note,
            )
        )
        check_params(config, session.params)
        desk = Desk(run=run, console=console, tracker=tracker, spans=session.spans)

        def train() -> Coroutine[None, None, None]:
            return _train(config, desk, session, place)

        await session.run(outlast_disk(train, run.path, session.waits, stopping=session.stopping))
    return 0


async def _train(config: RunConfig, desk: Desk, session: Session, place: TrainerPlace) -> None:
    state = await run_blocking(None, _open_state, config, desk)
    params, expected = session.params, describe_policy(config, state.policy)
    first_root = ""
    if session.descriptor.tasks:
        recipe = await read_recipe(session, find_folder(place, desk.run))
        check_recipe(config, recipe)
        first_root = recipe.weights
    async with Jail(size=NUM_READERS) as jail:
        trainer, publisher = build_trainer(
            config,
            desk,
            session,
            place,
            state,
            JailReader(jail, make_bounds(params, expected)),
            expected,
            first_root=first_root,
        )
        session.describe = lambda: State(version=publisher.newest)
        await trainer.run()
    stopped = session.stopping.is_set() and trainer.step < config.steps
    desk.console.note(f"stopped after step {trainer.step}" if stopped else f"step {trainer.step} was the last")


def build_trainer(
    config: RunConfig,
    desk: Desk,
    session: Session,
    place: TrainerPlace,
    state: TrainState,
    read: ReadGroups,
    expected: Expected,
    *,
    first_root: str = "",
) -> tuple[Trainer, Publisher]:
    """A trainer of a run that is open, and its publisher."""
    path, descriptor, params = desk.run.path, session.descriptor, session.params
    versions = Versions(path / "versions")
    terms = RunTerms(
        run=descriptor.run,
        coordinator=descriptor.coordinator,
        async_level=params.async_level,
        expected=expected,
    )
    batches = BatchReader(session.client, read, session.waits, path / "batches", terms)
    publisher = Publisher(
        versions,
        session.client,
        OriginFolder(place.origin, run=descriptor.run, publisher=descriptor.publisher),
        session.waits,
        newest=session.answer.newest_version,
        first_root=first_root,
        spans=session.spans,
        note=desk.console.note,
        list_awaited=lambda: list_awaited(config, path),
    )
    trainer = Trainer(config, desk, batches, publisher, versions, session.waits, stopping=session.stopping, state=state)
    return trainer, publisher


def find_folder(place: TrainerPlace, run: RunDir) -> Path:
    """The folder of the node."""
    return place.folder or run.path / "node"


def check_config(config: RunConfig) -> RunConfig:
    """Refuse settings that mean nothing to a trainer of a swarm."""
    if config.beacon:
        raise ConfigError("beacon: a swarm's beacons are its coordinator's; it is for `shoal train` alone")
    check_swarm(config)
    return config


def check_recipe(config: RunConfig, recipe: Recipe) -> None:
    """Refuse rewards other than those that the prompts tell, and another choice of groups than the validators'."""
    if config.length != recipe.length:
        raise ConfigError("length: the run's recipe has other target lengths; it was fixed when the run was made")
    if config.batch.filter != recipe.filter:
        words = f"{config.batch.filter} here and {recipe.filter} in the run's recipe".lower()
        raise ConfigError(f"batch.filter: {words}, which was fixed when the run was made")


def check_params(config: RunConfig, params: RunParams) -> None:
    """Refuse settings that contradict the run, which has its own for good."""
    pairs = {
        "steps": (config.steps, params.steps),
        "async_level": (config.async_level, params.async_level),
        "batch.groups": (config.batch.groups, params.groups_per_batch),
        "batch.group_size": (config.batch.group_size, params.group_size),
        "engine.max_tokens": (config.engine.max_tokens, params.max_tokens),
    }
    if params.max_groups:
        pairs["batch.groups x batch.max_oversample"] = count_most(config), params.max_groups
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ConfigError(f"{key}: the run has {theirs}, got {ours}; it was fixed when the run was made")


def count_most(config: RunConfig) -> int:
    """Most groups that are sampled for a step, as `shoal train` counts them."""
    return int(config.batch.groups * config.batch.max_oversample)


def describe_policy(config: RunConfig, policy: Policy) -> Expected:
    """What every group of the run is like."""
    return Expected(
        group_size=config.batch.group_size,
        max_tokens=config.engine.max_tokens,
        vocab_size=int(policy.model.config.vocab_size),
        context=int(policy.model.config.max_position_embeddings),
        temperature=config.engine.temperature,
        targets=frozenset(config.length.targets if config.length.mode != "none" else ()),
    )


def _open_state(config: RunConfig, desk: Desk) -> TrainState:
    """The newest checkpoint, and nothing in the run directory that speaks of later steps. Blocking."""
    tune_process(config.threads)
    checkpoint = find_newest(desk.run.checkpoints_path)
    state = open_state(config, checkpoint, desk.console.note)
    desk.run.link()
    desk.run.truncate_after(state.step if checkpoint is not None else -1)
    desk.console.note(f"{state.policy.num_parameters:,} parameters, run directory {desk.run.path}")
    return state


def start_trainer(config: RunConfig, place: TrainerPlace, *, fresh: bool = False, note: Note = lambda _: None) -> int:
    """The same as a process of its own; `note` hears of a disk that is full before there is a console."""

    def work() -> Coroutine[None, None, int]:
        return run_trainer(config, place, fresh=fresh)

    return asyncio.run(outlast_disk(work, run_path(config), RoleWaits("trainer", note=note)))
