"""`shoal redteam`: every attack against a swarm on this machine, and what became of it; and its parts by themselves.

    shoal redteam               the matrix: attack by check, what it brought, what honest work was done beside it
    shoal redteam list          the attacks
    shoal redteam work URL      a worker that cheats in one way
    shoal redteam judge URL     a validator that lies in one way
    shoal redteam crew URL      many cheats in one process

Exit codes beside those of all commands: 1, an attack did not meet its fate or an honest node was punished. What a
command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands
from shoal.commands.live import LiveLine
from shoal.commands.serving import Ending, check_least, run_loop
from shoal.commands.work import add_engine, add_node, check_engine, judge_work, run_node, write_work

if TYPE_CHECKING:
    from shoal.node.session import Session
    from shoal.recipe import Recipe
    from shoal.submission.jail import Jail
    from shoal.toploc.calibration import Calibration
    from shoal.validator.judge import Judge
    from shoal.worker.author import Author

_WAYS = "`shoal redteam list` lists the ways"


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    text = "try every way of cheating on a swarm on this machine, and print what became of each"
    redteam = commands.add_parser("redteam", help=text, description=text, allow_abbrev=False)
    add = redteam.add_argument
    add("--attack", dest="attacks", nargs="+", action="extend", metavar="NAME", help=f"only these; {_WAYS}")
    add("--quick", action="store_true", help="a few of each kind, some minutes on two cores (default: all)")
    add("--json", action="store_true", help="print one line of JSON instead of tables")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="where the run's folder is made (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the run (%(default)s)")
    redteam.set_defaults(command=run_matrix)
    parts = redteam.add_subparsers(metavar="COMMAND", title="its parts by themselves", required=False)
    parts.add_parser("list", help="list the attacks", allow_abbrev=False).set_defaults(command=run_list)
    cheat = add_node(parts, "work", "work for a run of your own, and cheat in one way")
    cheat.add_argument("--attack", required=True, metavar="NAME", help=f"how; {_WAYS}")
    add_engine(cheat)
    cheat.set_defaults(command=run_cheat)
    _add_judge(parts)
    _add_crew(parts)


def _add_judge(parts: Commands) -> None:
    judge = add_node(parts, "judge", "judge for a run of your own, and lie in one way")
    judge.add_argument("--lie", required=True, metavar="NAME", help="how; a wrong name is answered with all")
    judge.set_defaults(command=run_liar)


def _add_crew(parts: Commands) -> None:
    text = "cheat in many ways, one after another, each as nodes of its own"
    crew = parts.add_parser("crew", help=text, description=text, allow_abbrev=False)
    add = crew.add_argument
    add("where", metavar="URL", help="address of the coordinator of a run of your own")
    add("--attack", dest="attacks", nargs="+", action="extend", required=True, metavar="NAME", help=f"how; {_WAYS}")
    add("--folder", type=Path, default=Path("crew"), metavar="DIR", help="keys, receipts, attempts (%(default)s)")
    add("--repeat", type=int, default=1, metavar="N", help="times that each is tried (%(default)s)")
    add("--abreast", type=int, default=3, metavar="N", help="tried at a time (%(default)s)")
    add("--submissions", type=int, default=12, metavar="N", help="judged of each at most (%(default)s)")
    add("--seconds", type=int, default=90, metavar="N", help="for each at most (%(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads (%(default)s)")
    add_engine(crew)
    crew.set_defaults(command=run_crew)


def run_matrix(args: argparse.Namespace) -> int:
    """Run the field and tell what came of it."""
    from shoal.redteam.field import make_plan, run_field
    from shoal.redteam.report import write_report

    plan = make_plan(args.attacks, quick=args.quick, seed=args.seed, out=args.out)
    note = (lambda _: None) if args.json else _note
    field = run_field(plan, note)
    indoors = None
    if field.code == 0:
        from shoal.redteam.indoors import measure_indoors

        indoors = measure_indoors(field.prepared, plan.offline, plan.careers, note)
    report = write_report(field, indoors)
    print(report.to_json() if args.json else report.to_text())
    return field.code or report.code


def run_list(args: argparse.Namespace) -> int:
    """All attacks, and what must become of them."""
    from shoal.redteam.registry import ATTACKS

    for attack in ATTACKS.values():
        print(f"{attack.name:16} {attack.fate:10} {attack.text}")
    return 0


def run_cheat(args: argparse.Namespace) -> int:
    """Work and cheat until the run is finished, a signal comes, or the run does not want this node any more."""
    check_engine(args)
    from shoal.redteam.registry import check_cheat

    check_cheat(args.attack)
    return run_node(args, lambda: write_work(args, partial(_make_cheat, args.attack)))


def run_liar(args: argparse.Namespace) -> int:
    """Judge and lie until the run is finished, a signal comes, or the run does not want this node any more."""
    check_least("--threads", args.threads, 0)
    from shoal.redteam.liars.registry import check_lie

    check_lie(args.lie)
    return run_node(args, lambda: judge_work(args, partial(_make_liar, args.lie)))


def run_crew(args: argparse.Namespace) -> int:
    """Try all that was asked for; whatever became of it, that is the end."""
    check_engine(args)
    for flag in ("repeat", "abreast", "submissions", "seconds"):
        check_least(f"--{flag}", getattr(args, flag), 1)
    from shoal.redteam.crew import Crew, Limits, parse_trials
    from shoal.runtime import tune_process

    trials = parse_trials(args.attacks, args.repeat)
    tune_process(args.threads)
    line, limits = LiveLine(), Limits(submissions=args.submissions, seconds=args.seconds)
    crew = Crew(args.where, args.folder, limits=limits, slots=args.slots, memory_mb=args.memory, note=line.note)

    async def work() -> int:
        async with line.show(crew.describe):
            await crew.run(trials, abreast=args.abreast)
        return 0

    return run_loop(work(), Ending())


async def _make_cheat(attack: str, session: "Session", recipe: "Recipe") -> "Author":
    from shoal.redteam.registry import make_authors

    return make_authors(attack, recipe)[0]


def _make_liar(lie: str, session: "Session", recipe: "Recipe", calibration: "Calibration", jail: "Jail") -> "Judge":
    from shoal.redteam.liars.registry import make_liar

    return make_liar(lie, recipe, calibration, jail, session.client)


def _note(text: str) -> None:
    print(text, flush=True)
