"""One decision in progress: what it needs, and which callers may request it.

Invariants:
- everything it appends reaches the cache, in order, once it is on disk;
- permissions are checked in the decision itself, because they may have changed since the server checked them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection

from shoal.coordinator.cache import RunCache
from shoal.coordinator.state.members import NodeRow, OwnerRow, find_ban, find_node, find_owner
from shoal.coordinator.state.run import read_run
from shoal.identity.authenticator import check_term, refuse_left, refuse_revoked
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag, sign_document
from shoal.identity.keys import Key
from shoal.ledger.event import Event, Posting, Statement, encode_body
from shoal.ledger.ledger import LedgerTransaction
from shoal.ledger.reader import read_event
from shoal.net.api_error import ApiError, refuse_banned
from shoal.protocol.beacon import BeaconChain
from shoal.protocol.events import EventBody
from shoal.protocol.messages import Message, Signable, Standing, open_message
from shoal.protocol.params import RunParams

Row = TypeVar("Row")
Built = TypeVar("Built", bound=Message)


def build_from(kind: type[Built], row: object, **values: Any) -> Built:
    """A message with these values; fields that have no default and are not given come from a row."""
    missing = [name for name, field in kind.model_fields.items() if field.is_required() and name not in values]
    return kind(**{name: getattr(row, name) for name in missing}, **values)


def require_row(row: Row | None, reason: str) -> Row:
    """A row that must exist, unless the tables contradict each other."""
    assert row is not None, reason
    return row


@dataclass(frozen=True, slots=True)
class RunContext:
    """The part of a decision's context that is the same for all decisions."""

    run: str
    key: Key
    chain: BeaconChain
    cache: RunCache


class Decision:
    """One decision."""

    def __init__(self, transaction: LedgerTransaction, context: RunContext) -> None:
        self._transaction, self.context, self.run = transaction, context, context.run
        self.connection, self.now_ms, self.events = transaction.connection, transaction.time_ms, transaction.events
        self.state = read_run(self.connection)
        """the run at the start of the decision; the cache may be a group of decisions behind"""
        self.params = self.state.params

    @property
    def next_seq(self) -> int:
        """The number of the next event; ids of what it creates are derived from it."""
        return self._transaction.size

    def append(self, subject: str, body: EventBody, postings: Iterable[Posting] = ()) -> Event:
        """Append one of the coordinator's own events."""
        return self._transaction.append(body.kind, subject=subject, body=body.to_body(), postings=postings)

    def record(self, statement: Statement, postings: Iterable[Posting] = ()) -> Event:
        """Append a statement that someone else signed."""
        return self._transaction.record(statement, postings=postings)

    def open_message(self, actor: str, message: Signable, signature: str) -> Statement:
        """Check a signed message and return it as a statement; `ApiError` if the signature is invalid."""
        return open_message(self.run, actor, message, signature)

    def is_recorded(self, seq: int, message: Message) -> bool:
        """Whether an event records exactly this message; assumed if the event is not on disk yet (same group)."""
        event = read_event(self.connection, seq)
        return event is None or event.body == encode_body(message.model_dump(mode="json"))

    def read_progress(self, lease: str) -> int:
        """Finished rollouts of a current lease, as its node reports them."""
        return self.context.cache.find_progress(lease)

    def sign(self, tag: Tag, message: Message) -> str:
        """Sign a document for the caller to keep."""
        return sign_document(self.context.key, tag, message.model_dump(mode="json")).decode()


class RunView(Protocol):
    """What the checks of permissions read: of a decision, or of a reader that decides nothing."""

    @property
    def connection(self) -> Connection: ...

    @property
    def now_ms(self) -> int: ...

    @property
    def params(self) -> RunParams: ...


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as a reader sees it."""

    connection: Connection
    now_ms: int
    params: RunParams


class CallerRows(NamedTuple):
    """The rows of a caller: its node and its owner."""

    node: NodeRow
    owner: OwnerRow


def check_ban(decision: RunView, node: str, owner: str) -> None:
    """Raise if a node or its owner is banned."""
    ban = find_ban(decision.connection, node, owner)
    if ban is not None:
        raise refuse_banned(ban.seq, ban.reason)


def require_member(decision: RunView, node: str, scope: Scope | None = None) -> CallerRows:
    """The caller, if it may act in the run now; otherwise `ApiError`."""
    row = find_node(decision.connection, node)
    if row is None:
        raise ApiError(401, "unknown_node", "unknown node: join this run first")
    check_ban(decision, node, row.owner)
    if row.gone == "revoked":
        raise refuse_revoked()
    if row.gone:
        raise refuse_left()
    check_term(row.not_before_ms, row.not_after_ms, decision.now_ms)
    if scope is not None and scope.value not in row.scopes.split(","):
        raise ApiError(403, "scope", f"this node's delegation does not include the scope {scope.value}")
    owner = require_row(find_owner(decision.connection, row.owner), "every node has an owner")
    return CallerRows(row, owner)


def require_validator(decision: RunView, node: str) -> CallerRows:
    """The caller, if it may judge now; otherwise `ApiError`."""
    rows = require_member(decision, node, Scope.VALIDATE)
    if not {node, rows.owner.owner} & set(decision.params.validators):
        raise ApiError(403, "not_validator", "this node is not a validator of this run")
    if rows.owner.standing == Standing.LIMITED:
        text = "this validator may not judge for a while: lapsed claims, inconclusive or wrong verdicts"
        raise ApiError(403, "limited", text)
    return rows


def require_trainer(decision: Decision, node: str) -> CallerRows:
    """The caller, if it may cut batches and publish versions; otherwise `ApiError`."""
    rows = require_member(decision, node, Scope.TRAIN)
    if not {node, rows.owner.owner} & set(decision.params.trainers):
        raise ApiError(403, "not_trainer", "this node is not a trainer of this run")
    return rows
