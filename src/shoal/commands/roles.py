"""`shoal worker`, `validator`, `trainer`, `evaluator` and `origin`: the roles of a swarm other than the coordinator.

Exit codes in addition to the common ones: 3, the run has excluded this node, and restarting it would not help.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, flag
from shoal.commands.weights import add_origin, serve_origin
from shoal.errors import EXIT_UNWANTED, ConfigError, TrainerError
from shoal.node.disk_full import outlast_disk
from shoal.util.console import LiveLine
from shoal.util.disk import guard_disk
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits

if TYPE_CHECKING:
    from shoal.node.session import Role, Session
    from shoal.recipe import Recipe
    from shoal.submission.read import ParserPool
    from shoal.toploc.calibration import Calibration
    from shoal.train.eval import EvalResult
    from shoal.validator.judge import Judge
    from shoal.worker.behaviour import WorkerBehaviour

MakeBehaviour = Callable[["Session", "Recipe"], Awaitable["WorkerBehaviour"]]
logger = logging.getLogger(__name__)
MakeJudge = Callable[["Session", "Recipe", "Calibration", "ParserPool"], "Judge"]


def _add_trainer(parser: CommandParser) -> None:
    add = parser.add_argument
    text = "coordinator's address, or path of the run's descriptor"
    add("--coordinator", required=True, type=common.parse_where, metavar="URL", help=text)
    add("--origin", type=Path, required=True, metavar="DIR", help="folder that `shoal origin` serves on this machine")
    text = "folder for the node's keys and receipts (default: `node` in the run's folder)"
    add("--folder", type=Path, metavar="DIR", help=text)
    add("--owner", type=Path, metavar="FILE", help="the owner's key (default: created in the node's folder)")


def add_node(parser: CommandParser, folder: str) -> None:
    """Flags of a command that runs a node."""
    add = parser.add_argument
    text = "coordinator's address, or path of the run's descriptor"
    add("where", type=common.parse_where, metavar="URL", help=text)
    text = "folder for keys, weights and receipts (%(default)s)"
    add("--folder", type=Path, default=Path(folder), metavar="DIR", help=text)
    add("--owner", type=Path, metavar="FILE", help="the owner's key (default: created in DIR)")
    add("--coordinator", metavar="HEX", help="expected public key of the coordinator (default: trust the first one)")
    common.AUTHORITY(parser)
    TASKS(parser)
    add("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)")


_TASK_SET = "the run's task set, if it has one (default: from the coordinator)"
TASKS = flag("--tasks", type=Path, metavar="FILE", help=_TASK_SET)


def add_engine(parser: CommandParser) -> None:
    """Flags of a command that generates rollouts."""
    add = parser.add_argument
    add("--slots", type=int, default=256, metavar="N", help="maximum number of concurrent rollouts (%(default)s)")
    add("--memory", type=int, default=4096, metavar="MB", help="maximum memory for rollouts in progress (%(default)s)")
    common.DEVICE(parser)


def run_trainer(args: argparse.Namespace) -> int:
    """Train a swarm's policy on its batches, or resume."""
    config = common.load_inputs(args.inputs)
    common.log_loading(f"trainer of {config.name}, coordinator {args.coordinator}")
    from shoal.learner.parallel import Ranks
    from shoal.net.retry import RefusedError
    from shoal.node.session import SessionError
    from shoal.train.resume import run_as_rank
    from shoal.train.rundir import run_path
    from shoal.trainer.run import TrainerPaths
    from shoal.trainer.run import run_trainer as train

    place = TrainerPaths(authority=args.ca, **common.pick_flags(args, "coordinator", "origin", "folder", "owner"))

    def work(ranks: Ranks) -> int:
        run = partial(train, config, place, fresh=args.fresh, ranks=ranks)
        if ranks.mesh is not None:  # ranks cannot begin again by themselves: they end, and are started again
            return common.run_until_stopped(run())
        return common.run_until_stopped(outlast_disk(run, run_path(config), RoleWaits("trainer")))

    try:
        return run_as_rank(config.policy.device, work)
    except (SessionError, TrainerError, RefusedError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_UNWANTED


def run_evaluator(args: argparse.Namespace) -> int:
    """Evaluate each new version of a trainer on held-out tasks."""
    named, config = common.load_run(args.inputs)
    from shoal.train.rundir import run_path

    run = named or run_path(config)
    logger.info(f"evaluator of {run}: loading libraries")
    from shoal.trainer.evaluator import run_evaluator as evaluate

    def report(version: int, result: "EvalResult") -> None:
        logger.info("v%d  pass@1 %s  greedy %s", version, result.pass_1, result.greedy)

    return asyncio.run(outlast_disk(lambda: evaluate(config, run, report=report), run, RoleWaits("evaluator")))


def run_origin(args: argparse.Namespace) -> int:
    """Serve a run's versions to relays; the local trainer adds them."""
    common.check_least("--keep", args.keep, 1)
    common.check_least("--anchor-every", args.anchor_every, 1)

    return common.run_until_stopped(outlast_disk(lambda: _serve(args), args.data, RoleWaits("origin")))


async def _serve(args: argparse.Namespace) -> int:

    args.data.mkdir(parents=True, exist_ok=True)
    with closing(SpanLog(args.data / "spans.jsonl", "origin")) as spans:
        async with serve_origin(args, common.load_key(args.key), spans) as service:
            await service.run()
    return 0


def run_worker(args: argparse.Namespace) -> int:
    """Lend this machine to a run: generate rollouts and earn credit."""
    check_engine(args)
    return run_node(args, lambda: write_work(args, _make_behaviour))


def run_validator(args: argparse.Namespace) -> int:
    """Judge submissions, for owners that the run's parameters list as validators."""
    common.check_least("--threads", args.threads, 0)
    return run_node(args, lambda: judge_work(args, _make_judge))


def check_engine(args: argparse.Namespace) -> None:
    """Check the flags of `add_engine`."""
    common.check_least("--threads", args.threads, 0)
    common.check_least("--slots", args.slots, 1)
    common.check_least("--memory", args.memory, 1)


def run_node(args: argparse.Namespace, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a node to its end; while the disk is full, work that needs it waits."""
    common.check_key("--coordinator", args.coordinator)
    # A wrong path is reported now, not when all is loaded and the coordinator answers.
    if args.tasks is not None:
        common.read_file(args.tasks, 1)
    if args.owner is not None:
        common.load_key(args.owner)
    if not common.is_address(args.where):
        from shoal.node.known_run import load_run

        load_run(Path(args.where))
    from shoal.train.rundir import hold_dir

    # Before anything that takes long to load. Two processes in one folder would use each other's leases.
    with guard_disk(args.folder), hold_dir(args.folder, "choose another --folder"):
        logger.info(f"connecting to {args.where}; loading libraries first")
        from shoal.node.session import FinishedError, SessionError
        from shoal.util.process import tune_process

        tune_process(args.threads)
        try:
            return common.run_until_stopped(_run_to_end(outlast_disk(work, args.folder, RoleWaits("node"))))
        except FinishedError as end:
            logger.info("%s", end)
            return 0
        except SessionError as error:
            print(f"shoal: {error}{name_details(args.where, args.folder, error.code)}", file=sys.stderr)
            return EXIT_UNWANTED


def name_details(where: str, folder: Path, code: str) -> str:
    """Which command says more about why a node was banned; empty for any other refusal."""
    from shoal.net.api_error import BANNED

    if code != BANNED:
        return ""
    return f"; for details: shoal explain {where} {common.load_key(folder / 'node.key').public[:16]}"


async def _run_to_end(work: Coroutine[Any, Any, None]) -> int:
    await work
    return 0


async def write_work(args: argparse.Namespace, make_behaviour: MakeBehaviour) -> None:
    """Work until the run is finished, a signal arrives, or the run excludes this node."""
    from shoal.node.recipe import fetch_recipe
    from shoal.node.session import Role
    from shoal.node.weights import open_weights
    from shoal.policy.model import choose_device
    from shoal.worker.orders import WorkLimits
    from shoal.worker.worker import Worker

    line, limits = LiveLine(), WorkLimits(memory_mb=args.memory)
    async with _open_session(args, Role.WORKER) as session:
        behaviour = await make_behaviour(session, await fetch_recipe(session, args.folder, tasks=args.tasks))
        keep = session.params.async_level + 2

        async def write_rollouts() -> None:
            async with open_weights(session, args.folder / "weights", keep=keep) as weights:
                engine = {"slots": args.slots, "device": choose_device(args.device)}
                worker = Worker(session, weights, behaviour, args.folder, limits=limits, **engine)
                async with line.show(worker.describe):
                    await worker.run()
                _log_end(session, worker.describe())
                if session.stopping.is_set():
                    leases = "leases returned" if worker.has_left else "leases not returned, so they expire"
                    print(f"shoal: stopped; {leases}; the same command resumes", file=sys.stderr)

        await session.run(outlast_disk(write_rollouts, args.folder, session.waits, stopping=session.stopping))


def _log_end(session: "Session", text: str) -> None:
    end = "the run is finished"
    logger.info("%s", text if session.stopping.is_set() or end in text else f"{text}; {end}")


def _open_session(args: argparse.Namespace, role: "Role") -> AbstractAsyncContextManager["Session"]:
    """Open a session according to the flags."""
    from shoal.node.session import open_session

    own = common.pick_flags(args, "owner", "coordinator")
    return open_session(args.where, args.folder, role=role, authority=args.ca, **own)


async def _make_behaviour(session: "Session", recipe: "Recipe") -> "WorkerBehaviour":
    from shoal.worker.behaviour import WorkerBehaviour

    return WorkerBehaviour(recipe)


def _make_judge(session: "Session", recipe: "Recipe", calibration: "Calibration", parser_pool: "ParserPool") -> "Judge":
    from shoal.validator.judge import Judge

    return Judge(recipe, calibration, parser_pool)


async def judge_work(args: argparse.Namespace, make_judge: MakeJudge) -> None:
    """Judge until the run is finished and judged, a signal arrives, or the run excludes this node."""
    from shoal.node.recipe import fetch_recipe
    from shoal.node.session import Role
    from shoal.node.weights import PolicyCache, open_weights
    from shoal.policy.model import choose_device
    from shoal.submission.read import ParserPool
    from shoal.validator.validator import Validator

    line = LiveLine()
    async with _open_session(args, Role.VALIDATOR) as session:
        recipe = await fetch_recipe(session, args.folder, tasks=args.tasks)
        calibration = await fetch_calibration(session, recipe, args.folder / "calibration.json")
        keep = session.params.async_level + 3

        async def give_verdicts() -> None:
            async with (
                open_weights(session, args.folder / "weights", keep=keep) as weights,
                ParserPool() as parser_pool,
            ):
                policies = PolicyCache(session, weights, recipe, args.folder, device=choose_device(args.device))
                judge = make_judge(session, recipe, calibration, parser_pool)
                validator = Validator(session, judge, policies, args.folder)
                async with line.show(validator.describe):
                    await validator.run()
                _log_end(session, validator.describe())
                if session.stopping.is_set():
                    print("shoal: stopped; the same command resumes", file=sys.stderr)

        await session.run(outlast_disk(give_verdicts, args.folder, session.waits, stopping=session.stopping))


async def fetch_calibration(session: "Session", recipe: "Recipe", path: Path) -> "Calibration":
    """The calibration named by the recipe, from the folder or from the coordinator."""
    from shoal.node.recipe import fetch_by_hash
    from shoal.toploc.calibration import load_calibration

    read, otherwise = session.client.read_calibration, "a calibration other than the one in the run's recipe"
    await fetch_by_hash(session, path, recipe.calibration, "calibration", read, otherwise=otherwise)
    calibration = load_calibration(path)
    if calibration.model_hash != recipe.model or calibration.dtype != recipe.dtype:
        raise ConfigError("the run's calibration and recipe are for different models")
    return calibration


_RESUMES = "; the same command resumes"
COMMANDS = (
    CliCommand(
        "trainer", run_trainer, (common.name_inputs(), _add_trainer, common.AUTHORITY, common.FRESH, common.NPROC)
    ),
    CliCommand("evaluator", run_evaluator, (common.name_inputs("CONFIG is a TOML file or a run directory"),)),
    CliCommand("origin", run_origin, (add_origin,)),
    CliCommand("worker", run_worker, (partial(add_node, folder="worker"), add_engine), resumes=_RESUMES),
    CliCommand("validator", run_validator, (partial(add_node, folder="validator"), common.DEVICE), resumes=_RESUMES),
)
