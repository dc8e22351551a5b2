"""`shoal trainer`: builds the trainer from the settings and the run's parameters."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.config.run import RunConfig
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest
from shoal.learner.parallel import ONE, Ranks
from shoal.node.disk_full import outlast_disk
from shoal.node.recipe import read_recipe
from shoal.node.session import Role, RoleState, Session, open_session
from shoal.policy.model import Policy
from shoal.protocol.params import RunParams
from shoal.recipe import Recipe
from shoal.submission.read import ParserPool
from shoal.tasks.open import check_swarm
from shoal.train.loop import settle_config
from shoal.train.resume import TrainState, open_state
from shoal.train.rundir import RunDir
from shoal.train.trackers import open_tracker
from shoal.trainer.batch import BatchReader, GroupSpec, RunTerms, limit_files, read_sandboxed
from shoal.trainer.evaluator import list_awaited
from shoal.trainer.publish import OriginFolder, Publisher
from shoal.trainer.trainer import Trainer, TrainerReporter
from shoal.trainer.versions import Versions
from shoal.util.aio import run_blocking
from shoal.util.console import Console
from shoal.util.disk import guard_disk
from shoal.util.process import tune_process

logger = logging.getLogger(__name__)

NUM_READERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPaths:
    """Where a trainer finds the other services and keeps its own files."""

    coordinator: str
    """address, or the file of the run's descriptor"""
    origin: Path
    """folder of the origin's store, on this machine"""
    folder: Path | None = None
    """folder of the node's keys and receipts; None: `node` in the run directory"""
    owner: Path | None = None
    """file of the owner's key; None: one is created in the folder"""
    authority: Path | None = None
    """file of certificates to trust; None: those of the system"""


async def run_trainer(config: RunConfig, place: TrainerPaths, *, fresh: bool = False, ranks: Ranks = ONE) -> int:
    """Train a swarm's policy to the last step, from the newest checkpoint if there is one. Rank 0 calls this."""
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
            )
        )
        check_params(config, session.params)
        reporter = TrainerReporter(run=run, console=console, tracker=tracker, spans=session.spans)
        train = partial(_train, config, reporter, session, place, ranks)
        if ranks.mesh is None:
            await session.run(outlast_disk(train, run.path, session.waits, stopping=session.stopping))
        else:
            await session.run(train())
    return 0


async def _train(
    config: RunConfig, reporter: TrainerReporter, session: Session, place: TrainerPaths, ranks: Ranks
) -> None:
    state = await run_blocking(None, _open_state, config, reporter, ranks)
    path, descriptor, params = reporter.run.path, session.descriptor, session.params
    expected = describe_policy(config, state.policy)
    first_root = ""
    if descriptor.tasks:
        recipe = await read_recipe(session, find_folder(place, reporter.run))
        check_recipe(config, recipe)
        first_root = recipe.weights
    versions = Versions(path / "versions", config.policy)
    publisher = Publisher(
        versions,
        session.client,
        OriginFolder(place.origin, run=descriptor.run, publisher=descriptor.publisher),
        session.waits,
        newest=session.answer.newest_version,
        first_root=first_root,
        spans=session.spans,
        list_awaited=lambda: list_awaited(config, path),
    )
    session.read_state = lambda: RoleState(version=publisher.newest)
    terms = RunTerms(
        run=descriptor.run,
        coordinator=descriptor.coordinator,
        async_level=params.async_level,
        expected=expected,
    )
    async with ParserPool(size=NUM_READERS) as parsers:
        read = partial(read_sandboxed, parsers, limit_files(params, expected))
        batches = BatchReader(session.client, read, session.waits, path / "batches", terms)
        trainer = Trainer(
            config, reporter, batches, publisher, versions, session.waits, stopping=session.stopping, state=state
        )
        await trainer.run()
    stopped = session.stopping.is_set() and trainer.step < config.steps
    logger.info(f"stopped after step {trainer.step}" if stopped else f"finished: step {trainer.step} was the last")


def find_folder(place: TrainerPaths, run: RunDir) -> Path:
    """The folder of the node."""
    return place.folder or run.path / "node"


def check_config(config: RunConfig) -> RunConfig:
    """Reject settings that do not apply to a swarm's trainer."""
    if config.beacon:
        raise ConfigError("beacon: in a swarm the coordinator makes the beacons; use it only with `shoal train`")
    check_swarm(config)
    return config


def check_recipe(config: RunConfig, recipe: Recipe) -> None:
    """Reject rewards that differ from what the prompts state, and other versions or groups than validators expect."""
    if config.length != recipe.length:
        raise ConfigError("length: the run's recipe has different target lengths; they were fixed at its creation")
    if config.policy.publish_dtype != recipe.dtype:
        words = f"{config.policy.publish_dtype} here and {recipe.dtype} in the run's recipe"
        raise ConfigError(f"policy.publish_dtype: {words}; it was fixed when the run was created")
    if config.batch.filter != recipe.filter:
        words = f"{config.batch.filter} here and {recipe.filter} in the run's recipe".lower()
        raise ConfigError(f"batch.filter: {words}; it was fixed when the run was created")


def check_params(config: RunConfig, params: RunParams) -> None:
    """Reject settings that contradict the run's fixed parameters."""
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
            raise ConfigError(f"{key}: the run has {theirs}, got {ours}; it was fixed when the run was created")


def count_most(config: RunConfig) -> int:
    """Most groups that are sampled for a step, as counted by `shoal train`."""
    return int(config.batch.groups * config.batch.max_oversample)


def describe_policy(config: RunConfig, policy: Policy) -> GroupSpec:
    """The properties of every group of the run."""
    return GroupSpec(
        vocab_size=int(policy.model.config.vocab_size),
        context=int(policy.model.config.max_position_embeddings),
        temperature=config.engine.temperature,
        targets=frozenset(config.length.targets if config.length.mode != "none" else ()),
    )


def _open_state(config: RunConfig, reporter: TrainerReporter, ranks: Ranks) -> TrainState:
    """Load the newest checkpoint, and remove traces of later steps from the run directory. Blocking."""
    tune_process(ranks.divide_threads(config.threads))
    checkpoint = find_newest(reporter.run.checkpoints_path)
    state = open_state(config, checkpoint, ranks)
    reporter.run.link()
    reporter.run.truncate_after(state.step if checkpoint is not None else -1)
    logger.info(f"{state.policy.num_parameters:,} parameters, run directory {reporter.run.path}")
    return state
