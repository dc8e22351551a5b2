"""Replays the decisions of a run's ledger, from the genesis to the last event.

Invariant at the end: an owner's accounts hold exactly the amounts that the tables list as pending.

    pending = holds,   unbond = bonds being returned,   redeeming = open requests

The coordinator does not check this itself. It follows from all its rules together, so a bug in any of them is found
here too.

The ledger does not record who requested some decisions: a batch is cut for a trainer, a lease is returned by its node.
For these the replay checks that some node existed that was allowed to make the request.

Replaying a decision: every event that it appends must equal the next event of the ledger.

    EventCursor         the next event of the ledger, and the tables as they are before it
    ReplayTransaction   compares each appended event with the cursor's next event, then applies it to the tables
    ReplayDecision      a decision without the coordinator's key: signs nothing, and checks no signature again

Values that only the coordinator knew are read from the ledger and checked: the beacons and their secret against the
hash chain of the genesis. Signatures were checked earlier, with the hash chain; here the signer is compared with the
node that had to sign.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from shoal.coordinator.cache import RunCache
from shoal.coordinator.decide import admin, batches, claims, credit, leases, membership, submissions, verdicts
from shoal.coordinator.decide.context import Decision, RunContext, require_trainer
from shoal.coordinator.state.members import list_nodes
from shoal.coordinator.state.run import find_step, read_run
from shoal.coordinator.state.submissions import find_submission, list_with_blob
from shoal.coordinator.state.validators import list_draws
from shoal.identity.documents import Tag
from shoal.identity.keys import Key, check_public
from shoal.ledger.db import Projection, Sql, apply_event, fetch_row
from shoal.ledger.event import Event, EventKind, Posting, Statement, decode_body, encode_body
from shoal.ledger.ledger import LedgerTransaction
from shoal.ledger.schema import describe_rules_version
from shoal.net.api_error import ApiError
from shoal.protocol import events as bodies
from shoal.protocol import messages
from shoal.protocol.beacon import BeaconChain, check_beacon, draw_second
from shoal.protocol.events import parse_event, read_body
from shoal.protocol.params import MILLION, dump_params, parse_params


class AuditError(ValueError):
    """An event that the rules do not produce, or a missing event that they do produce; the text is one sentence."""


class EventCursor:
    """The next event of the ledger, and the tables as they are before it."""

    def __init__(
        self,
        events: Iterator[Event],
        connection: Connection,
        projections: Sequence[Projection],
        last: Event | None = None,
    ) -> None:
        """`last` is the preceding event, or None at the beginning."""
        self.connection = connection
        self._events, self._projections = events, projections
        self.next = next(events, None)
        """None at the end of the ledger"""
        self.size, self.time_ms = (0, 0) if last is None else (last.seq + 1, last.time_ms)
        """number of events taken so far, and the time of the last one"""

    def take(self) -> Event:
        """Advance by one event, after it was compared with what the rules require."""
        event = self.next
        assert event is not None, "the event was compared, so it exists"
        apply_event(self._projections, event, self.connection)
        self.size, self.time_ms = event.seq + 1, event.time_ms
        self.next = next(self._events, None)
        return event


def name_event(kind: str, subject: str) -> str:
    """A short name for an event in messages."""
    return f"{kind} of {subject}" if subject else kind


class KnownStatement(Statement):
    """A statement whose signature was checked when the ledger was scanned."""

    def __post_init__(self) -> None:
        """Skip the signature check."""


_DECIDED_FIELDS = ("kind", "actor", "subject", "body", "signature", "postings", "time_ms")


class ReplayTransaction(LedgerTransaction):
    """A transaction that accepts only the next event of the ledger."""

    def __init__(self, cursor: EventCursor, run: str, coordinator: str) -> None:
        assert cursor.next is not None, "a decision begins with an event"
        self._cursor, self._run, self._coordinator = cursor, run, coordinator
        self.connection, self.time_ms, self.events = cursor.connection, cursor.next.time_ms, []

    @property
    def size(self) -> int:
        return self._cursor.size

    def _chain_event(self, draft: Event) -> Event:
        """Return the next event of the ledger; raise if it differs from the draft."""
        event = self._cursor.next
        if event is None:
            name = name_event(draft.kind, draft.subject)
            raise AuditError(f"after event {self._cursor.size - 1}: the ledger ends, but the rules require {name} next")
        if any(getattr(event, field) != getattr(draft, field) for field in _DECIDED_FIELDS):
            raise AuditError(
                f"event {event.seq}: {name_event(event.kind, event.subject)}{_describe_difference(event, draft)}"
            )
        return self._cursor.take()


class ReadChain(BeaconChain):
    """The beacons as the ledger reveals them, each checked against the previous one."""

    def __init__(self, cursor: EventCursor) -> None:
        self._cursor = cursor
        self._known: bytes | None = None
        """the secret, once the ledger reveals it"""

    def reveal_step(self, step: int) -> str:
        """The beacon that the ledger has for a step."""
        return self._check_next("beacon", step)

    def reveal_groups(self, step: int, first: int, count: int, group_size: int) -> tuple[str, ...]:
        """Nothing: a lease's seeds are not in the ledger, and follow from the beacon once its step is cut."""
        return ()

    def reveal_secret(self) -> str:
        """The secret that ends the chain; with it every secret draw can be recomputed."""
        secret = self._check_next("secret", read_run(self._cursor.connection).params.steps + 1)
        if self._cursor.next is not None:
            self._known = bytes.fromhex(secret)
            self._check_draws(self._known)
        return secret

    def draw_second(self, submission: str, blob: str) -> int:
        """Follow the ledger until it reveals the secret: skip a second opinion only if the outcome records it."""
        if self._known is not None:
            return draw_second(self._known, submission, blob)
        event = self._cursor.next
        is_spared = (
            event is not None
            and event.kind == EventKind.SUB_OUTCOME
            and read_body(event, bodies.SubmissionOutcome).spared
        )
        return MILLION if is_spared else 0

    def _check_draws(self, secret: bytes) -> None:
        for row in list_draws(self._cursor.connection):
            is_asked = draw_second(secret, row.submission, row.blob) < row.share
            if is_asked is not bool(row.because):
                stated, drawn = ("requested", "skipped") if row.because else ("skipped", "requested")
                raise AuditError(
                    f"event {self._cursor.size}: by the secret, the second opinion on {row.submission} is {drawn}, "
                    f"but it was {stated}"
                )

    def _check_next(self, field: str, step: int) -> str:
        event, connection = self._cursor.next, self._cursor.connection
        body = None if event is None else parse_event(event)
        revealed = str(getattr(body, field, ""))
        before = find_step(connection, step - 1)
        earlier = read_run(connection).beacon if before is None else before.beacon
        if event is not None and not check_beacon(revealed, earlier):
            name = name_event(event.kind, event.subject)
            raise AuditError(
                f"event {event.seq}: {name}: its {field} does not continue the beacon chain of the genesis"
            )
        return revealed


class ReplayDecision(Decision):
    """A decision without a caller: no document is signed."""

    def __init__(self, cursor: EventCursor, context: RunContext, coordinator: str) -> None:
        super().__init__(ReplayTransaction(cursor, context.run, coordinator), context)
        self._cursor = cursor
        self.last_ms = cursor.time_ms
        """time of the event before"""

    def open_message(self, actor: str, message: messages.Signable, signature: str) -> Statement:
        """The statement that the actor must have signed; the transaction compares it with the next event later."""
        kind, subject = messages.frame_message(message)
        body = encode_body(message.model_dump(mode="json"))
        return KnownStatement(self.run, actor, kind, subject, body, bytes.fromhex(signature))

    def read_progress(self, lease: str) -> int:
        """What the ledger says that the node reported: heartbeats are not in it."""
        event = self._cursor.next
        if event is None or (event.kind, event.subject) != (EventKind.LEASE_EXTEND, lease):
            return 0
        return read_body(event, bodies.LeaseExtend).done

    def sign(self, tag: Tag, message: messages.Message) -> str:
        """No document."""
        return ""


def _describe_difference(event: Event, wanted: Event) -> str:
    """How an event differs from what the rules require."""
    if (event.kind, event.subject) != (wanted.kind, wanted.subject):
        return f", but the rules require {name_event(wanted.kind, wanted.subject)} here"
    if (event.actor, event.signature) != (wanted.actor, wanted.signature):
        return f": signed by {event.actor[:16]}, must be signed by {wanted.actor[:16]}"
    if event.body != wanted.body:
        return f": {'; '.join(_list_changes(decode_body(event.body), decode_body(wanted.body)))}"
    if event.postings != wanted.postings:
        return f": moves {_show_postings(event.postings)}, the rules require {_show_postings(wanted.postings)}"
    return ": belongs to the previous decision but has a different time"


def _list_changes(actual: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in sorted(actual.keys() | wanted.keys()):
        if name not in wanted:
            yield f"{name!a:.80} is not a field of this event"
        elif name not in actual:
            yield f"{name} is missing"
        elif encode_body({"": actual[name]}) != encode_body({"": wanted[name]}):
            yield f"{name} is {actual[name]!a:.80}, the rules require {wanted[name]!a:.80}"


def _show_postings(postings: tuple[Posting, ...]) -> str:
    shown = [f"{posting.amount:+d} {posting.account[:24]}" for posting in postings[:8]]
    return ", ".join(shown) or "no credit"


Case = Callable[[ReplayDecision, Event], object]


def repeat_decision(decision: ReplayDecision, event: Event) -> object:
    """Replay the decision that begins with an event; return its answer."""
    case = _CASES.get(EventKind(event.kind))
    if case is None:
        raise AuditError(f"event {event.seq}: {name_event(event.kind, event.subject)}: no decision produces it")
    return case(decision, event)


def _join(decision: ReplayDecision, event: Event) -> object:
    document = read_body(event, bodies.NodeJoin).delegation.encode()
    return membership.join_node(decision, node=event.subject, document=document)


def _revoke(decision: ReplayDecision, event: Event) -> None:
    membership.revoke_node(decision, document=read_body(event, bodies.NodeRevoke).document.encode())


def _restate(decide: Callable[..., object], form: type[messages.Message], *, by_node: bool = False) -> Case:
    """The replay of a decision about a signed statement, which is in the ledger with that signature."""
    stated = next(iter(form.model_fields))

    def repeat(decision: ReplayDecision, event: Event) -> object:
        if not event.signature:
            raise AuditError(f"event {event.seq}: {name_event(event.kind, event.subject)}: missing signature")
        values = {stated: parse_event(event), "owner": event.actor, "signature": event.signature.hex()}
        signed = form(**{name: values[name] for name in form.model_fields})
        return decide(decision, event.actor, signed) if by_node else decide(decision, signed)

    return repeat


_command = _restate(admin.run_command, messages.SignedCommand)


def _grant(decision: ReplayDecision, event: Event) -> object:
    body = read_body(event, bodies.LeaseGrant)
    return leases.grant_lease(decision, node=body.node, request_key=body.request_key, version=body.version)


def _expire_leases(decision: ReplayDecision, event: Event) -> object:
    return leases.expire_leases(decision)


def _end_lease(decision: ReplayDecision, event: Event) -> object:
    body = read_body(event, bodies.LeaseEnd)
    match body.state:
        case "returned":
            return leases.return_lease(decision, node=body.node, lease_id=event.subject)
        case "expired":
            return _expire_leases(decision, event)
    return submissions.expire_uploads(decision)


def _receive(decision: ReplayDecision, event: Event) -> object:
    row = find_submission(decision.connection, event.subject)
    if row is None:
        raise ApiError(404, "unknown_submission", "there is no such submission")
    return submissions.record_receipt(decision, node=row.node, submission=event.subject)


def _claim(decision: ReplayDecision, event: Event) -> object:
    return claims.take_job(decision, node=read_body(event, bodies.ValidationClaim).validator)


def _cut(decision: ReplayDecision, event: Event) -> object:
    trainers = set(decision.params.trainers)
    nodes = [row.node for row in list_nodes(decision.connection) if {row.node, row.owner} & trainers]
    return batches.cut_batch(decision, node=_find_trainer(decision, nodes), step=read_body(event, bodies.BatchCut).step)


def _move_bond(decision: ReplayDecision, event: Event) -> object:
    if isinstance(parse_event(event), bodies.BondWaiting):
        raise ApiError(403, "nobody", "its owner did not request it")
    return credit.release_bonds(decision)


def _unban(decision: ReplayDecision, event: Event) -> object:
    """Either the operator's decision, or the first event that follows from a successful appeal after its deadline."""
    return _command(decision, event) if event.signature else verdicts.expire_opinions(decision)


def _start(decision: ReplayDecision, event: Event) -> object:
    """The coordinator states its own downtime; it must not exceed the time since the previous event."""
    shift_ms = read_body(event, bodies.CoordinatorUp).shift_ms
    if not 0 <= shift_ms <= decision.now_ms - decision.last_ms:
        raise ApiError(409, "away", "deadlines may move by at most the time since the previous event")
    return decision.append("", bodies.CoordinatorUp(shift_ms=shift_ms))


def _drop_blobs(decision: ReplayDecision, event: Event) -> None:
    """Check that each file belongs to a decided submission; whether it was still needed cannot be checked later."""
    blobs = list(read_body(event, bodies.BlobDrop).blobs)
    for blob in blobs:
        if not any(row.decided_ms and not row.dropped for row in list_with_blob(decision.connection, blob)):
            raise ApiError(409, "blob", f"the file {blob[:16]} does not belong to a decided submission")
    submissions.record_drop(decision, blobs=blobs)


def _find_trainer(decision: ReplayDecision, nodes: list[str]) -> str:
    """One of the given nodes that was allowed to request a batch at this point."""
    refusal = ApiError(403, "nobody", "no node was allowed to request it")
    for node in nodes:
        try:
            return require_trainer(decision, node).node.node
        except ApiError as error:
            refusal = error
    raise refusal


_CASES: dict[EventKind, Case] = {
    EventKind.PARAMS: _command,
    EventKind.ADMIN: _command,
    EventKind.COORDINATOR_UP: _start,
    EventKind.COORDINATOR_DOWN: lambda decision, event: membership.record_stop(decision),
    EventKind.NODE_JOIN: _join,
    EventKind.NODE_DELEGATE: _join,
    EventKind.NODE_REVOKE: _revoke,
    EventKind.NODE_STANDING: lambda decision, event: membership.lift_limits(decision),
    EventKind.NODE_LEAVE: lambda decision, event: membership.leave_node(decision, event.subject),
    EventKind.LEASE_GRANT: _grant,
    EventKind.LEASE_EXTEND: _expire_leases,
    EventKind.LEASE_END: _end_lease,
    EventKind.SUB_COMMIT: _restate(submissions.commit_manifest, messages.SignedManifest, by_node=True),
    EventKind.SUB_RECEIPT: _receive,
    EventKind.SUB_OUTCOME: lambda decision, event: verdicts.expire_opinions(decision),
    EventKind.VAL_CLAIM: _claim,
    EventKind.VAL_VERDICT: _restate(verdicts.post_verdict, messages.SignedVerdict, by_node=True),
    EventKind.VAL_LAPSE: lambda decision, event: claims.expire_claims(decision),
    EventKind.BATCH_CUT: _cut,
    EventKind.VERSION_PUBLISH: _restate(batches.publish_version, messages.SignedVersion, by_node=True),
    EventKind.BLOB_DROP: _drop_blobs,
    EventKind.CREDIT_POST: lambda decision, event: credit.release_holds(decision),
    EventKind.STAKE_REQUEST: _restate(credit.unbond_stake, messages.SignedUnbond),
    EventKind.STAKE_UNBOND: _move_bond,
    EventKind.BAN: _command,
    EventKind.UNBAN: _unban,
    EventKind.APPEAL: _restate(verdicts.open_appeal, messages.SignedAppeal),
    EventKind.CANARY_SEAL: _command,
    EventKind.CANARY_REVEAL: _command,
    EventKind.REDEEM_REQUEST: _restate(credit.request_redeem, messages.SignedRedeem),
    EventKind.REDEEM_DONE: _command,
    EventKind.REDEEM_FAILED: _command,
}
"""Kinds missing here only follow from other events: steps that a version opens, slashes, doubts, grades."""


_HELD = (
    ("pending", "SELECT owner, sum(amount) AS amount FROM hold WHERE state IN ('held', 'ready', 'frozen')"),
    ("unbond", "SELECT owner, sum(amount) AS amount FROM bond WHERE state IN ('waiting', 'frozen')"),
    ("redeeming", "SELECT owner, sum(amount) AS amount FROM redeem WHERE state = 'open'"),
)
_UNEQUAL = (
    "SELECT account, max(have), max(due) FROM ("
    "SELECT account, amount AS have, 0 AS due FROM balance WHERE account LIKE '{kind}:%' AND amount <> 0 UNION ALL "
    "SELECT '{kind}:' || owner, 0, amount FROM ({held} GROUP BY owner) AS held) AS sums "
    "GROUP BY account HAVING max(have) <> max(due) ORDER BY account LIMIT 1"
)


def check_accounts(connection: Connection) -> None:
    """Reject an account whose balance differs from the sum of its pending amounts."""
    for kind, held in _HELD:
        row = fetch_row(connection, Sql(_UNEQUAL.format(kind=kind, held=held)), _describe)
        if row is not None:
            raise AuditError(f"at the end of the ledger: {row}")


def _describe(account: str, have: int, due: int) -> str:
    return f"{account[:24]} holds {have}, but its pending amounts sum to {due}"


BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, SQLAlchemyError)
"""What the coordinator's code may raise on an event that it did not write: a forged ledger may contain anything."""


def replay_run(events: Iterator[Event], target: Connection, projections: Sequence[Projection]) -> None:
    """Apply all events of a ledger to the tables of an empty database, if each is what the rules produce.

    Otherwise raise `AuditError` for the first event that is not.
    """
    cursor = EventCursor(events, target, projections)
    genesis = cursor.next
    if genesis is None:
        return
    if words := describe_rules_version(genesis):
        raise AuditError(f"event 0: {words}")
    try:
        _check_genesis(genesis)
        cursor.take()
    except BROKEN as error:
        raise AuditError(f"event 0: not the genesis of a run ({_show_error(error)})") from error
    context = open_context(cursor)
    while cursor.next is not None:
        replay_decision(cursor, context, genesis.actor)
    check_accounts(target)


def open_context(cursor: EventCursor) -> RunContext:
    """The part of the context that is the same for all decisions."""
    state = read_run(cursor.connection)
    return RunContext(state.run, Key.generate(), ReadChain(cursor), RunCache(cursor.connection, state))


def replay_decision(cursor: EventCursor, context: RunContext, coordinator: str) -> None:
    """Replay one decision with all its events; `AuditError` if the ledger has a different result."""
    event = cursor.next
    assert event is not None, "a decision begins with an event"
    place, size = f"event {event.seq}: {name_event(event.kind, event.subject)}", cursor.size
    try:
        answer = repeat_decision(ReplayDecision(cursor, context, coordinator), event)
    except AuditError:
        raise
    except ApiError as error:
        raise AuditError(f"{place}: refused by the rules: {error.text}") from error
    except BROKEN as error:
        raise AuditError(f"{place}: not what the rules produce ({_show_error(error)})") from error
    if cursor.size == size:
        reason = getattr(answer, "reason", "") or "the decision it could begin has no effect"
        raise AuditError(f"{place}: refused by the rules: {reason}")


def _check_genesis(event: Event) -> None:
    genesis = read_body(event, bodies.Genesis)
    check_public(genesis.operator)
    if dump_params(parse_params(genesis.params)) != genesis.params:
        raise ValueError("missing parameters")


def _show_error(error: BaseException) -> str:
    return f"{error!a:.200}"
