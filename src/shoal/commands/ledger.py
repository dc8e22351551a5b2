"""`shoal ledger verify`, `show`, `prove` and `check`: read a ledger, from its database or over HTTP, and say what it
holds.

They only read, so they may run beside the coordinator. A proof is checked before it is handed out, and can be checked
again with the coordinator's public key alone.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from shoal.commands.swarm_call import Outcome, finish, read_descriptor, read_file, run_work
from shoal.errors import ConfigError
from shoal.files import write_output
from shoal.keys import check_public
from shoal.runname import check_run
from shoal.swarm.bundle import Bundle
from shoal.swarm.clock import show_time
from shoal.swarm.db import is_sqlite, open_engine, read_snapshot, show_url
from shoal.swarm.event import Event, EventError
from shoal.swarm.head import HeadError, SignedHead
from shoal.swarm.merkle import prove_inclusion
from shoal.swarm.migrate import check_schema
from shoal.swarm.postings import MICRO
from shoal.swarm.projection import Projection
from shoal.swarm.rows import (
    MAX_SEQ,
    NodeReader,
    RowError,
    count_events,
    find_event,
    read_event,
    read_events,
    read_newest_head,
)
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import Report, verify_ledger

EXIT_BROKEN = 1
"""The ledger is not what it claims to be."""
MAX_SHOWN = 10_000
_BODY_CHARS = 100


def run_verify(args: argparse.Namespace) -> int:
    expected = None if args.coordinator is None else check_public(args.coordinator)
    held = None if args.head is None else load_head(args.head)
    if is_address(args.where):
        from shoal.commands.ledger_remote import verify_remote

        return run_work(verify_remote(args.where, args.copy, held, expected, args.ca), as_json=args.json)
    if args.copy is not None:
        raise ConfigError("--copy: is for the ledger at an address; this one is here already")
    return finish(verify_database(find_database(args.where), held=held, expected=expected), as_json=args.json)


def run_show(args: argparse.Namespace) -> int:
    if not 1 <= args.count <= MAX_SHOWN:
        raise ConfigError(f"--count: must be from 1 to {MAX_SHOWN}")
    if args.first is not None and args.first < 0:
        raise ConfigError("--from: must be 0 or more")
    if is_address(args.where):
        from shoal.commands.ledger_remote import show_remote

        return run_work(show_remote(args.where, args.event, args.first, args.count, args.ca), as_json=args.json)
    outcome = show_events(find_database(args.where), event=args.event, first=args.first, count=args.count)
    return finish(outcome, as_json=args.json)


def run_prove(args: argparse.Namespace) -> int:
    if is_address(args.where):
        from shoal.commands.ledger_remote import prove_remote

        return run_work(prove_remote(args.where, args.event, args.out, args.ca))
    return finish(write_proof(prove_event(find_database(args.where), args.event), args.out))


def run_check(args: argparse.Namespace) -> int:
    if args.descriptor is not None:
        descriptor, _ = read_descriptor(args.descriptor)
        run, coordinator = descriptor.run, descriptor.coordinator
    elif args.run is None or args.coordinator is None:
        raise ConfigError("give --descriptor, or --run and --coordinator: whose ledger the proof is about")
    else:
        run, coordinator = _check_name(args.run), check_public(args.coordinator)
    return finish(check_proof(args.proof, run=run, coordinator=coordinator))


def is_address(text: str) -> bool:
    """Whether a ledger is to be asked for over HTTP."""
    return text.startswith(("http://", "https://"))


def find_database(text: str) -> str:
    """The database that a user means: by its URL, as a file, or that in a coordinator's folder."""
    if "://" not in text and Path(text).is_dir():
        return str(Path(text) / "ledger.db")
    return text


def verify_database(
    url: str,
    *,
    held: SignedHead | None = None,
    expected: str | None = None,
    projections: Sequence[Projection] = PROJECTIONS,
) -> Outcome:
    """Check everything that can be checked; `held` is a node's head, which the ledger must extend."""
    with open_reader(url) as engine:
        report = verify_ledger(engine, projections=projections, held=held)
    return describe_report(report, expected)


def show_events(url: str, *, event: str | None = None, first: int | None = None, count: int = 20) -> Outcome:
    """One event in full, or `count` events, one per line: from `first` on, or the last ones."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        if event is not None:
            return show_one(_choose_event(connection, event))
        size = count_events(connection)
        start = max(0, size - count) if first is None else min(max(0, first), MAX_SEQ - count)
        events = list(read_events(connection, start, start + count))
        for one in events:
            _check_event(one)
        return show_many(events, size)


def prove_event(url: str, event: str) -> Bundle:
    """The proof that an event is in the ledger, checked."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        chosen = _choose_event(connection, event)
        genesis = _choose_event(connection, "0").content
        run = str(genesis.get("run"))
        head = read_newest_head(connection, run)
        if head is None or head.head.size <= chosen.seq:
            raise ConfigError(f"event {chosen.seq}: no signed head covers it yet; the coordinator signs one soon")
        path = prove_inclusion(NodeReader(connection), chosen.seq, head.head.size)
    bundle = Bundle(chosen, head, tuple(path))
    try:
        bundle.check_proof(run, str(genesis.get("coordinator")))
    except EventError as error:
        raise ConfigError(f"the ledger was damaged ({error}); `shoal ledger verify` says where") from None
    return bundle


def write_proof(bundle: Bundle, out: Path | None) -> Outcome:
    """A proof on the screen, or in a file."""
    if out is None:
        return Outcome(0, bundle.to_bytes().decode())
    write_output(out, bundle.to_bytes() + b"\n")
    return Outcome(0, f"event {bundle.event.seq} is in the ledger of {bundle.head.head.size} events; proof in {out}")


def check_proof(path: Path, *, run: str, coordinator: str) -> Outcome:
    """Check a file that `shoal ledger prove` made, with nothing but the coordinator's public key."""
    try:
        bundle = Bundle.from_bytes(read_file(path).rstrip(b"\n"))
        bundle.check_proof(run, coordinator)
    except EventError as error:
        return Outcome(EXIT_BROKEN, f"{path}: proves nothing: {error}")
    signed = f"signed by {coordinator} over {bundle.head.head.size} events"
    return Outcome(0, f"{_describe_event(bundle.event)}\n\nin the ledger of run {run}, {signed}")


def load_head(path: Path) -> SignedHead:
    """A head as a node keeps it."""
    try:
        return SignedHead.from_bytes(read_file(path))
    except HeadError as error:
        raise ConfigError(f"{path}: {error}") from None


@contextmanager
def open_reader(url: str) -> Iterator[Engine]:
    """A database to read a ledger from; whatever is wrong with it is one sentence."""
    try:
        engine = open_engine(url)
    except ModuleNotFoundError as error:
        raise ConfigError(f"PostgreSQL needs the package {error.name}: pip install shoal[postgres]") from None
    name = show_url(engine)
    if is_sqlite(engine) and not Path(name).is_file():
        raise ConfigError(f"{name}: no such file")  # SQLite would make an empty one
    try:
        yield engine
    except RowError as error:
        raise ConfigError(f"{name}: the ledger was damaged ({error}); `shoal ledger verify` says where") from None
    except SQLAlchemyError as error:
        raise ConfigError(f"{name}: cannot be read ({str(error).splitlines()[0]})") from error
    finally:
        engine.dispose()


def describe_report(report: Report, expected: str | None) -> Outcome:
    """What a verification found; `expected` is the key that the ledger's coordinator must have."""
    if expected not in (None, report.coordinator):
        report.add("coordinator", f"the ledger of {report.coordinator or 'nobody'}, not of {expected}")
    lines = [f"{finding.check}: {finding.text}" for finding in report.findings]
    counts = (
        f"{report.num_events} events, {report.num_postings} postings, {report.num_heads} signed heads, "
        f"{report.num_tables} tables rebuilt"
    )
    verdict = "holds" if report.holds else f"BROKEN, {len(lines)} findings"
    lines += [f"ledger of run {report.run or '?'}: {verdict}", f"  {counts}"]
    lines += [f"  coordinator {report.coordinator or '?'}", f"  root        {report.root or '?'}"]
    data = {
        "holds": report.holds,
        "run": report.run,
        "coordinator": report.coordinator,
        "events": report.num_events,
        "postings": report.num_postings,
        "heads": report.num_heads,
        "tables": report.num_tables,
        "root": report.root,
        "findings": [{"check": finding.check, "text": finding.text} for finding in report.findings],
    }
    return Outcome(0 if report.holds else EXIT_BROKEN, "\n".join(lines), data)


def show_one(event: Event) -> Outcome:
    """An event in full."""
    return Outcome(0, _describe_event(event), _dump_event(event))


def show_many(events: Sequence[Event], size: int) -> Outcome:
    """Events, one per line, of a ledger of `size`."""
    lines = [_summarise_event(event) for event in events]
    data = {"events": [_dump_event(event) for event in events], "size": size}
    return Outcome(0, "\n".join([*lines, f"{size} events"]), data)


@contextmanager
def read_ledger(engine: Engine) -> Iterator[Connection]:
    """A connection to a ledger of this version's tables, at one moment of it."""
    with read_snapshot(engine) as connection:
        check_schema(connection)
        yield connection


def _choose_event(connection: Connection, text: str) -> Event:
    """An event by its number or its hash."""
    found = None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        found = read_event(connection, int(text))
    elif len(text) == 64 and set(text) <= set("0123456789abcdef"):
        found = find_event(connection, bytes.fromhex(text))
    if found is None:
        raise ConfigError(f"{text[:80]!r}: no event with this number or hash")
    return _check_event(found)


def _check_event(event: Event) -> Event:
    """Refuse what no shoal wrote: who edits a file can put anything into it."""
    try:
        event.check_form()
    except EventError as error:
        raise RowError(f"event {event.seq}: {error}") from None
    return event


def _check_name(run: str) -> str:
    try:
        return check_run(run)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _summarise_event(event: Event) -> str:
    body = _show_body(event)
    body = body if len(body) <= _BODY_CHARS else f"{body[: _BODY_CHARS - 3]}..."
    moved = sum(posting.amount for posting in event.postings if posting.amount > 0)
    credit = f"  {moved / MICRO:g} credits" if moved else ""
    return f"{event.seq:>8}  {_show_time(event)}  {event.kind:<16} {event.actor[:8]}  {event.subject}{credit}  {body}"


def _describe_event(event: Event) -> str:
    signed = "signed by its actor" if event.signature else "the coordinator's own"
    lines = [
        f"event      {event.seq}",
        f"time       {_show_time(event)}",
        f"kind       {event.kind}",
        f"actor      {event.actor} ({signed})",
        f"subject    {event.subject or '-'}",
        f"body       {_show_body(event)}",
        f"prev hash  {event.prev_hash.hex()}",
        f"hash       {event.hash.hex()}",
    ]
    lines += [f"posting    {amount / MICRO:+.6f}  {account}" for account, amount in event.postings]
    return "\n".join(lines)


def _dump_event(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "time_ms": event.time_ms,
        "kind": event.kind,
        "actor": event.actor,
        "subject": event.subject,
        "body": event.content,
        "signature": event.signature.hex(),
        "prev_hash": event.prev_hash.hex(),
        "hash": event.hash.hex(),
        "postings": [{"account": account, "amount": amount} for account, amount in event.postings],
    }


def _show_body(event: Event) -> str:
    """In ASCII: a body holds what strangers wrote, and a terminal obeys more characters than JSON escapes."""
    return json.dumps(event.content)


def _show_time(event: Event) -> str:
    return show_time(event.time_ms, "%Y-%m-%d %H:%M:%S")
