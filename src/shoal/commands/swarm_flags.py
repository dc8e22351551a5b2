"""Flags of `shoal coordinator`, `delegate`, `join`, `leave`, `status`, `explain`, `leaderboard`, `admin` and others.

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Commands = Any
"""argparse's own type for this is private"""
SCOPES = ("work", "validate", "train", "relay")
_WHERE = "address of the coordinator, or the file of the run's descriptor"


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_coordinator(commands)
    _add_delegate(commands)
    _add_join(commands)
    _add_own(commands, "leave", "run_leave", "leave a run as a node; leases are returned")
    _add_status(commands)
    explain = add_asking(commands, "explain", "say all about a submission: checks, numbers, thresholds, postings")
    explain.add_argument("submission", metavar="SUBMISSION", help="its id, e.g. s123")
    explain.set_defaults(command=call_later("swarm_ask", "run_explain"))
    leaders = add_asking(commands, "leaderboard", "list the owners of a run by accepted tokens")
    leaders.set_defaults(command=call_later("swarm_ask", "run_leaderboard"))
    _add_owners(commands)
    _add_admin(commands)


def add_parser(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """A parser of one command."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser


def add_asking(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """A parser of a command that asks a coordinator."""
    parser = add_parser(commands, name, text)
    parser.add_argument("where", metavar="URL", help=_WHERE)
    _add_common(parser)
    return parser


def call_later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """A command of one of the modules beside this one, imported when it is called."""

    def call(args: argparse.Namespace) -> int:
        function: Callable[[argparse.Namespace], int] = getattr(import_module(f"shoal.commands.{module}"), name)
        return function(args)

    return call


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ca", type=Path, metavar="FILE", help="certificates to trust (default: the system's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_coordinator(commands: Commands) -> None:
    text = "serve a run: leases, submissions, verdicts, credit, the ledger; the same command resumes it"
    parser = add_parser(commands, "coordinator", text)
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        metavar="CONFIG key=value",
        help="CONFIG is a TOML file; key=value sets one setting over it, e.g. params.steps=100",
    )
    add("--data", type=Path, default=Path("coordinator"), metavar="DIR", help="folder of the run's files (%(default)s)")
    add("--run", metavar="NAME", help="name of the run")
    add("--operator", metavar="HEX", help="public key whose commands are obeyed (default: a new one, in DIR)")
    add("--listen", metavar="HOST:PORT", help="where to serve (default: 127.0.0.1:8700); port 0: any free one")
    add("--public", action="store_true", help="allow an address that other machines reach")
    add("--url", action="append", metavar="URL", help="address to be reached at (default: HOST:PORT); repeatable")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate with its chain, PEM (default: no TLS)")
    add("--tls-key", type=Path, metavar="FILE", help="key of the certificate, PEM")
    add("--database", metavar="URL", help="postgresql://... (default: SQLite, DIR/ledger.db)")
    add("--blobs", metavar="URL", help="s3://BUCKET/PREFIX for submissions (default: DIR/blobs)")
    add("--dry-run", action="store_true", help="print the resolved settings as JSON and stop")
    parser.set_defaults(command=call_later("swarm_serve", "run_coordinator"))
    parser.describe_settings = _describe_settings  # type: ignore[attr-defined]


def _describe_settings() -> str:
    from shoal.commands.swarm_settings import describe_service

    return describe_service()


def _add_delegate(commands: Commands) -> None:
    parser = add_parser(commands, "delegate", "sign, as an owner, what a node may do for a run and until when")
    add = parser.add_argument
    add("node", metavar="NODE", help="public key of the node")
    add("--owner", type=Path, required=True, metavar="FILE", help="the owner's key, see `shoal keygen`")
    add("--run", required=True, metavar="NAME", help="name of the run")
    _add_allowance(parser)
    add("--out", type=Path, metavar="FILE", help="file to write (default: the screen)")
    parser.set_defaults(command=call_later("swarm_owner", "run_delegate"))


def _add_join(commands: Commands) -> None:
    parser = add_asking(commands, "join", "join a run as a node, or renew: does the work that joining costs")
    add = parser.add_argument
    _add_data(parser)
    add("--owner", type=Path, metavar="FILE", help="the owner's key, to delegate to this node with")
    add("--delegation", type=Path, metavar="FILE", help="what the owner signed elsewhere, see `shoal delegate`")
    add("--coordinator", metavar="HEX", help="public key that the coordinator must have (default: any)")
    _add_allowance(parser)
    parser.set_defaults(command=call_later("swarm_node", "run_join"))
    parser.set_defaults(goes_on="; the node may not have joined yet, the same command begins again")


def _add_own(commands: Commands, name: str, function: str, text: str) -> None:
    parser = add_parser(commands, name, text)
    _add_data(parser)
    _add_common(parser)
    parser.set_defaults(command=call_later("swarm_node", function))


def _add_status(commands: Commands) -> None:
    parser = add_asking(commands, "status", "show a run at a glance, and who waits for whom")
    parser.add_argument("--watch", action="store_true", help="go on until the run is finished")
    parser.set_defaults(command=call_later("swarm_ask", "run_status"))


def _add_owners(commands: Commands) -> None:
    revoke = add_asking(commands, "revoke", "take back, as an owner, all that was delegated to a node")
    revoke.add_argument("node", metavar="NODE", help="public key of the node")
    appeal = add_asking(commands, "appeal", "ask, as an owner, for a second look at a rejected submission")
    appeal.add_argument("submission", metavar="SUBMISSION", help="its id, e.g. s123")
    redeem = add_asking(commands, "redeem", "ask, as an owner, for free credit to be paid out")
    redeem.add_argument("amount", type=int, metavar="AMOUNT", help="in micro-credits")
    redeem.add_argument("--to", default="", metavar="TEXT", help="where to; for the operator")
    redeem.add_argument("--request", metavar="HEX", help="of an earlier try, to ask how it stands (default: a new one)")
    unbond = add_asking(commands, "unbond", "begin, as an owner, to get the bond back")
    unbond.add_argument("--request", metavar="HEX", help="of an earlier try, to ask how it stands (default: a new one)")
    functions = ((revoke, "run_revoke"), (appeal, "run_appeal"), (redeem, "run_redeem"), (unbond, "run_unbond"))
    for parser, function in functions:
        parser.add_argument("--owner", type=Path, required=True, metavar="FILE", help="the owner's key")
        parser.set_defaults(command=call_later("swarm_owner", function))


def _add_admin(commands: Commands) -> None:
    text = "command a coordinator, signed with the operator's key and recorded in the ledger"
    actions = add_parser(commands, "admin", text).add_subparsers(metavar="ACTION", title="actions", required=True)
    for name, about in (("ban", "ban an owner or a node"), ("unban", "lift a ban")):
        parser = _add_action(actions, name, about, "run_ban")
        parser.add_argument("target", metavar="KEY", help="public key of the owner or node")
    _add_action(actions, "stop", "grant no more leases", "run_switch")
    _add_action(actions, "resume", "grant leases again", "run_switch")
    for name, about in (("redeemed", "say that credit was paid out"), ("unredeemed", "say that it could not be")):
        parser = _add_action(actions, name, f"{about}, as its owner asked", "run_redeemed")
        parser.add_argument("request", metavar="REQUEST", help="the owner's request, 32 hex characters")
    params = add_asking(actions, "params", "show the run's parameters, or change some")
    params.add_argument("changes", nargs="*", metavar="name=value", help="e.g. price=2 (default: show all)")
    params.add_argument("--key", type=Path, metavar="FILE", help="the operator's key")
    params.set_defaults(command=call_later("swarm_admin", "run_params"))


def _add_action(actions: Commands, name: str, text: str, function: str) -> argparse.ArgumentParser:
    parser = add_asking(actions, name, text)
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the operator's key")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the ledger")
    parser.set_defaults(command=call_later("swarm_admin", function), action=name)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path("node"), metavar="DIR", help="folder of the node (%(default)s)"
    )


def _add_allowance(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scope", action="append", choices=SCOPES, help="what the node may do; repeatable (default: work)")
    add("--days", type=int, default=30, metavar="N", help="how long (%(default)s)")
    add("--leases", type=int, default=16, metavar="N", help="leases at once, at most (%(default)s)")
