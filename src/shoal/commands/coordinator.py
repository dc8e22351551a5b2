"""`shoal coordinator`: serve a run, from its first start to its last step.

The start-up summary goes to stdout, the log to stderr.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.common import CliCommand, CommandParser, name_inputs, parse_address, run_until_stopped, split_inputs
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.coordinator.service import ServiceConfig


def _add_coordinator(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, default=Path("coordinator"), metavar="DIR", help="folder of the run's files (%(default)s)")
    add("--run", metavar="NAME", help="name of the run")
    add("--operator", metavar="HEX", help="public key of the operator (default: a new key, in DIR)")
    add("--listen", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:8700); port 0: any free port")
    add("--public", action="store_true", help="allow an address that other machines can reach")
    add("--url", action="append", metavar="URL", help="public address (default: HOST:PORT); repeatable")
    add("--tls-cert", metavar="FILE", help="certificate chain, PEM (default: no TLS)")
    add("--tls-key", metavar="FILE", help="private key of the certificate, PEM")
    add("--database", metavar="URL", help="postgresql://... (default: SQLite, DIR/ledger.db)")
    text = "bucket for submissions, in quotes: 's3://BUCKET/PREFIX?endpoint=URL&region=NAME' (default: DIR/blobs)"
    add("--blobs", metavar="URL", help=text)
    add("--dry-run", action="store_true", help="print the resolved settings as JSON and exit")


def run_coordinator(args: argparse.Namespace) -> int:
    """Serve a run, or resume it: leases, verdicts, credit, the ledger."""
    from shoal.coordinator.run import hide_password, load_service, serve_run
    from shoal.util.disk import guard_disk

    path, overrides = split_inputs(args.inputs)
    if "@" in (args.database or "") and ":" in args.database.partition("://")[2].partition("@")[0]:
        raise ConfigError(
            "--database: every user of this machine can read a password on a command line; set PGPASSWORD, write it to "
            "~/.pgpass, or put the URL into the settings file or SHOAL_DATABASE"
        )
    flags: dict[str, Any] = {
        "run": args.run,
        "operator": args.operator,
        "urls": args.url,
        "database": args.database,
        "blob_store": args.blobs,
        "tls_certificate": args.tls_cert,
        "tls_key": args.tls_key,
    }
    if args.listen is not None:
        flags["host"], flags["port"] = parse_address(args.listen)
    config = load_service(path, overrides, flags)
    _check_bind(config, is_public=args.public)
    if args.dry_run:
        print(json.dumps(config.model_dump(mode="json") | {"database": hide_password(config.database)}, indent=2))
        return 0
    with guard_disk(args.data):
        return run_until_stopped(serve_run(config, args.data, show=partial(print, flush=True)))


def _check_bind(config: "ServiceConfig", *, is_public: bool) -> None:
    from shoal.net.sockets import is_loopback

    if not is_public and not is_loopback(config.host):
        raise ConfigError(f"{config.host}: reachable from other machines; add --public if that is intended")
    if config.http.behind_proxy and not is_loopback(config.host):
        raise ConfigError("http.behind_proxy: clients could forge their address; listen on 127.0.0.1 only")


_FLAGS = (name_inputs(example="params.steps=100"), _add_coordinator)
COMMANDS = (CliCommand("coordinator", run_coordinator, _FLAGS, settings="shoal.coordinator.run:CoordinatorSettings"),)
