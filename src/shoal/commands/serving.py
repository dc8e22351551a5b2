"""What the commands that serve have in common: their flags in the form that the library takes, and how they end."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.units import format_bytes, parse_rate

if TYPE_CHECKING:
    from shoal.shardcast.limits import ServeLimits
    from shoal.shardcast.tickets import TicketBook

EXIT_INTERRUPTED = 130
MIN_RATE = 1 << 16


@dataclass(slots=True)
class Ending:
    """With which code a command ends that is told to stop."""

    code: int = EXIT_INTERRUPTED


def run_loop(work: Coroutine[None, None, int], ending: Ending) -> int:
    """Run until done. SIGINT and SIGTERM end it in order: transfers get their grace, files are closed.

    To be stopped is how a server ends; for what has a result it is an interruption. `ending` says which it is by then.
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
        return ending.code


def check_least(flag: str, value: int, least: int) -> None:
    """Refuse a number that is too small."""
    if value < least:
        raise ConfigError(f"{flag}: must be {least} or more")


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of a flag `--listen`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen: {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def read_serving(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of `_add_serving` in one form each, by name; an error here is the user's."""
    parse_address(args.listen)
    return {
        "--listen": args.listen,
        "--rate": _read_rate("--rate", args.rate),
        "--peer-rate": _read_rate("--peer-rate", args.peer_rate),
        "--tickets": args.tickets,
        "--signer": sorted(args.signer),
        "--behind-proxy": args.behind_proxy,
    }


def build_limits(args: argparse.Namespace) -> "ServeLimits":
    """What a server allows."""
    from shoal.shardcast.limits import ServeLimits

    flags = read_serving(args)
    return ServeLimits(rate=flags["--rate"], peer_rate=flags["--peer-rate"], trust_loopback=not args.behind_proxy)


def open_tickets(args: argparse.Namespace, publisher: str) -> "TicketBook | None":
    """The book of tickets, if there is to be one."""
    if not args.tickets:
        if args.signer:
            raise ConfigError("--signer: has no effect without --tickets")
        return None
    from shoal.keys import check_public
    from shoal.shardcast.tickets import TicketBook

    args.data.mkdir(parents=True, exist_ok=True)
    signers = [check_public(text) for text in (publisher, *args.signer)]
    return TicketBook(args.data / "tickets.jsonl", run=args.run, signers=signers)


def read_shown(path: Path | None) -> str | None:
    """The ticket to show, if one is to be shown."""
    if path is None:
        return None
    from shoal.shardcast.tickets import read_ticket

    return read_ticket(path)


def _read_rate(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    rate = int(parse_rate(text))
    if rate < MIN_RATE:
        raise ConfigError(f"{flag}: {text} is less than {format_bytes(MIN_RATE)} a second, which no client waits for")
    return rate
