"""A ledger that is somewhere else: copied event by event, then checked as if it were here.

The copy is a ledger file like the coordinator's own, with all tables made here from the events: a stranger's audit
believes nothing but signatures. Kept, it is also a memory: a ledger that does not continue it is a fork.
"""

import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from shoal.commands.ledger import EXIT_BROKEN, describe_report, open_reader, show_many, show_one, write_proof
from shoal.commands.swarm_call import Outcome, fetch_descriptor, open_client
from shoal.errors import ConfigError
from shoal.swarm.asking import UnreachableError
from shoal.swarm.balances import BALANCES
from shoal.swarm.bundle import Bundle
from shoal.swarm.db import EVENT, HEAD, MERKLE_NODE, POSTING, open_engine
from shoal.swarm.descriptor import Descriptor
from shoal.swarm.event import GENESIS_PREV, Event, EventError
from shoal.swarm.head import HeadError, SignedHead
from shoal.swarm.merkle import Frontier, hash_leaf, load_frontier
from shoal.swarm.migrate import upgrade_schema
from shoal.swarm.open_client import OpenClient
from shoal.swarm.projection import apply_event
from shoal.swarm.rows import TILE_LEVEL, NodeReader, count_events, read_event, read_heads
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import verify_ledger

_BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, SQLAlchemyError)
"""what tables raise over an event that no coordinator made"""
_SHOWN_EVERY = 8
"""pages between two notes of progress"""


class AuditError(Exception):
    """Events that contradict each other, or the copy that was kept."""


async def verify_remote(
    where: str, copy: Path | None, held: SignedHead | None, expected: str | None, authority: Path | None = None
) -> Outcome:
    """Copy a ledger, make its tables from the events, and check all of it."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(where, authority))
        if copy is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-"))
        path = Path(folder) / "ledger.db" if copy is None else copy
        engine = open_engine(str(path))
        stack.callback(engine.dispose)
        upgrade_schema(engine)
        try:
            descriptor = await _copy_ledger(client, engine)
        except AuditError as error:
            return Outcome(EXIT_BROKEN, f"ledger at {where}: BROKEN\n  {error}", {"holds": False, "text": str(error)})
        with open_reader(str(path)) as reader:
            report = verify_ledger(reader, projections=PROJECTIONS, held=held)
        if report.coordinator != descriptor.coordinator or report.run != descriptor.run:
            report.add("descriptor", "the ledger of another run or coordinator than the descriptor names")
        return describe_report(report, expected)


async def show_remote(
    where: str, event: str | None, first: int | None, count: int, authority: Path | None = None
) -> Outcome:
    """One event in full, or several, one per line; those that a signed head covers."""
    async with open_client(where, authority) as client:
        if event is not None:
            descriptor, _ = await fetch_descriptor(client)
            return show_one((await _fetch_proof(client, descriptor, event)).event)
        size = (await _fetch_head(client)).head.size
        start = max(0, size - count) if first is None else first
        events: list[Event] = []
        while start + len(events) < size and len(events) < count:
            events += _check_page(await client.read_page(start + len(events)))
        return show_many(events[:count], size)


async def prove_remote(where: str, event: str, out: Path | None, authority: Path | None = None) -> Outcome:
    """The proof that an event is in the ledger, checked."""
    async with open_client(where, authority) as client:
        descriptor, _ = await fetch_descriptor(client)
        return write_proof(await _fetch_proof(client, descriptor, event), out)


async def _fetch_proof(client: OpenClient, descriptor: Descriptor, event: str) -> Bundle:
    if not (event.isascii() and event.isdecimal() and len(event) <= 15):
        raise ConfigError(f"{event[:80]!r}: no number of an event; at an address events are found by their number")
    try:
        bundle = Bundle.from_bytes(await client.read_event(int(event)))
        bundle.check_proof(descriptor.run, descriptor.coordinator)
    except EventError as error:
        raise UnreachableError(f"the server's proof proves nothing: {error}") from None
    if bundle.event.seq != int(event):
        raise UnreachableError("the server sent another event than it was asked for")
    return bundle


def _check_page(events: list[Event]) -> list[Event]:
    """Refuse what no shoal wrote, before it is shown."""
    for event in events:
        try:
            event.check_form()
        except EventError as error:
            raise UnreachableError(f"the server sent events that are none: event {event.seq}: {error}") from None
    return events


async def _fetch_head(client: OpenClient) -> SignedHead:
    head = await client.read_head()
    if head is None:
        raise UnreachableError("the coordinator has signed no head yet; it does so every minute")
    return head


async def _copy_ledger(client: OpenClient, engine: Engine) -> Descriptor:
    """Fetch what the copy lacks, up to the newest signed head."""
    descriptor, _ = await fetch_descriptor(client)
    head = await _fetch_head(client)
    try:
        head.check_signed(descriptor.run, descriptor.coordinator)
    except HeadError as error:
        raise AuditError(f"the newest head: {error}") from None
    with engine.connect() as connection, connection.begin():
        size = count_events(connection)
    if size > head.head.size:
        raise AuditError(f"the copy has {size} events, the coordinator's newest head only {head.head.size}: a fork")
    number = 0
    while size < head.head.size:
        events = (await client.read_page(size))[: head.head.size - size]
        with engine.begin() as connection:
            _append_events(connection, events)
        size += len(events)
        number += 1
        if number % _SHOWN_EVERY == 0:
            print(f"copied {size} of {head.head.size} events", file=sys.stderr, flush=True)
    with engine.begin() as connection:
        _add_head(connection, head)
    return descriptor


def _append_events(connection: Connection, events: list[Event]) -> None:
    """Continue the copy; whatever does not follow from what is there is told."""
    frontier, last_hash = _load_end(connection)
    nodes = []
    for event in events:
        if event.prev_hash != last_hash:
            raise AuditError(f"event {event.seq} does not follow event {event.seq - 1} of the copy: a fork")
        try:
            event.check_form()
            apply_event((BALANCES, *PROJECTIONS), event, connection)
        except _BROKEN as error:
            raise AuditError(f"event {event.seq} contradicts those before it ({error!r:.200})") from None
        frontier, grown = frontier.grow_leaf(hash_leaf(event.hash))
        nodes += [node for node in grown if node.level >= TILE_LEVEL]
        last_hash = event.hash
    names = [column.name for column in EVENT.columns]
    connection.execute(EVENT.insert(), [{name: getattr(event, name) for name in names} for event in events])
    if postings := [
        {"seq": event.seq, "line": line, "account": posting.account, "amount": posting.amount}
        for event in events
        for line, posting in enumerate(event.postings)
    ]:
        connection.execute(POSTING.insert(), postings)
    if nodes:
        connection.execute(MERKLE_NODE.insert(), [node._asdict() for node in nodes])


def _load_end(connection: Connection) -> tuple[Frontier, bytes]:
    size = count_events(connection)
    if size == 0:
        return Frontier(), GENESIS_PREV
    last = read_event(connection, size - 1)
    assert last is not None, "the largest number has its row"
    return load_frontier(NodeReader(connection), size), last.hash


def _add_head(connection: Connection, signed: SignedHead) -> None:
    """Keep a head beside the events, if there is none of its size yet."""
    head = signed.head
    if any(known.head.size == head.size for known in read_heads(connection, head.run)):
        return
    row = {"size": head.size, "time_ms": head.time_ms, "signature": signed.signature}
    connection.execute(
        HEAD.insert(), {**row, "root": bytes.fromhex(head.root), "last_hash": bytes.fromhex(head.last_hash)}
    )
