"""What `shoal ledger verify`, `shoal ledger show` and `shoal ledger prove` do: read a ledger, and say what it holds.

Each returns an exit code and a text. They only read, so they may run beside the coordinator.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError

from shoal.errors import ConfigError
from shoal.swarm.bundle import Bundle
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
from shoal.swarm.verify import Report, verify_ledger

EXIT_BROKEN = 1
"""The ledger is not what it claims to be."""
_BODY_CHARS = 100


class Outcome(NamedTuple):
    """How a command ends."""

    code: int
    text: str


def run_verify(url: str, *, held: Path | None = None, projections: Sequence[Projection] = ()) -> Outcome:
    """Check everything that can be checked; `held` is the file of a node's head, which the ledger must extend."""
    head = None if held is None else _load_head(held)
    with _open_reader(url) as engine:
        report = verify_ledger(engine, projections=projections, held=head)
    return Outcome(0 if report.holds else EXIT_BROKEN, _describe_report(report))


def run_show(url: str, *, event: str | None = None, first: int | None = None, count: int = 20) -> Outcome:
    """One event in full, or `count` events, one per line: from `first` on, or the last ones."""
    with _open_reader(url) as engine, _read_ledger(engine) as connection:
        if event is not None:
            return Outcome(0, _describe_event(_choose_event(connection, event)))
        size = count_events(connection)
        start = max(0, size - count) if first is None else max(0, first)
        lines = [_summarise_event(item) for item in read_events(connection, start, min(start + count, MAX_SEQ))]
    return Outcome(0, "\n".join([*lines, f"{size} events"]))


def run_prove(url: str, event: str) -> Outcome:
    """The proof that an event is in the ledger, as the text of a file that needs no ledger to be checked."""
    with _open_reader(url) as engine, _read_ledger(engine) as connection:
        chosen = _choose_event(connection, event)
        genesis = read_event(connection, 0)
        run = str(genesis.content.get("run")) if genesis is not None else ""
        head = read_newest_head(connection, run)
        if head is None or head.head.size <= chosen.seq:
            raise ConfigError(f"event {chosen.seq}: no signed head covers it yet; the coordinator signs one soon")
        path = prove_inclusion(NodeReader(connection), chosen.seq, head.head.size)
    return Outcome(0, Bundle(chosen, head, tuple(path)).to_bytes().decode())


def run_check(path: Path, *, run: str, coordinator: str) -> Outcome:
    """Check a file that `run_prove` made, with nothing but the coordinator's public key."""
    try:
        bundle = Bundle.from_bytes(_read_file(path).rstrip(b"\n"))
        bundle.check_proof(run, coordinator)
    except EventError as error:
        return Outcome(EXIT_BROKEN, f"{path}: proves nothing: {error}")
    signed = f"signed by {coordinator} over {bundle.head.head.size} events"
    return Outcome(0, f"{_describe_event(bundle.event)}\n\nin the ledger of run {run}, {signed}")


@contextmanager
def _open_reader(url: str) -> Iterator[Engine]:
    engine = open_engine(url)
    name = show_url(engine)
    if is_sqlite(engine) and not Path(name).is_file():
        raise ConfigError(f"{name}: no such file")  # SQLite would make an empty one
    try:
        yield engine
    except RowError as error:
        raise ConfigError(f"{name}: the ledger was damaged ({error}); `shoal ledger verify` says where") from None
    except DatabaseError as error:
        raise ConfigError(f"{name}: cannot be read ({str(error).splitlines()[0]})") from error
    finally:
        engine.dispose()


@contextmanager
def _read_ledger(engine: Engine) -> Iterator[Connection]:
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
    return found


def _load_head(path: Path) -> SignedHead:
    try:
        return SignedHead.from_bytes(_read_file(path))
    except HeadError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _describe_report(report: Report) -> str:
    lines = [f"{finding.check}: {finding.text}" for finding in report.findings]
    counts = (
        f"{report.num_events} events, {report.num_postings} postings, {report.num_heads} signed heads, "
        f"{report.num_tables} tables rebuilt"
    )
    verdict = "holds" if report.holds else f"BROKEN, {len(lines)} findings"
    lines += [f"ledger of run {report.run or '?'}: {verdict}", f"  {counts}"]
    lines += [f"  coordinator {report.coordinator or '?'}", f"  root        {report.root or '?'}"]
    return "\n".join(lines)


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


def _show_body(event: Event) -> str:
    """In ASCII: a body holds what strangers wrote, and a terminal obeys more characters than JSON escapes."""
    return json.dumps(event.content)


def _show_time(event: Event) -> str:
    return datetime.fromtimestamp(event.time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
