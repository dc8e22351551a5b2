"""`shoal worker` and `shoal validator`: nodes that join a run and work for it.

Exit codes beside those of all commands: 3, the run does not want this node any more; starting it again would not help.
What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.broadcast_flags import Commands
from shoal.commands.live import LiveLine
from shoal.commands.serving import check_least
from shoal.errors import EXIT_UNWANTED, ConfigError

if TYPE_CHECKING:
    from shoal.node.session import Role, Session
    from shoal.recipe import Recipe
    from shoal.submission.jail import Jail
    from shoal.toploc.calibration import Calibration
    from shoal.validator.judge import Judge
    from shoal.worker.author import Author

MakeAuthor = Callable[["Session", "Recipe"], Awaitable["Author"]]
MakeJudge = Callable[["Session", "Recipe", "Calibration", "Jail"], "Judge"]
_WHERE = "address of the coordinator, or the file of the run's descriptor"


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    worker = add_node(commands, "worker", "lend this machine to a run: write rollouts for it, and be credited")
    add_engine(worker)
    worker.set_defaults(command=run_worker)
    validator = add_node(commands, "validator", "judge what workers hand in; the run's parameters name who may")
    validator.set_defaults(command=run_validator)


def add_node(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """The parser of a command that is a node of a run."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("where", metavar="URL", help=_WHERE)
    add("--folder", type=Path, default=Path(name), metavar="DIR", help="keys, weights, receipts (%(default)s)")
    add("--owner", type=Path, metavar="FILE", help="the owner's key (default: one is made in DIR)")
    add("--coordinator", metavar="HEX", help="public key that the coordinator must have (default: any, the first time)")
    add("--ca", type=Path, metavar="FILE", help="certificates to trust (default: the system's)")
    add("--tasks", type=Path, metavar="FILE", help="the run's task set, if it has one (default: from the coordinator)")
    add("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)")
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Flags of who writes rollouts."""
    add = parser.add_argument
    add("--slots", type=int, default=256, metavar="N", help="rollouts written side by side, at most (%(default)s)")
    add("--memory", type=int, default=4096, metavar="MB", help="for rollouts under way, at most (%(default)s)")


def run_worker(args: argparse.Namespace) -> int:
    """Work until the run is finished or a signal comes."""
    check_engine(args)
    return run_node(args, lambda: write_work(args, _make_author))


def run_validator(args: argparse.Namespace) -> int:
    """Judge until the run is finished or a signal comes."""
    check_least("--threads", args.threads, 0)
    return run_node(args, lambda: judge_work(args, _make_judge))


def check_engine(args: argparse.Namespace) -> None:
    """Refuse an engine without room."""
    check_least("--threads", args.threads, 0)
    check_least("--slots", args.slots, 1)
    check_least("--memory", args.memory, 1)


def run_node(args: argparse.Namespace, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a node to its end; what it needs a disk for waits while there is none."""
    from shoal.disk import guard_disk
    from shoal.keys import check_public
    from shoal.node.room import outlast_disk
    from shoal.node.session import SessionError
    from shoal.node.waits import RoleWaits
    from shoal.runtime import tune_process

    tune_process(args.threads)
    try:
        if args.coordinator is not None:
            check_public(args.coordinator)
        with guard_disk(args.folder), _lock_folder(args.folder):
            asyncio.run(outlast_disk(work, args.folder, RoleWaits("node", note=LiveLine().note)))
    except SessionError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_UNWANTED
    return 0


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """One process per node: two would answer for each other's leases."""
    from shoal.rundir import lock_dir

    lock = lock_dir(folder)
    try:
        yield
    finally:
        os.close(lock)


async def write_work(args: argparse.Namespace, make_author: MakeAuthor) -> None:
    """Work until the run is finished, a signal comes, or the run does not want this node any more."""
    from shoal.node.recipe import fetch_recipe
    from shoal.node.room import outlast_disk
    from shoal.node.session import Role
    from shoal.node.weights import open_weights
    from shoal.worker.intake import WorkLimits
    from shoal.worker.loop import Worker

    line, limits = LiveLine(), WorkLimits(memory_mb=args.memory)
    async with _open_session(args, Role.WORKER, line) as session:
        author = await make_author(session, await fetch_recipe(session, args.folder, tasks=args.tasks))
        keep = session.params.async_level + 2

        async def write_rollouts() -> None:
            async with open_weights(session, args.folder / "weights", keep=keep) as weights:
                worker = Worker(session, weights, author, args.folder, limits=limits, slots=args.slots)
                async with line.show(worker.describe):
                    await worker.run()
                line.note(worker.describe())

        await session.run(outlast_disk(write_rollouts, args.folder, session.waits, stopping=session.stopping))


def _open_session(args: argparse.Namespace, role: "Role", line: LiveLine) -> AbstractAsyncContextManager["Session"]:
    """A session as the flags say."""
    from shoal.node.session import open_session

    return open_session(
        args.where,
        args.folder,
        role=role,
        owner=args.owner,
        coordinator=args.coordinator,
        authority=args.ca,
        note=line.note,
    )


async def _make_author(session: "Session", recipe: "Recipe") -> "Author":
    from shoal.worker.author import Author

    return Author(recipe)


def _make_judge(session: "Session", recipe: "Recipe", calibration: "Calibration", jail: "Jail") -> "Judge":
    from shoal.validator.judge import Judge

    return Judge(recipe, calibration, jail)


async def judge_work(args: argparse.Namespace, make_judge: MakeJudge) -> None:
    """Judge until the run is finished, a signal comes, or the run does not want this node any more."""
    from shoal.node.recipe import fetch_recipe
    from shoal.node.room import outlast_disk
    from shoal.node.session import Role
    from shoal.node.weights import open_weights
    from shoal.submission.jail import Jail
    from shoal.validator.loop import Validator
    from shoal.validator.shelf import Shelf

    line = LiveLine()
    async with _open_session(args, Role.VALIDATOR, line) as session:
        recipe = await fetch_recipe(session, args.folder, tasks=args.tasks)
        calibration = await fetch_calibration(session, recipe, args.folder / "calibration.json")
        keep = session.params.async_level + 3

        async def give_verdicts() -> None:
            async with open_weights(session, args.folder / "weights", keep=keep) as weights, Jail() as jail:
                shelf = Shelf(session, weights, recipe)
                judge = make_judge(session, recipe, calibration, jail)
                validator = Validator(session, judge, shelf, args.folder)
                async with line.show(validator.describe):
                    await validator.run()
                line.note(validator.describe())

        await session.run(outlast_disk(give_verdicts, args.folder, session.waits, stopping=session.stopping))


async def fetch_calibration(session: "Session", recipe: "Recipe", path: Path) -> "Calibration":
    """The calibration that the recipe names, from the folder or from the coordinator."""
    from shoal.files import write_atomic
    from shoal.node.session import ASK_S
    from shoal.toploc.calibration import load_calibration

    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != recipe.calibration:
        data = await session.waits.insist(
            "calibration", session.client.read_calibration, for_whom="the coordinator", timeout_s=ASK_S
        )
        if hashlib.sha256(data).hexdigest() != recipe.calibration:
            raise ConfigError("the coordinator has another calibration than the run's recipe says")
        write_atomic(path, data)
    calibration = load_calibration(path)
    if calibration.model_hash != recipe.model or calibration.dtype != recipe.dtype:
        raise ConfigError("the run's calibration is of another model than its recipe")
    return calibration
