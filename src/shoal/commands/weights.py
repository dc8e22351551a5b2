"""`shoal keygen`, `relay` and `weights publish`, `pull`, `tree`, `ticket`: distribute weights over untrusted relays.

`publish` serves a version, or hands it over to the origin that already serves its folder. A hand-over passes on the
flags that the user gave. An origin that was started with different values refuses, so that no flag is ignored. The
command that started the origin can be reused unchanged for the next version.
"""

import argparse
import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, flag
from shoal.errors import ConfigError
from shoal.shardcast.store.lock import LockOwner, check_owner, find_owner
from shoal.util.console import LiveLine
from shoal.util.disk import guard_disk
from shoal.util.spans import SpanLog
from shoal.util.units import format_bytes, parse_bytes, parse_rate

if TYPE_CHECKING:
    import ssl

    from shoal.identity.keys import Key
    from shoal.net.limits import ServeLimits
    from shoal.shardcast.fetch.pull import PullProgress
    from shoal.shardcast.origin_service import OriginService
    from shoal.shardcast.relay import Relay
    from shoal.shardcast.tickets import TicketTable

MIN_RATE = 1 << 16
BAR_CELLS = 20
_RUN = flag("--run", required=True, metavar="NAME", help="name of the run")
logger = logging.getLogger(__name__)


class _Given(argparse.Action):
    """Store a value, or append it to a list, and add the flag's name to `given`, to distinguish it from a default."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        value = True if self.nargs == 0 else values
        setattr(args, self.dest, [*getattr(args, self.dest), value] if isinstance(self.default, list) else value)
        args.given = {*args.given, self.option_strings[0]}


def _add_publish(parser: CommandParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="folder or file to publish; served from this path, so do not modify it")
    add("--version", type=int, required=True, metavar="N", help="version number")
    add_origin(parser)


def _add_pull(parser: CommandParser) -> None:
    _add_sources(parser)
    add = parser.add_argument
    _RUN(parser)
    add("--out", type=Path, default=Path("versions"), metavar="DIR", help="folder for the versions (%(default)s)")
    add("--version", type=int, metavar="N", help="version to fetch (default: the newest)")
    add("--follow", action="store_true", help="keep fetching newer versions")
    add("--keep", type=int, default=2, metavar="N", help="versions to keep (%(default)s)")


def _add_ticket(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--key", type=Path, required=True, metavar="FILE", help="signing key: the publisher's, or a signer's")
    _RUN(parser)
    add("--node", required=True, metavar="HEX", help="public key of the node that may fetch")
    add("--hours", type=float, default=24.0, metavar="H", help="validity in hours (%(default)s)")
    add("--bytes", default="100GB", metavar="BYTES", help="download quota (%(default)s)")


def add_origin(parser: CommandParser) -> None:
    """Flags of a command that signs and serves versions."""
    add = parser.add_argument
    add("--key", type=Path, required=True, metavar="FILE", help="the publisher's key, see `shoal keygen`")
    _add_store(parser)
    add("--shard-size", action=_Given, default="8MiB", metavar="BYTES", help="size of a shard (%(default)s)")
    text = "every N versions, one that relays hold in full (%(default)s)"
    add("--anchor-every", action=_Given, type=int, default=8, metavar="N", help=text)
    _add_serving(parser)


def _add_store(parser: CommandParser) -> None:
    add = parser.add_argument
    _RUN(parser)
    add("--data", type=Path, required=True, metavar="DIR", help="dedicated folder for the served files")
    text = "versions to keep (%(default)s), besides those needed to get from an anchor to the newest"
    add("--keep", action=_Given, type=int, default=5, metavar="N", help=text)
    text = "keep versions of the last H hours too, for appeals and audits (%(default)g)"
    add("--keep-hours", action=_Given, type=float, default=0.0, metavar="H", help=text)
    text = "disk space for them and the others (%(default)s)"
    add("--keep-bytes", action=_Given, default="16GiB", metavar="BYTES", help=text)
    parser.set_defaults(given=frozenset())


def _add_sources(parser: CommandParser) -> None:
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="origin or relays to fetch from, e.g. http://127.0.0.1:8600")
    add("--publisher", required=True, metavar="HEX", help="public key of the publisher, the only trusted key")
    add("--ticket", type=Path, metavar="FILE", help="ticket to present, see `shoal weights ticket`")
    add("--in-flight", type=int, default=4, metavar="N", help="number of concurrent shard downloads (%(default)s)")
    common.AUTHORITY(parser)


def _add_serving(parser: CommandParser) -> None:
    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, action=_Given, help=text, **options)

    place = "address to listen on (%(default)s); port 0: any free port"
    add("--listen", place, default="127.0.0.1:8600", metavar="HOST:PORT")
    add("--rate", "maximum send rate, e.g. 200Mbit or 25MB per second (default: no limit)", metavar="RATE")
    add("--peer-rate", "maximum send rate per address (default: no limit)", metavar="RATE")
    add("--tickets", "require a ticket signed by the publisher or a signer", nargs=0, default=False)
    add("--signer", "public key of another accepted ticket signer; repeatable", default=[], metavar="HEX")
    proxied = "apply limits to callers from this machine too, because a proxy forwards strangers"
    add("--behind-proxy", proxied, nargs=0, default=False)
    add("--tls-cert", "serve https with this certificate chain (PEM); needs --tls-key", metavar="FILE")
    add("--tls-key", "private key of the certificate (PEM)", metavar="FILE")


def read_serving(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of `_add_serving` by name, in canonical form. Raises ConfigError for invalid values."""
    common.parse_address(args.listen)
    return {
        "--listen": args.listen,
        "--rate": _read_rate("--rate", args.rate),
        "--peer-rate": _read_rate("--peer-rate", args.peer_rate),
        "--tickets": args.tickets,
        "--signer": sorted(args.signer),
        "--behind-proxy": args.behind_proxy,
        "--tls-cert": args.tls_cert,
        "--tls-key": args.tls_key,
    }


def build_limits(args: argparse.Namespace) -> "ServeLimits":
    """Build the server's limits."""
    from shoal.net.limits import ServeLimits

    flags = read_serving(args)
    return ServeLimits(rate=flags["--rate"], peer_rate=flags["--peer-rate"], trust_loopback=not args.behind_proxy)


def load_tls(args: argparse.Namespace) -> "ssl.SSLContext | None":
    """The TLS context, or None for plain HTTP."""
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError("--tls-cert and --tls-key: https needs both a certificate and its key")
    if not args.tls_cert:
        return None
    from shoal.net.sockets import load_server_tls

    return load_server_tls(Path(args.tls_cert), Path(args.tls_key))


def open_tickets(args: argparse.Namespace, publisher: str) -> "TicketTable | None":
    """The table of tickets, or None if tickets are not required."""
    if not args.tickets:
        if args.signer:
            raise ConfigError("--signer: has no effect without --tickets")
        return None
    from shoal.identity.keys import check_public
    from shoal.shardcast.tickets import TicketTable

    args.data.mkdir(parents=True, exist_ok=True)
    signers = [check_public(text) for text in (publisher, *args.signer)]
    return TicketTable(args.data / "tickets.jsonl", run=args.run, signers=signers)


def _read_pulling(args: argparse.Namespace) -> dict[str, Any]:
    """Options for fetching versions, from the flags of `_add_sources`."""
    from shoal.shardcast.tickets import read_ticket

    ticket = None if args.ticket is None else read_ticket(args.ticket)
    own = common.pick_flags(args, "run", "publisher", "keep", "in_flight")
    return own | {"ticket": ticket, "authority": args.ca}


def _read_keeping(args: argparse.Namespace) -> dict[str, Any]:
    """For how long versions are kept, from the flags of `_add_store`."""
    if not 0 <= args.keep_hours <= 24 * 366:
        raise ConfigError(f"--keep-hours: {args.keep_hours:g} must be from 0 to a year")
    return {"keep_s": 3600 * args.keep_hours, "keep_bytes": parse_bytes(args.keep_bytes)}


def _read_rate(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    rate = int(parse_rate(text))
    if rate < MIN_RATE:
        raise ConfigError(f"{flag}: {text} is below the minimum of {format_bytes(MIN_RATE)}/s; clients would time out")
    return rate


def run_keygen(args: argparse.Namespace) -> int:
    """Create a key file and print its public key."""
    from shoal.identity.keys import Key

    key = Key.generate()
    key.save(args.file)
    print(key.public)
    return 0


def run_relay(args: argparse.Namespace) -> int:
    """Fetch versions from an origin or relays, and serve them."""
    common.check_least("--keep", args.keep, 1)
    common.check_least("--in-flight", args.in_flight, 1)

    with guard_disk(args.data):
        return common.run_until_stopped(_relay(args))


def run_pull(args: argparse.Namespace) -> int:
    """Fetch a version as a verified folder OUT/v<N>."""
    common.check_least("--keep", args.keep, 1)
    common.check_least("--in-flight", args.in_flight, 1)
    if args.version is not None:
        common.check_least("--version", args.version, 0)
        if args.follow:
            raise ConfigError("--version and --follow are mutually exclusive")
    return common.run_until_stopped(_pull(args), common.StopCode())


def run_tree(args: argparse.Namespace) -> int:
    """Show which versions the origin and the relays have."""
    from shoal.shardcast.tree import show_tree

    text, reached = asyncio.run(show_tree(args.urls, args.ca))
    print(text)
    return 0 if reached else 1


def run_ticket(args: argparse.Namespace) -> int:
    """Print a ticket: a signed download quota with an expiry time."""
    from shoal.shardcast.tickets import issue_ticket

    if not 0 < args.hours <= 24 * 366:
        raise ConfigError(f"--hours: {args.hours:g} must be above 0 and at most a year")
    expires, num_bytes = int(time.time() + 3600 * args.hours), parse_bytes(args.bytes)
    key = common.load_key(args.key)
    print(issue_ticket(key, run=args.run, node=args.node, expires=expires, num_bytes=num_bytes))
    return 0


async def _relay(args: argparse.Namespace) -> int:
    from shoal.shardcast.relay import Relay

    line = LiveLine()
    host, port = common.parse_address(args.listen)
    tickets = open_tickets(args, args.publisher)
    limit = None if args.max_bytes is None else parse_bytes(args.max_bytes)
    serving: dict[str, Any] = {"limits": build_limits(args), "tickets": tickets, "tls": load_tls(args)}
    serving |= {"host": host, "port": port, "max_bytes": limit, **_read_keeping(args)}
    relay = await Relay.open(args.data, args.urls, **serving, **_read_pulling(args))
    async with relay:
        logger.info(f"serving run {args.run} at {relay.server.url}")
        async with line.show(lambda: _describe_relay(relay)):
            await relay.wait()
    return 0


async def _pull(args: argparse.Namespace) -> int:
    from shoal.shardcast.client import ShardcastClient
    from shoal.shardcast.fetch.upstreams import GoneError

    line = LiveLine()
    client = await ShardcastClient.open(args.out, args.urls, only=args.version, **_read_pulling(args))
    async with client, line.show(lambda: describe_progress(client.progress)):
        if not args.follow:
            try:
                line.result(str(await client.pull(args.version)))
            except GoneError as error:
                raise ConfigError(f"version {args.version}: {error}") from None
            return 0
        async for folder in client.follow():
            line.result(str(folder))
    return 0


def describe_progress(progress: "PullProgress") -> str:
    """Describe a pull on one line."""
    if progress.version is None:
        return f"waiting for {progress.waiting_for or 'a newer version'}"
    what = {"delta": "delta of ", "applying": "applying delta of "}.get(progress.stage, "")
    share = progress.bytes_done / max(1, progress.bytes_total)
    bar = "#" * round(share * BAR_CELLS)
    parts = [f"{what}v{progress.version} [{bar:<{BAR_CELLS}}] {share:.0%} of {format_bytes(progress.bytes_total)}"]
    parts.append(f"{format_bytes(progress.rate)}/s")
    if progress.waiting_for:
        parts.append(f"waiting for {progress.waiting_for}")
    elif progress.eta_s is not None:
        parts.append(f"{progress.eta_s:.0f} s left")
    return "  ".join(parts)


def _describe_relay(relay: "Relay") -> str:
    server, entries, progress = relay.server, relay.store.entries(), relay.puller.progress
    lost = [source for source in relay.puller.upstreams.all if source.unreachable_since is not None]
    silent = ", ".join(f"{source} ({source.counts.reason})" for source in lost)
    if not entries:
        return f"waiting for {silent or progress.waiting_for or 'a version'}"
    newest = entries[-1]
    blob = newest.full if newest.delta is None else newest.delta
    share = blob.have_bytes / max(1, blob.layout.total)
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    line = f"v{newest.version} {share:4.0%}, in {format_bytes(progress.rate)}/s  sent {sent}, {rate}/s"
    return f"{line}  waiting for {silent}" if silent else line


def run_publish(args: argparse.Namespace) -> int:
    """Publish a checkpoint as a version, and serve it."""
    common.check_least("--version", args.version, 0)
    common.check_least("--keep", args.keep, 1)
    common.check_least("--anchor-every", args.anchor_every, 1)

    stop = common.StopCode()
    with guard_disk(args.data):
        return common.run_until_stopped(_publish(args, stop), stop)


async def _publish(args: argparse.Namespace, stop: common.StopCode) -> int:
    line = LiveLine()
    key = common.load_key(args.key)
    if (owner := find_owner(args.data)) is not None:
        return await _hand_over(args, owner, key, line)
    async with serve_origin(args, key) as service, line.show(lambda: _describe_origin(service)):
        await service.watch.record(args.path, await service.publish(args.path, args.version))
        stop.code = 0
        await service.run()
    return 0


def serve_origin(
    args: argparse.Namespace, key: "Key", spans: SpanLog | None = None
) -> "AbstractAsyncContextManager[OriginService]":
    """Open the origin described by the flags of `add_origin`, for the duration of the block."""
    from shoal.shardcast.origin_service import open_origin

    host, port = common.parse_address(args.listen)
    settings = _read_settings(args)
    return open_origin(
        args.data,
        run=args.run,
        key=key,
        host=host,
        port=port,
        keep=args.keep,
        **_read_keeping(args),
        shard_size=settings["--shard-size"],
        anchor_every=args.anchor_every,
        limits=build_limits(args),
        open_tickets=partial(open_tickets, args, key.public),
        tls=load_tls(args),
        spans=spans,
        settings=settings,
    )


def _read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """An origin's settings by flag name, in canonical form."""
    size = parse_bytes(args.shard_size)
    own = {"--keep": args.keep, "--anchor-every": args.anchor_every, "--shard-size": size}
    own |= {"--keep-hours": args.keep_hours, "--keep-bytes": parse_bytes(args.keep_bytes)}
    return own | read_serving(args)


async def _hand_over(args: argparse.Namespace, owner: LockOwner, key: "Key", line: LiveLine) -> int:
    from shoal.shardcast.origin_watch import request_publish

    settings = _read_settings(args)
    if owner.role != "origin":
        raise ConfigError(f"{args.data}: in use by {owner}, which cannot publish; choose another folder")
    check_owner(args.data, args.run, key.public)
    logger.info(f"handed over to the origin that serves {args.data} (process {owner.process})")
    given = {name: value for name, value in settings.items() if name in args.given}
    published = await request_publish(args.data, args.path, args.version, given=given)
    line.result(f"published v{args.version} {published.manifest}")
    return 0


def _describe_origin(service: "OriginService") -> str:
    server, entries = service.server, service.origin.store.entries()
    if not entries:
        return "no version yet"
    newest = entries[-1]
    known, total = newest.log.num_hashes, len(newest.full.layout.shards)
    state = "" if newest.log.ended else f", {known} of {total} shards hashed"
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    return f"v{newest.version}{state}  {server.metrics.transfers} transfers  sent {sent}, {rate}/s"


_FILE = flag("file", type=Path, metavar="FILE", help="file to create; an existing file is never overwritten")
_MOST = flag("--max-bytes", metavar="BYTES", help="maximum bytes kept on disk (default: no limit)")
_URLS = flag("urls", nargs="+", metavar="URL", help="e.g. http://127.0.0.1:8600")
_ACTIONS = (
    CliCommand("publish", run_publish, (_add_publish,)),
    CliCommand("pull", run_pull, (_add_pull,)),
    CliCommand("tree", run_tree, (_URLS, common.AUTHORITY)),
    CliCommand("ticket", run_ticket, (_add_ticket,)),
)
COMMANDS = (
    CliCommand("keygen", run_keygen, (_FILE,)),
    CliCommand("relay", run_relay, (_add_sources, _add_store, _MOST, _add_serving)),
    CliCommand("weights", text="publish, fetch and track versions of the weights (SHARDCAST)", actions=_ACTIONS),
)
