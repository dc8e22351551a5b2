"""`shoal redteam`: run every attack against a swarm on this machine and report the outcome; also attacks one by one.

    shoal redteam               the matrix: outcome and gain per attack and check, and the impact on honest nodes
    shoal redteam list          the attacks
    shoal redteam work URL      a worker that cheats in one way
    shoal redteam judge URL     a validator that lies in one way
    shoal redteam campaign URL  many attacks in one process

Exit codes in addition to the common ones: 1 for an unexpected outcome, or if an honest node was penalised.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.common import (
    DEVICE,
    WHERE,
    CliCommand,
    CommandParser,
    StopCode,
    check_least,
    flag,
    run_until_stopped,
)
from shoal.commands.roles import add_engine, add_node, check_engine, judge_work, run_node, write_work
from shoal.redteam.registry import LIES, check_attack, check_lie, check_worker_attack, make_behaviours, read_attacks
from shoal.util.console import LiveLine

if TYPE_CHECKING:
    from shoal.node.session import Session
    from shoal.recipe import Recipe
    from shoal.submission.read import ParserPool
    from shoal.toploc.calibration import Calibration
    from shoal.validator.judge import Judge
    from shoal.worker.behaviour import WorkerBehaviour

logger = logging.getLogger(__name__)
_WAYS = "see `shoal redteam list`"


def _add_redteam(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--attack", dest="attacks", nargs="+", action="extend", metavar="NAME", help=f"only these; {_WAYS}")
    add("--quick", action="store_true", help="a few of each kind; takes minutes on two cores (default: all)")
    add("--json", action="store_true", help="print one line of JSON instead of tables")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="where to create the run's folder (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the run (%(default)s)")


def _add_campaign(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "--attack",
        dest="attacks",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME",
        help=f"attacks to run; {_WAYS}",
    )
    text = "folder for keys, receipts and attempts (%(default)s)"
    add("--folder", type=Path, default=Path("campaign"), metavar="DIR", help=text)
    add("--repeat", type=int, default=1, metavar="N", help="number of attempts per attack (%(default)s)")
    add("--abreast", type=int, default=3, metavar="N", help="number of concurrent attempts (%(default)s)")
    add("--submissions", type=int, default=12, metavar="N", help="maximum judged submissions per attempt (%(default)s)")
    add("--seconds", type=int, default=90, metavar="N", help="maximum seconds per attempt (%(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads (%(default)s)")


def run_matrix(args: argparse.Namespace) -> int:
    """Run every attack on a local swarm, and report the outcomes."""
    _check_attacks(args.attacks or ())
    check_least("--seed", args.seed, 0)
    logger.info("loading libraries")
    from shoal.redteam.report import write_report
    from shoal.redteam.swarm import make_plan, run_red_team

    plan = make_plan(args.attacks, quick=args.quick, seed=args.seed, out=args.out)
    swarm = run_red_team(plan)
    logger.info("the swarm has stopped; checking its ledger and writing the report")
    report = write_report(swarm)
    print(json.dumps(report.figures) if args.json else report.text)
    return swarm.code or report.code


def _check_attacks(attacks: Sequence[str]) -> None:
    """Reject an unknown attack before anything is loaded; each is `NAME` or `NAME@SHARE`."""
    for text in attacks:
        check_attack(text.partition("@")[0])


def run_list(args: argparse.Namespace) -> int:
    """List the attacks."""
    for attack in read_attacks().values():
        print(f"{attack.name:16} {attack.expect:10} {attack.text}")
    return 0


def run_cheat(args: argparse.Namespace) -> int:
    """Run a worker that cheats in one way; for a run of your own."""
    check_engine(args)

    async def make_cheat(session: "Session", recipe: "Recipe") -> "WorkerBehaviour":
        return make_behaviours(args.attack, recipe)[0]

    check_worker_attack(args.attack)
    return run_node(args, lambda: write_work(args, make_cheat))


def run_liar(args: argparse.Namespace) -> int:
    """Run a validator that lies in one way; for a run of your own."""
    check_least("--threads", args.threads, 0)
    check_lie(args.lie)
    return run_node(args, lambda: judge_work(args, partial(_make_liar, args.lie)))


def run_campaign(args: argparse.Namespace) -> int:
    """Run many attacks in one process, each as nodes of its own."""
    check_engine(args)
    for name in ("repeat", "abreast", "submissions", "seconds"):
        check_least(f"--{name}", getattr(args, name), 1)
    _check_attacks(args.attacks)
    logger.info(f"campaign against {args.where}: loading libraries")
    from shoal.redteam.campaign import AttemptLimits, Campaign, parse_attempts
    from shoal.util.process import tune_process

    planned = parse_attempts(args.attacks, args.repeat)
    tune_process(args.threads)
    room = {"slots": args.slots, "memory_mb": args.memory}
    line, limits = LiveLine(), AttemptLimits(submissions=args.submissions, seconds=args.seconds, **room)
    campaign = Campaign(args.where, args.folder, limits)

    async def work() -> int:
        async with line.show(campaign.describe):
            await campaign.run(planned, parallel=args.abreast)
        return 0

    return run_until_stopped(work(), StopCode())


def _make_liar(
    lie: str, session: "Session", recipe: "Recipe", calibration: "Calibration", parser_pool: "ParserPool"
) -> "Judge":
    from shoal.redteam.validators import make_lying_judge

    return make_lying_judge(lie, recipe, calibration, parser_pool, session.client)


_ATTACK = flag("--attack", required=True, metavar="NAME", help=_WAYS)
_LIE = flag("--lie", required=True, metavar="NAME", help=f"{', '.join(LIES[:-1])} or {LIES[-1]}")
_ACTIONS = (
    CliCommand("list", run_list),
    CliCommand("work", run_cheat, (partial(add_node, folder="work"), _ATTACK, add_engine)),
    CliCommand("judge", run_liar, (partial(add_node, folder="judge"), DEVICE, _LIE)),
    CliCommand("campaign", run_campaign, (WHERE, _add_campaign, add_engine)),
)
COMMANDS = (CliCommand("redteam", run_matrix, (_add_redteam,), actions=_ACTIONS),)
