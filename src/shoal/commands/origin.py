"""`shoal publish`: serves a version, or hands it over to the origin that serves its folder already.

A hand-over passes on what was said about how the origin works: one that works otherwise refuses, so that no flag is
ignored, and the command that started it can be used for the next version as it is.
"""

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from shoal.commands.live import LiveLine
from shoal.commands.serving import (
    Ending,
    build_limits,
    check_least,
    open_tickets,
    parse_address,
    read_serving,
    run_loop,
)
from shoal.errors import ConfigError
from shoal.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shoal.keys import Key
    from shoal.shardcast.inbox import Request
    from shoal.shardcast.lock import Owner
    from shoal.shardcast.publish import Origin
    from shoal.shardcast.server import Server
    from shoal.shardcast.store import Entry, Store

ROLE = "origin"


def run_publish(args: argparse.Namespace) -> int:
    check_least("--version", args.version, 0)
    check_least("--keep", args.keep, 1)
    check_least("--anchor-every", args.anchor_every, 1)
    from shoal.disk import guard_disk

    ending = Ending()
    with guard_disk(args.data):
        return run_loop(_publish(args, ending), ending)


async def _publish(args: argparse.Namespace, ending: Ending) -> int:
    from shoal.keys import Key
    from shoal.shardcast.lock import find_owner
    from shoal.shardcast.store import Store

    line = LiveLine()
    key = Key.load(args.key)
    settings = _read_settings(args)
    if (owner := find_owner(args.data)) is not None:
        return await _hand_over(args, owner, key, settings, line)
    store = await Store.open(args.data, run=args.run, publisher=key.public, keep=args.keep, role=ROLE, note=line.note)
    try:
        return await _serve(args, store, key, settings, line, ending)
    finally:
        await store.close()


def _read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """How an origin works, by the flags that say so, in one form each."""
    size = parse_bytes(args.shard_size)
    own = {"--keep": args.keep, "--anchor-every": args.anchor_every, "--shard-size": size}
    return own | read_serving(args)


async def _hand_over(
    args: argparse.Namespace, owner: "Owner", key: "Key", settings: dict[str, Any], line: LiveLine
) -> int:
    from shoal.shardcast.inbox import Request, ask_publish, wait_answer, withdraw_request
    from shoal.shardcast.lock import check_owner, find_owner

    if owner.role != ROLE:
        raise ConfigError(f"{args.data}: in use by {owner}, which publishes nothing; choose another folder")
    check_owner(args.data, args.run, key.public)
    line.note(f"handed over to the origin that serves {args.data} (process {owner.process})")
    given = {flag: settings[flag] for flag in args.given if flag in settings}
    request = ask_publish(args.data, Request(args.path.resolve(), args.version, given))
    try:
        digest = await wait_answer(request, lambda: find_owner(args.data) is not None)
    except asyncio.CancelledError:
        if not withdraw_request(request):
            line.note(f"the origin had begun with v{args.version} and goes on")
        raise
    line.result(f"published v{args.version} {digest}")
    return 0


async def _serve(
    args: argparse.Namespace, store: "Store", key: "Key", settings: dict[str, Any], line: LiveLine, ending: Ending
) -> int:
    from shoal.shardcast.inbox import Inbox
    from shoal.shardcast.publish import Origin
    from shoal.shardcast.server import Server

    origin = Origin(store, key, shard_size=settings["--shard-size"], anchor_every=args.anchor_every)
    tickets = open_tickets(args, key.public)
    server = Server(store, limits=build_limits(args), tickets=tickets, role=ROLE)

    async def publish(request: "Request") -> str:
        _check_flags(request, settings)
        return await _publish_one(origin, request, line)

    await server.start(*parse_address(args.listen))
    try:
        line.note(f"serving run {args.run} at {server.url}, publisher {key.public}")
        async with Inbox(args.data, line.note) as inbox, line.show(lambda: _describe_origin(store, server)):
            await _publish_first(origin, args, line)
            ending.code = 0
            await inbox.serve(publish)
    finally:
        await server.close()
        if tickets is not None:
            tickets.close()
    return 0


def _check_flags(request: "Request", settings: dict[str, Any]) -> None:
    for flag, value in request.flags.items():
        if settings.get(flag) != value:
            raise ConfigError(
                f"{flag}: the origin that serves this folder was started with another value; leave it out, or start "
                "the origin anew"
            )


async def _publish_first(origin: "Origin", args: argparse.Namespace, line: LiveLine) -> None:
    from shoal.shardcast.inbox import Request

    await _publish_one(origin, Request(args.path, args.version), line)


async def _publish_one(origin: "Origin", request: "Request", line: LiveLine) -> str:
    start = time.monotonic()
    entry = await origin.publish(request.path, request.version)
    line.note(f"published {_describe_entry(entry)} in {time.monotonic() - start:.1f} s")
    return entry.digest


def _describe_entry(entry: "Entry") -> str:
    size = entry.full.layout.total
    count = len(entry.full.layout.shards)
    text = f"v{entry.version}  {format_bytes(size)} in {count} shard{'s' * (count != 1)}"
    if entry.delta is not None:
        text += f", delta {format_bytes(entry.delta.layout.total)} (1/{size / max(1, entry.delta.layout.total):.0f})"
    return text


def _describe_origin(store: "Store", server: "Server") -> str:
    entries = store.entries()
    if not entries:
        return "no version yet"
    newest = entries[-1]
    known, total = newest.log.num_hashes, len(newest.full.layout.shards)
    state = "" if newest.log.ended else f", {known} of {total} shards hashed"
    sent, rate = format_bytes(server.metrics.sent.total), format_bytes(server.metrics.window.rate)
    return f"v{newest.version}{state}  {server.metrics.transfers} transfers  sent {sent}, {rate}/s"
