"""Flags of `shoal ledger`."""

import argparse
from pathlib import Path

from shoal.commands.swarm_flags import Commands, add_parser, call_later

_WHERE = "a coordinator's folder, its database (a file or postgresql://...), or its address (http://..., https://...)"


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    text = "check, read and prove what a run's ledger says"
    actions = add_parser(commands, "ledger", text).add_subparsers(metavar="ACTION", title="actions", required=True)
    _add_verify(actions)
    _add_show(actions)
    _add_prove(actions)
    _add_check(actions)
    _add_tasks(actions)


def _add_verify(actions: Commands) -> None:
    text = "recompute everything: chain, signatures, sums, tree, heads, and all tables from the events"
    parser = _add_reading(actions, "verify", text)
    add = parser.add_argument
    add("--head", type=Path, metavar="FILE", help="a head to extend, as nodes keep it: DIR/head.json")
    add("--coordinator", metavar="HEX", help="public key that must have signed it (default: any)")
    add("--copy", type=Path, metavar="FILE", help="with an address: keep the copy, and go on from it the next time")
    parser.set_defaults(command=call_later("ledger", "run_verify"))


def _add_show(actions: Commands) -> None:
    parser = _add_reading(actions, "show", "show an event in full, or the last ones, one per line")
    add = parser.add_argument
    add("event", nargs="?", metavar="EVENT", help="number of an event, or its hash in a database")
    add("--from", dest="first", type=int, metavar="N", help="first event of the list (default: the last ones)")
    add("--count", type=int, default=20, metavar="N", help="events of the list (%(default)s)")
    parser.set_defaults(command=call_later("ledger", "run_show"))


def _add_prove(actions: Commands) -> None:
    text = "print the proof that an event is in the ledger, after checking it; it needs no ledger to be checked again"
    parser = _add_reading(actions, "prove", text, has_json=False)
    parser.add_argument("event", metavar="EVENT", help="number of an event, or its hash in a database")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: the screen)")
    parser.set_defaults(command=call_later("ledger", "run_prove"))


def _add_check(actions: Commands) -> None:
    parser = add_parser(actions, "check", "check a proof that `shoal ledger prove` made, with nothing but a public key")
    add = parser.add_argument
    add("proof", type=Path, metavar="FILE", help="the proof")
    add("--descriptor", type=Path, metavar="FILE", help="the run's descriptor")
    add("--run", metavar="NAME", help="name of the run, without a descriptor")
    add("--coordinator", metavar="HEX", help="the coordinator's public key, without a descriptor")
    parser.set_defaults(command=call_later("ledger", "run_check"))


def _add_tasks(actions: Commands) -> None:
    text = "say what became of each task: all accepted groups with their mean reward, with a signal or without"
    parser = _add_reading(actions, "tasks", text)
    add = parser.add_argument
    add("--recipe", type=Path, required=True, metavar="FILE", help="the run's recipe")
    add("--tasks", type=Path, metavar="FILE", help="its task set, if it has one, in any format that says the same")
    add("--out", type=Path, metavar="FILE", help="JSONL file to write, a line for each group")
    parser.set_defaults(command=call_later("ledger_tasks", "run_tasks"))


def _add_reading(actions: Commands, name: str, text: str, *, has_json: bool = True) -> argparse.ArgumentParser:
    parser = add_parser(actions, name, text)
    parser.add_argument("where", metavar="LEDGER", help=_WHERE)
    parser.add_argument("--ca", type=Path, metavar="FILE", help="certificates to trust (default: the system's)")
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
