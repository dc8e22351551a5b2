"""Flags of `shoal keygen`, `publish`, `relay`, `pull`, `tree` and `ticket`."""

import argparse
from pathlib import Path
from typing import Any

from shoal.commands import broadcast, origin

Commands = Any
"""argparse's own type for this is private"""


class _Given(argparse.Action):
    """Stores a value, or adds it to a list, and the name of the flag to `given`: a default is nobody's word."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        value = True if self.nargs == 0 else values
        setattr(args, self.dest, [*getattr(args, self.dest), value] if isinstance(self.default, list) else value)
        args.given = {*args.given, self.option_strings[0]}


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_keygen(commands)
    _add_publish(commands)
    _add_relay(commands)
    _add_pull(commands)
    _add_tree(commands)
    _add_ticket(commands)


def _add_parser(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser


def _add_keygen(commands: Commands) -> None:
    parser = _add_parser(commands, "keygen", "make a key: a new file for the secret, its public half on the screen")
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it; an existing file is never touched")
    parser.set_defaults(command=broadcast.run_keygen)


def _add_publish(commands: Commands) -> None:
    text = "publish a checkpoint as a version, and serve it; hands over to an origin that already serves the folder"
    parser = _add_parser(commands, "publish", text)
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="folder of files, or one file; served from there, so leave it as it is")
    add("--version", type=int, required=True, metavar="N", help="number of the version")
    add("--key", type=Path, required=True, metavar="FILE", help="the publisher's key, see `shoal keygen`")
    _add_common(parser)
    add("--shard-size", action=_Given, default="8MiB", metavar="BYTES", help="size of the pieces (%(default)s)")
    text = "a version that relays hold in full, so often (%(default)s)"
    add("--anchor-every", action=_Given, type=int, default=8, metavar="N", help=text)
    _add_serving(parser)
    parser.set_defaults(command=origin.run_publish)


def _add_relay(commands: Commands) -> None:
    parser = _add_parser(commands, "relay", "pull versions from an origin or other relays, and serve them at once")
    _add_sources(parser)
    _add_common(parser)
    parser.add_argument("--max-bytes", metavar="BYTES", help="most bytes kept on disk (default: no limit)")
    _add_serving(parser)
    parser.set_defaults(command=broadcast.run_relay)


def _add_pull(commands: Commands) -> None:
    parser = _add_parser(commands, "pull", "fetch the newest version, or one, as a verified folder OUT/v<N>")
    _add_sources(parser)
    add = parser.add_argument
    add("--run", required=True, metavar="NAME", help="name of the run")
    add("--out", type=Path, default=Path("versions"), metavar="DIR", help="where versions appear (%(default)s)")
    add("--version", type=int, metavar="N", help="version to fetch (default: the newest)")
    add("--follow", action="store_true", help="go on with every newer version")
    add("--keep", type=int, default=2, metavar="N", help="versions to keep (%(default)s)")
    parser.set_defaults(command=broadcast.run_pull)


def _add_tree(commands: Commands) -> None:
    parser = _add_parser(commands, "tree", "show who has which version: origin and relays by their addresses")
    parser.add_argument("urls", nargs="+", metavar="URL", help="e.g. http://127.0.0.1:8600")
    parser.set_defaults(command=broadcast.run_tree)


def _add_ticket(commands: Commands) -> None:
    parser = _add_parser(commands, "ticket", "print a ticket: leave to fetch so many bytes of a run until some time")
    add = parser.add_argument
    add("--key", type=Path, required=True, metavar="FILE", help="the key that signs it: the publisher's, or a signer's")
    add("--run", required=True, metavar="NAME", help="name of the run")
    add("--node", required=True, metavar="HEX", help="public key of who may fetch")
    add("--hours", type=float, default=24.0, metavar="H", help="how long it is good (%(default)s)")
    add("--bytes", default="100GB", metavar="BYTES", help="how much may be fetched (%(default)s)")
    parser.set_defaults(command=broadcast.run_ticket)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run", required=True, metavar="NAME", help="name of the run")
    add("--data", type=Path, required=True, metavar="DIR", help="folder of its own for what is served")
    text = "versions to keep (%(default)s), beside those that lead from an anchor to the newest"
    add("--keep", action=_Given, type=int, default=5, metavar="N", help=text)
    parser.set_defaults(given=frozenset())


def _add_sources(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="origin or relays to fetch from, e.g. http://127.0.0.1:8600")
    add("--publisher", required=True, metavar="HEX", help="public key of the publisher: the only one that is believed")
    add("--ticket", type=Path, metavar="FILE", help="ticket to show, see `shoal ticket`")
    add("--in-flight", type=int, default=4, metavar="N", help="shards fetched at a time (%(default)s)")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, action=_Given, help=text, **options)

    place = "where to serve (%(default)s); port 0: any free one"
    add("--listen", place, default="127.0.0.1:8600", metavar="HOST:PORT")
    add("--rate", "most that is sent, e.g. 200Mbit or 25MB a second (default: no limit)", metavar="RATE")
    add("--peer-rate", "most that is sent to one address (default: no limit)", metavar="RATE")
    add("--tickets", "serve only who shows a ticket signed by the publisher or a signer", nargs=0, default=False)
    add("--signer", "public key whose tickets are good too; repeatable", default=[], metavar="HEX")
    proxied = "limit callers from this machine like all others: a proxy passes strangers on"
    add("--behind-proxy", proxied, nargs=0, default=False)
