"""`shoal canary`: bad work under a name that only the operator knows, to see whether validators look.

    shoal canary seal URL --key operator.key     once, early: a stock of owners, noted in the ledger and named nowhere
    shoal canary plant URL --key operator.key    now and then: one of them joins, cheats, and is revealed once judged

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
from pathlib import Path

from shoal.commands.swarm_flags import Commands, add_asking, add_parser, call_later
from shoal.commands.work import add_engine

COUNT = 16


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    text = "plant bad work under a name that only the operator knows, to see whether validators look"
    actions = add_parser(commands, "canary", text).add_subparsers(metavar="ACTION", title="actions", required=True)
    seal = _add_action(actions, "seal", "note owners that will cheat, without naming them; do this early", "run_seal")
    most = f"how many; more than you will need says less (default: {COUNT})"
    seal.add_argument("--count", type=int, default=COUNT, metavar="N", help=most)
    text = "let a sealed owner join and cheat, wait for a verdict, then reveal it; again: goes on with one that is out"
    plant = _add_action(actions, "plant", text, "run_plant", module="canary_plant")
    plant.add_argument("--attack", default="int8", metavar="NAME", help="see `shoal redteam list` (%(default)s)")
    plant.add_argument("--wait", type=int, default=3600, metavar="S", help="for a verdict, at most (%(default)s)")
    plant.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)")
    add_engine(plant)
    _add_action(actions, "reveal", "reveal those that are planted and not at work, judged or not", "run_reveal")
    listing = add_parser(actions, "list", "list the canaries of a folder, and where they are")
    listing.add_argument("--json", action="store_true", help="print JSON")
    _add_folder(listing)
    listing.set_defaults(command=call_later("canary_deeds", "run_list"))


def _add_action(
    actions: Commands, name: str, text: str, function: str, *, module: str = "canary_deeds"
) -> argparse.ArgumentParser:
    parser = add_asking(actions, name, text)
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the operator's key")
    _add_folder(parser)
    parser.set_defaults(command=call_later(module, function))
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    text = "the operator's canaries, secret until revealed (%(default)s)"
    parser.add_argument("--folder", type=Path, default=Path("canaries"), metavar="DIR", help=text)
