"""Submissions, the hashes of their rollouts, and rollouts that were handed in before.

    committed -> received -> accepted | rejected_* | inconclusive | void,   committed -> unsent | superseded | void

A rollout's hash belongs to the first submission that committed it. A later one with the same hash at another place is a
duplicate of it, unless the first was not accepted; then an accepted later one takes the hash over. The same hash at the
same place (step, group, sample) is no duplicate: whoever computes a group gets the same rollouts.
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import SubmissionState
from shoal.swarm.rules.deadline import upload_time
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.leases import LeaseRow, submit_lease
from shoal.swarm.state.spans import retake_span

SUBMISSION = define_table(
    "submission",
    Column("submission", Text, primary_key=True),
    Column("lease", Text, nullable=False, unique=True),
    Column("node", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("step", INT64, nullable=False),
    Column("first", INT64, nullable=False),
    Column("count", INT64, nullable=False),
    Column("version", INT64, nullable=False),
    Column("blob", Text, nullable=False, index=True),
    Column("size", INT64, nullable=False),
    Column("tokens", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("committed_ms", INT64, nullable=False),
    Column("upload_ms", INT64, nullable=False),
    Column("received_ms", INT64, nullable=False),
    Column("decided_ms", INT64, nullable=False),
    Column("paid", INT64, nullable=False),
    Column("dropped", INT64, nullable=False),
)
Index("submission_kept", SUBMISSION.c.dropped, SUBMISSION.c.state, SUBMISSION.c.decided_ms)
Index("submission_span", SUBMISSION.c.step, SUBMISSION.c.first)
Index("submission_due", SUBMISSION.c.state, SUBMISSION.c.upload_ms)
Index("submission_owner", SUBMISSION.c.owner, SUBMISSION.c.state)
ROLLOUT = define_table(
    "rollout",
    Column("hash", Text, primary_key=True),
    Column("submission", Text, nullable=False),
    Column("step", INT64, nullable=False),
    Column("position", INT64, nullable=False),
)
DUPLICATE = define_table(
    "duplicate",
    Column("submission", Text, primary_key=True),
    Column("place", INT64, primary_key=True, autoincrement=False),
    Column("position", INT64, nullable=False),
    Column("hash", Text, nullable=False),
    Column("rival", Text, nullable=False, index=True),
)


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """A submission."""

    submission: str
    lease: str
    node: str
    owner: str
    step: int
    first: int
    count: int
    version: int
    blob: str
    size: int
    tokens: int
    """that the node says it has"""
    state: str
    committed_ms: int
    upload_ms: int
    """until when the file is awaited"""
    received_ms: int
    decided_ms: int
    paid: int
    dropped: int
    """1 once its file was removed"""

    @property
    def is_open(self) -> bool:
        return self.state in (SubmissionState.COMMITTED, SubmissionState.RECEIVED)


class DuplicateRow(NamedTuple):
    """A rollout that another submission had before."""

    place: int
    """of the rollout in its submission"""
    rival: str
    rival_state: str


_SUBMISSIONS = f"SELECT {list_columns(SUBMISSION)} FROM submission"
_SELECT = Sql(f"{_SUBMISSIONS} WHERE submission = :submission")
_SELECT_LEASE = Sql(f"{_SUBMISSIONS} WHERE lease = :lease")
_SELECT_BLOB = Sql(f"{_SUBMISSIONS} WHERE blob = :blob ORDER BY committed_ms, submission")
_SELECT_DUE = Sql(
    f"{_SUBMISSIONS} WHERE state = 'committed' AND upload_ms <= :now_ms ORDER BY upload_ms, submission LIMIT :most"
)
_COUNT_AWAITED = Sql(
    "SELECT count(*), min(committed_ms), min(upload_ms) FROM (SELECT committed_ms, upload_ms FROM submission "
    "WHERE state = 'committed' ORDER BY upload_ms LIMIT :most) AS awaited"
)
_SELECT_OPEN = Sql(f"{_SUBMISSIONS} WHERE owner = :owner AND state IN ('committed', 'received') ORDER BY submission")
_COUNT_OPEN = Sql("SELECT count(*) FROM submission WHERE owner = :owner AND state IN ('committed', 'received')")
_SELECT_RIVALS = Sql(
    f"{_SUBMISSIONS} WHERE step = :step AND first = :first AND state = 'committed' ORDER BY submission"
)
_SELECT_DUPLICATES = Sql(
    "SELECT d.place, d.rival, r.state FROM duplicate d JOIN submission r ON r.submission = d.rival "
    "WHERE d.submission = :submission ORDER BY d.place"
)
_INSERT, _INSERT_DUPLICATE = insert_into(SUBMISSION), insert_into(DUPLICATE)
_INSERT_ROLLOUT = Sql(
    "INSERT INTO rollout (hash, submission, step, position) VALUES (:hash, :submission, :step, :position) "
    "ON CONFLICT (hash) DO NOTHING"
)
_SELECT_ROLLOUTS = Sql(
    "SELECT hash, submission, step, position FROM rollout WHERE hash IN (SELECT value FROM json_each(:hashes))",
    "SELECT hash, submission, step, position FROM rollout WHERE hash IN "
    "(SELECT jsonb_array_elements_text(CAST(:hashes AS jsonb)))",
)
_RECEIVE = Sql(
    "UPDATE submission SET state = 'received', received_ms = :time_ms WHERE submission = :submission "
    "AND state = 'committed'"
)
_DECIDE = Sql(
    "UPDATE submission SET state = :state, decided_ms = :time_ms, paid = paid + :paid WHERE submission = :submission"
)
_DROP = Sql("UPDATE submission SET state = :state, decided_ms = :time_ms WHERE lease = :lease AND state = 'committed'")
_SHIFT = Sql("UPDATE submission SET upload_ms = upload_ms + :shift_ms WHERE state = 'committed'")
_REJECTED = (SubmissionState.FORM.value, SubmissionState.SOFT.value, SubmissionState.HARD.value)
_DECIDED = tuple(
    state.value for state in SubmissionState if state not in (SubmissionState.COMMITTED, SubmissionState.RECEIVED)
)
_FREE = (
    "{0}.decided_ms > 0 AND {0}.decided_ms <= :kept_ms "
    f"AND ({{0}}.state NOT IN {_REJECTED} OR {{0}}.decided_ms <= :appealed_ms) "
    "AND NOT EXISTS (SELECT 1 FROM job j WHERE j.submission = {0}.submission AND j.state <> 'done') "
    "AND ({0}.state <> 'accepted' OR EXISTS (SELECT 1 FROM step t WHERE t.step = {0}.step AND t.state = 'trained' "
    "AND t.trained_ms <= :kept_ms))"
)
_SELECT_FREE = Sql(
    "SELECT s.blob FROM submission s WHERE s.dropped = 0 AND s.state = :state AND s.decided_ms <= :until_ms "
    f"AND {_FREE.format('s')} AND NOT EXISTS "
    f"(SELECT 1 FROM submission o WHERE o.blob = s.blob AND NOT ({_FREE.format('o')})) "
    "ORDER BY s.decided_ms, s.submission LIMIT :most"
)
_COUNT_USES = Sql(f"SELECT count(*) FROM submission s WHERE s.blob = :blob AND NOT ({_FREE.format('s')})")
_DROP_BLOB = Sql("UPDATE submission SET dropped = 1 WHERE blob = :blob AND decided_ms > 0")
_TAKE_OVER = Sql(
    "UPDATE rollout SET submission = :submission, step = :step, position = (SELECT min(d.position) FROM duplicate d "
    "WHERE d.submission = :submission AND d.hash = rollout.hash) WHERE hash IN "
    "(SELECT hash FROM duplicate WHERE submission = :submission)"
)


def find_submission(connection: Connection, submission: str) -> SubmissionRow | None:
    return fetch_row(connection, _SELECT, SubmissionRow, submission=submission)


def find_of_lease(connection: Connection, lease: str) -> SubmissionRow | None:
    return fetch_row(connection, _SELECT_LEASE, SubmissionRow, lease=lease)


def list_with_blob(connection: Connection, blob: str) -> list[SubmissionRow]:
    return fetch_rows(connection, _SELECT_BLOB, SubmissionRow, blob=blob)


def list_unsent(connection: Connection, now_ms: int, most: int) -> list[SubmissionRow]:
    """Submissions whose file did not come in time."""
    return fetch_rows(connection, _SELECT_DUE, SubmissionRow, now_ms=now_ms, most=most)


def count_awaited(connection: Connection, most: int) -> tuple[int, int, int]:
    """Submissions whose file is awaited, counted up to `most`; since when the first of them, and its deadline."""
    count, since_ms, due_ms = fetch_row(connection, _COUNT_AWAITED, lambda *row: row, most=most) or (0, None, None)
    return count, since_ms or 0, due_ms or 0


def list_open(connection: Connection, owner: str) -> list[SubmissionRow]:
    """Submissions of an owner that are not decided."""
    return fetch_rows(connection, _SELECT_OPEN, SubmissionRow, owner=owner)


def count_open(connection: Connection, owner: str) -> int:
    return fetch_number(connection, _COUNT_OPEN, owner=owner)


def list_rivals(connection: Connection, step: int, first: int) -> list[SubmissionRow]:
    """Submissions for a span whose file is awaited."""
    return fetch_rows(connection, _SELECT_RIVALS, SubmissionRow, step=step, first=first)


def list_duplicates(connection: Connection, submission: str) -> list[DuplicateRow]:
    return fetch_rows(connection, _SELECT_DUPLICATES, DuplicateRow, submission=submission)


def list_free_blobs(connection: Connection, kept_ms: int, appealed_ms: int, most: int) -> list[str]:
    """Files that nobody may need any more.

    All submissions with such a file were decided before `kept_ms`, the rejected ones before `appealed_ms`; none is
    judged, and the batches of the accepted ones were trained on before `kept_ms`.
    """
    found: dict[str, None] = {}
    for state in _DECIDED:  # each by its time, so that what may be appealed is not looked at again and again
        values = {"state": state, "kept_ms": kept_ms, "appealed_ms": appealed_ms, "most": most - len(found)}
        values["until_ms"] = appealed_ms if state in _REJECTED else kept_ms
        found |= dict.fromkeys(fetch_rows(connection, _SELECT_FREE, str, **values))
    return list(found)


def is_free_blob(connection: Connection, blob: str, kept_ms: int, appealed_ms: int) -> bool:
    """Whether a file is one of them."""
    return not fetch_number(connection, _COUNT_USES, blob=blob, kept_ms=kept_ms, appealed_ms=appealed_ms)


def add_submission(event: Event, connection: Connection) -> None:
    """sub.commit"""
    content = event.content
    lease = submit_lease(event, connection)
    if lease.state == "expired":
        retake_span(connection, lease.step, lease.first)
    name = f"s{event.seq}"
    row = {name: content[name] for name in ("lease", "version", "blob", "size")}
    row |= {name: getattr(lease, name) for name in ("node", "owner", "step", "first", "count")}
    row |= {
        "submission": name,
        "tokens": sum(rollout["tokens"] for rollout in content["rollouts"]),
        "state": SubmissionState.COMMITTED.value,
        "committed_ms": event.time_ms,
        "upload_ms": event.time_ms + upload_time(lease.upload_s, content["size"], len(content["rollouts"])),
    }
    _INSERT.run(connection, {**row, "received_ms": 0, "decided_ms": 0, "paid": 0, "dropped": 0})
    _add_rollouts(connection, name, lease, content["rollouts"])


def receive_submission(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    values = {"submission": event.subject, "time_ms": event.time_ms}
    if _RECEIVE.run(connection, values).rowcount != 1:
        raise ValueError("a receipt for a submission that awaits no file")


def drop_submission(event: Event, connection: Connection) -> None:
    """lease.end of a lease whose file does not come any more"""
    if event.content["state"] == "unsent":
        values = {"lease": event.subject, "state": event.content["because"], "time_ms": event.time_ms}
        _DROP.run(connection, values)


def decide_submission(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    content = event.content
    values = {"submission": event.subject, "state": content["state"], "paid": content["paid"]}
    _DECIDE.run(connection, {**values, "time_ms": event.time_ms})
    if content["state"] == SubmissionState.ACCEPTED:
        _TAKE_OVER.run(connection, {"submission": event.subject, "step": content["step"]})


def drop_blobs(event: Event, connection: Connection) -> None:
    """blob.drop"""
    for blob in event.content["blobs"]:
        _DROP_BLOB.run(connection, {"blob": blob})


def shift_uploads(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": event.content["shift_ms"]})


def _add_rollouts(connection: Connection, name: str, lease: LeaseRow, rollouts: list[dict[str, Any]]) -> None:
    """Keep the hashes of long rollouts; note which others had before."""
    start, least = lease.first * (len(rollouts) // lease.count), lease.duplicate_tokens
    rows = [
        {"hash": rollout["hash"], "submission": name, "step": lease.step, "position": start + place}
        for place, rollout in enumerate(rollouts)
        if least and rollout["tokens"] >= least
    ]
    if not rows:
        return
    hashes = json.dumps([row["hash"] for row in rows])
    known = {row[0]: row[1:] for row in _SELECT_ROLLOUTS.run(connection, {"hashes": hashes}).fetchall()}
    if fresh := [row for row in rows if row["hash"] not in known]:
        _INSERT_ROLLOUT.run_many(connection, fresh)
    duplicates = [
        {**row, "place": row["position"] - start, "rival": known[row["hash"]][0]}
        for row in rows
        if row["hash"] in known and tuple(known[row["hash"]][1:]) != (row["step"], row["position"])
    ]
    if duplicates:
        _INSERT_DUPLICATE.run_many(connection, duplicates)
