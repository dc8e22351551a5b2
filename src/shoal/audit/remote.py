"""A remote ledger: copied event by event, then verified like a local one.

The copy is a ledger file like the coordinator's own, with all tables rebuilt here from the events: the auditor trusts
nothing but signatures. A copy that is kept also detects forks: a ledger that does not continue it is a fork.
"""

import logging
from pathlib import Path

from sqlalchemy import Connection, Engine

from shoal.audit.database import open_reader
from shoal.audit.replay import BROKEN
from shoal.audit.verify import AuditReport, verify_ledger
from shoal.coordinator.state import PROJECTIONS
from shoal.errors import ConfigError, UnreachableError
from shoal.ledger.db import BALANCES, apply_event, open_database, read_snapshot
from shoal.ledger.event import GENESIS_PREV, Event, EventError
from shoal.ledger.head import HeadError, InclusionProof, SignedHead
from shoal.ledger.ledger import insert_rows
from shoal.ledger.merkle import Frontier, Subtree, hash_leaf, load_frontier
from shoal.ledger.reader import TILE_LEVEL, NodeReader, count_events, read_event, read_heads
from shoal.ledger.schema import check_copy, prepare_schema
from shoal.node.public_client import PublicClient
from shoal.protocol.descriptor import Descriptor

_SHOWN_EVERY = 8
"""pages between two progress log lines"""
logger = logging.getLogger(__name__)


class RemoteLedgerError(Exception):
    """Events that contradict each other or the local copy."""


async def verify_remote(
    client: PublicClient, descriptor: Descriptor, path: Path, held: SignedHead | None, coordinator: str | None = None
) -> AuditReport:
    """Copy a ledger to a database at `path`, build its tables from the events, and verify all of it."""
    if path.exists():
        _check_copy(path, descriptor)
    engine = open_database(str(path))
    try:
        with engine.connect() as connection:
            prepare_schema(connection, (BALANCES, *PROJECTIONS))
        await _copy_ledger(client, descriptor, engine)
    finally:
        engine.dispose()
    with open_reader(str(path)) as reader:
        return verify_ledger(reader, projections=PROJECTIONS, held=held, coordinator=coordinator, descriptor=descriptor)


def _check_copy(path: Path, descriptor: Descriptor) -> None:
    """Refuse to write to a file that is not a copy as this version makes it: someone else's triggers would run. A copy
    of another run's ledger is the reader's mistake and no fork."""
    with open_reader(str(path)) as engine, read_snapshot(engine) as connection:
        check_copy(connection, (BALANCES, *PROJECTIONS))
        genesis = read_event(connection, 0)
    if genesis is not None and genesis.actor != descriptor.coordinator:
        whose = f"of coordinator {genesis.actor[:64]}, not of {descriptor.coordinator} of run {descriptor.run}"
        raise ConfigError(f"--copy: {path} is the ledger {whose}; name another file")


async def fetch_events(client: PublicClient, first: int | None, count: int) -> tuple[list[Event], int]:
    """`count` events starting at `first` (None: the last ones) that a signed head covers, and the number it covers."""
    size = (await _fetch_head(client)).head.size
    start = max(0, size - count) if first is None else first
    events: list[Event] = []
    while start + len(events) < size and len(events) < count:
        events += _check_page(await client.read_page(start + len(events)))
    return events[:count], size


async def fetch_proof(client: PublicClient, descriptor: Descriptor, event: str) -> InclusionProof:
    """Fetch and check the proof that an event is in the ledger."""
    if not (event.isascii() and event.isdecimal() and len(event) <= 15):
        raise ConfigError(f"{event[:80]!r}: not an event number; on a remote ledger events are selected by number")
    try:
        proof = InclusionProof.from_bytes(await client.read_event(int(event)))
        proof.check_proof(descriptor.run, descriptor.coordinator)
    except EventError as error:
        raise UnreachableError(f"the server sent an invalid proof: {error}") from None
    if proof.event.seq != int(event):
        raise UnreachableError("the server sent a different event than requested")
    return proof


def _check_page(events: list[Event]) -> list[Event]:
    """Reject events that shoal cannot have written, before they are shown."""
    for event in events:
        try:
            event.check_form()
        except EventError as error:
            raise UnreachableError(f"the server sent malformed events: event {event.seq}: {error}") from None
    return events


async def _fetch_head(client: PublicClient) -> SignedHead:
    head = await client.read_head()
    if head is None:
        raise UnreachableError("the coordinator has not signed a head yet; it signs one every minute")
    return head


async def _copy_ledger(client: PublicClient, descriptor: Descriptor, engine: Engine) -> None:
    """Fetch the events that the copy lacks, up to the newest signed head."""
    head = await _fetch_head(client)
    try:
        head.check_signed(descriptor.run, descriptor.coordinator)
    except HeadError as error:
        raise RemoteLedgerError(f"invalid newest head: {error}") from None
    with engine.connect() as connection, connection.begin():
        size = count_events(connection)
    if size > head.head.size:
        raise RemoteLedgerError(
            f"the copy has {size} events, the coordinator's newest head only {head.head.size}: a fork"
        )
    signed = f"{head.head.size} events, up to the newest signed head; later ones are covered by the next"
    logger.info("the ledger has %s; %d are copied already", signed, size)
    number = 0
    while size < head.head.size:
        events = (await client.read_page(size))[: head.head.size - size]
        with engine.begin() as connection:
            _append_events(connection, events)
        size += len(events)
        number += 1
        if number % _SHOWN_EVERY == 0 or size == head.head.size:
            logger.info("copied %d of %d events", size, head.head.size)
    with engine.begin() as connection:
        if all(known.head.size != size for known in read_heads(connection, head.head.run)):
            insert_rows(connection, [], [], [head])


def _append_events(connection: Connection, events: list[Event]) -> None:
    """Append events to the copy; raise if one does not follow from the events already there."""
    frontier, last_hash = _load_end(connection)
    nodes: list[Subtree] = []
    for event in events:
        if event.prev_hash != last_hash:
            raise RemoteLedgerError(f"event {event.seq} does not follow event {event.seq - 1} of the copy: a fork")
        try:
            event.check_form()
            apply_event((BALANCES, *PROJECTIONS), event, connection)
        except BROKEN as error:
            raise RemoteLedgerError(f"event {event.seq} contradicts those before it ({error!r:.200})") from None
        frontier, grown = frontier.grow_leaf(hash_leaf(event.hash))
        nodes += [node for node in grown if node.level >= TILE_LEVEL]
        last_hash = event.hash
    insert_rows(connection, events, nodes, [])


def _load_end(connection: Connection) -> tuple[Frontier, bytes]:
    size = count_events(connection)
    if size == 0:
        return Frontier(), GENESIS_PREV
    last = read_event(connection, size - 1)
    assert last is not None, "the event with the largest number exists"
    return load_frontier(NodeReader(connection), size), last.hash
