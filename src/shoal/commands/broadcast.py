"""`shoal keygen`, `publish`, `relay`, `pull`, `tree` and `ticket`: weights to a swarm, over relays nobody trusts.

Nothing here is imported before a command runs but what says what went wrong.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.live import LiveLine
from shoal.errors import ConfigError
from shoal.units import format_bytes, parse_bytes, parse_rate

if TYPE_CHECKING:
    from shoal.shardcast.limits import ServeLimits
    from shoal.shardcast.progress import Progress
    from shoal.shardcast.publish import Origin
    from shoal.shardcast.server import Server
    from shoal.shardcast.store import Entry, Store
    from shoal.shardcast.tickets import TicketBook

EXIT_INTERRUPTED = 130
MIN_RATE = 1 << 16
BAR_CELLS = 20


def run_keygen(args: argparse.Namespace) -> int:
    from shoal.keys import Key

    key = Key.generate()
    key.save(args.file)
    print(key.public)
    return 0


def run_publish(args: argparse.Namespace) -> int:
    _check_least("--version", args.version, 0)
    _check_least("--keep", args.keep, 1)
    _check_least("--anchor-every", args.anchor_every, 1)
    from shoal.disk import guard_disk

    with guard_disk(args.data):
        return _run_loop(_publish(args))


def run_relay(args: argparse.Namespace) -> int:
    _check_least("--keep", args.keep, 1)
    _check_least("--in-flight", args.in_flight, 1)
    from shoal.disk import guard_disk

    with guard_disk(args.data):
        return _run_loop(_relay(args))


def run_pull(args: argparse.Namespace) -> int:
    _check_least("--keep", args.keep, 1)
    _check_least("--in-flight", args.in_flight, 1)
    if args.version is not None:
        _check_least("--version", args.version, 0)
        if args.follow:
            raise ConfigError("--version and --follow exclude each other: one version, or every newer one")
    return _run_loop(_pull(args), stopped=EXIT_INTERRUPTED)


def run_tree(args: argparse.Namespace) -> int:
    from shoal.shardcast.tree import show_tree

    text, reached = asyncio.run(show_tree(args.urls))
    print(text)
    return 0 if reached else 1


def run_ticket(args: argparse.Namespace) -> int:
    from shoal.keys import Key, check_public
    from shoal.runname import check_run
    from shoal.shardcast.tickets import issue_ticket

    if not 0 < args.hours <= 24 * 366:
        raise ConfigError(f"--hours: {args.hours:g} is not within a year from now")
    expires = int(time.time() + 3600 * args.hours)
    key = Key.load(args.key)
    node, run = check_public(args.node), check_run(args.run)
    print(issue_ticket(key, run=run, node=node, expires=expires, num_bytes=parse_bytes(args.bytes)))
    return 0


async def _publish(args: argparse.Namespace) -> int:
    from shoal.keys import Key
    from shoal.shardcast.inbox import ask_publish, find_server, wait_answer
    from shoal.shardcast.store import Store, check_owner

    line = LiveLine()
    key = Key.load(args.key)
    if (process := find_server(args.data)) is not None:
        check_owner(args.data, args.run, key.public)
        line.note(f"handed over to the origin that serves {args.data} (process {process})")
        answer = ask_publish(args.data, args.path, args.version)
        digest = await wait_answer(answer, lambda: find_server(args.data) is not None)
        print(f"published v{args.version} {digest}")
        return 0
    store = await Store.open(args.data, run=args.run, publisher=key.public, keep=args.keep, note=line.note)
    try:
        return await _serve_origin(args, store, key, line)
    finally:
        await store.close()


async def _serve_origin(args: argparse.Namespace, store: "Store", key: Any, line: LiveLine) -> int:
    from shoal.shardcast.inbox import serve_inbox
    from shoal.shardcast.publish import Origin
    from shoal.shardcast.server import Server

    size, every = parse_bytes(args.shard_size), args.anchor_every
    origin = Origin(store, key, shard_size=size, anchor_every=every)
    tickets = _open_tickets(args, key.public)
    server = Server(store, limits=_build_limits(args), tickets=tickets, role="origin")
    await server.start(*_parse_address(args.listen))
    try:
        line.note(f"serving run {args.run} at {server.url}, publisher {key.public}")
        async with line.show(lambda: _describe_server(store, server)):
            await _publish_one(origin, args.path, args.version, line)
            await serve_inbox(args.data, lambda path, version: _publish_one(origin, path, version, line))
    finally:
        await server.close()
        if tickets is not None:
            tickets.close()
    return 0


async def _publish_one(origin: "Origin", path: Path, version: int, line: LiveLine) -> str:
    start = time.monotonic()
    entry = await origin.publish(path, version)
    line.note(f"published {_describe_entry(entry)} in {time.monotonic() - start:.1f} s")
    return entry.digest


async def _relay(args: argparse.Namespace) -> int:
    from shoal.shardcast.relay import Relay

    line = LiveLine()
    host, port = _parse_address(args.listen)
    tickets = _open_tickets(args, args.publisher)
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
        limits=_build_limits(args),
        tickets=tickets,
        ticket=_read_ticket(args.ticket),
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
        ticket=_read_ticket(args.ticket),
        note=line.note,
    )
    async with client, line.show(lambda: describe_progress(client.progress)):
        if not args.follow:
            try:
                print(await client.pull(args.version), flush=True)
            except GoneError as error:
                raise ConfigError(f"version {args.version}: {error}") from None
            return 0
        async for folder in client.follow():
            print(folder, flush=True)
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


def _describe_entry(entry: "Entry") -> str:
    size = entry.full.layout.total
    text = f"v{entry.version}  {format_bytes(size)} in {len(entry.full.layout.shards)} shards"
    if entry.delta is not None:
        text += f", delta {format_bytes(entry.delta.layout.total)} (1/{size / max(1, entry.delta.layout.total):.0f})"
    return text


def _describe_server(store: "Store", server: "Server") -> str:
    entries = store.entries()
    if not entries:
        return "no version yet"
    newest = entries[-1]
    known, total = newest.log.num_hashes, len(newest.full.layout.shards)
    state = "" if newest.log.ended else f", {known} of {total} shards hashed"
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    return f"v{newest.version}{state}  {server.metrics.transfers} transfers  sent {sent}, {rate}/s"


def _describe_relay(store: "Store", server: "Server", progress: "Progress") -> str:
    entries = store.entries()
    if not entries:
        return f"waiting for {progress.waiting_for or 'a version'}"
    newest = entries[-1]
    blob = newest.delta if newest.delta is not None and not newest.log.head.anchor else newest.full
    share = blob.have_bytes / max(1, blob.layout.total)
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    return f"v{newest.version} {share:4.0%}, in {format_bytes(progress.rate)}/s  sent {sent}, {rate}/s"


def _build_limits(args: argparse.Namespace) -> "ServeLimits":
    from shoal.shardcast.limits import ServeLimits

    return ServeLimits(rate=_read_rate("--rate", args.rate), peer_rate=_read_rate("--peer-rate", args.peer_rate))


def _read_rate(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    rate = int(parse_rate(text))
    if rate < MIN_RATE:
        raise ConfigError(f"{flag}: {text} is less than {format_bytes(MIN_RATE)} a second, which no client waits for")
    return rate


def _open_tickets(args: argparse.Namespace, publisher: str) -> "TicketBook | None":
    if not args.tickets:
        if args.signer:
            raise ConfigError("--signer: has no effect without --tickets")
        return None
    from shoal.keys import check_public
    from shoal.shardcast.tickets import TicketBook

    args.data.mkdir(parents=True, exist_ok=True)
    signers = [check_public(text) for text in (publisher, *args.signer)]
    return TicketBook(args.data / "tickets.jsonl", run=args.run, signers=signers)


def _read_ticket(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no ticket") from None


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen: {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def _check_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag}: must be {least} or more")


def _run_loop(work: Coroutine[None, None, int], *, stopped: int = 0) -> int:
    """Run until done. SIGINT and SIGTERM end it in order: transfers get their grace, files are closed.

    To be stopped is how a server ends; for what has a result it is an interruption, and `stopped` says so.
    """

    async def run() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        print("shoal: stopped", file=sys.stderr)
        return stopped
