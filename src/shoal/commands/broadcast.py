"""`shoal keygen`, `relay`, `pull`, `tree` and `ticket`: weights to a swarm, over relays nobody trusts.

Nothing here is imported before a command runs but what says what went wrong.
"""

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from shoal.commands.live import LiveLine
from shoal.commands.serving import Ending, build_limits, check_least, open_tickets, parse_address, read_shown, run_loop
from shoal.errors import ConfigError
from shoal.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shoal.shardcast.progress import Progress
    from shoal.shardcast.server import Server
    from shoal.shardcast.store import Store

BAR_CELLS = 20


def run_keygen(args: argparse.Namespace) -> int:
    from shoal.keys import Key

    key = Key.generate()
    key.save(args.file)
    print(key.public)
    return 0


def run_relay(args: argparse.Namespace) -> int:
    check_least("--keep", args.keep, 1)
    check_least("--in-flight", args.in_flight, 1)
    from shoal.disk import guard_disk

    with guard_disk(args.data):
        return run_loop(_relay(args), Ending(0))


def run_pull(args: argparse.Namespace) -> int:
    check_least("--keep", args.keep, 1)
    check_least("--in-flight", args.in_flight, 1)
    if args.version is not None:
        check_least("--version", args.version, 0)
        if args.follow:
            raise ConfigError("--version and --follow exclude each other: one version, or every newer one")
    return run_loop(_pull(args), Ending())


def run_tree(args: argparse.Namespace) -> int:
    from shoal.shardcast.tree import show_tree

    text, reached = asyncio.run(show_tree(args.urls))
    print(text)
    return 0 if reached else 1


def run_ticket(args: argparse.Namespace) -> int:
    from shoal.keys import Key
    from shoal.shardcast.tickets import issue_ticket

    if not 0 < args.hours <= 24 * 366:
        raise ConfigError(f"--hours: {args.hours:g} is not within a year from now")
    expires, num_bytes = int(time.time() + 3600 * args.hours), parse_bytes(args.bytes)
    key = Key.load(args.key)
    print(issue_ticket(key, run=args.run, node=args.node, expires=expires, num_bytes=num_bytes))
    return 0


async def _relay(args: argparse.Namespace) -> int:
    from shoal.shardcast.relay import Relay

    line = LiveLine()
    host, port = parse_address(args.listen)
    tickets = open_tickets(args, args.publisher)
    limit = None if args.max_bytes is None else parse_bytes(args.max_bytes)
    relay = await Relay.open(
        args.data,
        args.urls,
        run=args.run,
        publisher=args.publisher,
        host=host,
        port=port,
        keep=args.keep,
        max_bytes=limit,
        in_flight=args.in_flight,
        limits=build_limits(args),
        tickets=tickets,
        ticket=read_shown(args.ticket),
        note=line.note,
    )
    async with relay:
        line.note(f"serving run {args.run} at {relay.server.url}")
        async with line.show(lambda: _describe_relay(relay.store, relay.server, relay.puller.progress)):
            await relay.wait()
    return 0


async def _pull(args: argparse.Namespace) -> int:
    from shoal.shardcast.client import Client
    from shoal.shardcast.crew import GoneError

    line = LiveLine()
    client = await Client.open(
        args.out,
        args.urls,
        run=args.run,
        publisher=args.publisher,
        keep=args.keep,
        in_flight=args.in_flight,
        ticket=read_shown(args.ticket),
        note=line.note,
    )
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


def describe_progress(progress: "Progress") -> str:
    """A pull in one line."""
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


def _describe_relay(store: "Store", server: "Server", progress: "Progress") -> str:
    entries = store.entries()
    if not entries:
        return f"waiting for {progress.waiting_for or 'a version'}"
    newest = entries[-1]
    blob = newest.full if newest.delta is None else newest.delta
    share = blob.have_bytes / max(1, blob.layout.total)
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    return f"v{newest.version} {share:4.0%}, in {format_bytes(progress.rate)}/s  sent {sent}, {rate}/s"
