"""Submissions, the hashes of their rollouts, and duplicate rollouts.

    committed -> received -> accepted | rejected_* | inconclusive | void,   committed -> unsent | superseded | void

A rollout's hash belongs to the first submission that committed it. A later one with the same hash at another place is a
duplicate of it, unless the first was not accepted; then an accepted later one takes over the hash. The same hash at the
same place (step, group, sample) is no duplicate: everyone who computes a group gets the same rollouts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Index

from shoal.coordinator.rules.leases import upload_time
from shoal.coordinator.state.leases import LeaseRow, retake_range, submit_lease
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.events import BlobDrop, CoordinatorUp, LeaseEnd, SubmissionOutcome, read_body
from shoal.protocol.messages import REJECTED, Manifest, RolloutEntry, SubmissionState

ROLLOUT = db.define_table("rollout", {"hash": str, "submission": str, "step": int, "position": int}, key="hash")
DUPLICATE = db.define_table(
    "duplicate",
    {"submission": str, "place": int, "position": int, "hash": str, "rival": str},
    key=("submission", "place"),
    index="rival",
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
    """by the node's manifest"""
    state: str
    committed_ms: int
    upload_ms: int
    """deadline of the upload"""
    received_ms: int
    decided_ms: int
    paid: int
    dropped: int
    """1 once its file was deleted"""

    @property
    def is_open(self) -> bool:
        return self.state in (SubmissionState.COMMITTED, SubmissionState.RECEIVED)


SUBMISSION = db.define_table("submission", SubmissionRow, key="submission", index="blob", unique="lease")
Index("submission_kept", SUBMISSION.c.dropped, SUBMISSION.c.state, SUBMISSION.c.decided_ms)
Index("submission_span", SUBMISSION.c.step, SUBMISSION.c.first)
Index("submission_due", SUBMISSION.c.state, SUBMISSION.c.upload_ms)
Index("submission_owner", SUBMISSION.c.owner, SUBMISSION.c.state)


class KeepTimes(NamedTuple):
    """Times before which a decision must lie for its file to be deleted."""

    now_ms: int
    """of files that are not needed once it is decided"""
    kept_ms: int
    form_ms: int
    """of rejections for form"""
    appealed_ms: int
    """of other rejections"""
    patience: int
    """bytes above which owners without accepted work have other files deleted at the time of `form_ms`"""

    def find_end(self, state: str) -> int:
        """The latest time at which a submission in this state was decided whose file can be deleted."""
        match state:
            case SubmissionState.UNSENT | SubmissionState.SUPERSEDED | SubmissionState.VOID:
                return self.now_ms
            case SubmissionState.ACCEPTED:
                return self.kept_ms
            case SubmissionState.FORM:
                return self.form_ms
            case SubmissionState.SOFT | SubmissionState.HARD:
                return self.appealed_ms
        return self.kept_ms


class DuplicateRow(NamedTuple):
    """A rollout that an earlier submission contains."""

    place: int
    """position of the rollout in its submission"""
    rival: str
    rival_state: str


_COUNT_AWAITED = db.Sql(
    "SELECT count(*), min(committed_ms), min(upload_ms) FROM (SELECT committed_ms, upload_ms FROM submission "
    "WHERE state = 'committed' ORDER BY upload_ms LIMIT :most) AS awaited"
)
_COUNT_OPEN = db.Sql("SELECT count(*) FROM submission WHERE owner = :owner AND state IN ('committed', 'received')")
_SELECT_DUPLICATES = db.Sql(
    "SELECT d.place, d.rival, r.state FROM duplicate d JOIN submission r ON r.submission = d.rival "
    "WHERE d.submission = :submission ORDER BY d.place"
)
_INSERT_ROLLOUT = db.Sql(
    "INSERT INTO rollout (hash, submission, step, position) VALUES (:hash, :submission, :step, :position) "
    "ON CONFLICT (hash) DO NOTHING"
)
_SELECT_ROLLOUTS = db.Sql(
    "SELECT hash, submission, step, position FROM rollout WHERE hash IN (SELECT value FROM json_each(:hashes))",
    "SELECT hash, submission, step, position FROM rollout WHERE hash IN "
    "(SELECT jsonb_array_elements_text(CAST(:hashes AS jsonb)))",
)
_DECIDE = db.Sql(
    "UPDATE submission SET state = :state, decided_ms = :time_ms, paid = paid + :paid WHERE submission = :submission"
)
_SHIFT = db.Sql("UPDATE submission SET upload_ms = upload_ms + :shift_ms WHERE state = 'committed'")
_REJECTED = tuple(state.value for state in REJECTED)
_SELECT_REJECTED = db.Sql(
    f"SELECT submission FROM submission WHERE owner = :owner AND state IN {_REJECTED} "
    "ORDER BY decided_ms DESC, submission DESC LIMIT :most"
)
_DECIDED = tuple(
    state.value for state in SubmissionState if state not in (SubmissionState.COMMITTED, SubmissionState.RECEIVED)
)
_FREE = (
    "{0}.decided_ms > 0 AND ({0}.decided_ms <= CASE WHEN {0}.received_ms = 0 THEN :now_ms "
    "WHEN {0}.state = 'rejected_form' THEN :form_ms WHEN {0}.state IN ('rejected_soft', 'rejected_hard') "
    "THEN :appealed_ms ELSE :kept_ms END OR ({0}.decided_ms <= :form_ms AND {0}.state <> 'accepted' AND EXISTS "
    "(SELECT 1 FROM owner_room r WHERE r.owner = {0}.owner AND r.earned = 0 AND r.held > :patience))) "
    "AND NOT EXISTS (SELECT 1 FROM job j WHERE j.submission = {0}.submission AND j.state <> 'done') "
    "AND ({0}.state <> 'accepted' OR EXISTS (SELECT 1 FROM step t WHERE t.step = {0}.step AND t.state = 'trained' "
    "AND t.trained_ms <= :kept_ms))"
)
_SELECT_FREE = db.Sql(
    "SELECT s.blob FROM submission s WHERE s.dropped = 0 AND s.state = :state AND s.decided_ms <= :until_ms "
    f"AND {_FREE.format('s')} AND NOT EXISTS "
    f"(SELECT 1 FROM submission o WHERE o.blob = s.blob AND NOT ({_FREE.format('o')})) "
    "ORDER BY s.decided_ms, s.submission LIMIT :most"
)
_SELECT_EARLY = db.Sql(
    "SELECT s.blob FROM owner_room m CROSS JOIN submission s WHERE m.earned = 0 AND m.held > 0 AND m.held > :patience "
    "AND s.owner = m.owner AND s.state IN ('rejected_soft', 'rejected_hard', 'inconclusive') AND s.dropped = 0 "
    f"AND s.decided_ms <= :form_ms AND {_FREE.format('s')} AND NOT EXISTS "
    f"(SELECT 1 FROM submission o WHERE o.blob = s.blob AND NOT ({_FREE.format('o')})) "
    "ORDER BY m.owner, s.decided_ms, s.submission LIMIT :most"
)
_COUNT_USES = db.Sql(f"SELECT count(*) FROM submission s WHERE s.blob = :blob AND NOT ({_FREE.format('s')})")
_TAKE_OVER = db.Sql(
    "UPDATE rollout SET submission = :submission, step = :step, position = (SELECT min(d.position) FROM duplicate d "
    "WHERE d.submission = :submission AND d.hash = rollout.hash) WHERE hash IN "
    "(SELECT hash FROM duplicate WHERE submission = :submission)"
)


def list_rejected(connection: Connection, owner: str, most: int) -> list[str]:
    """The latest rejected submissions of an owner."""
    return db.fetch_rows(connection, _SELECT_REJECTED, str, owner=owner, most=most)


def find_submission(connection: Connection, submission: str) -> SubmissionRow | None:
    return db.find_row(connection, SubmissionRow, submission=submission)


def find_of_lease(connection: Connection, lease: str) -> SubmissionRow | None:
    return db.find_row(connection, SubmissionRow, lease=lease)


def list_with_blob(connection: Connection, blob: str) -> list[SubmissionRow]:
    return db.list_rows(connection, SubmissionRow, "WHERE blob = :blob ORDER BY committed_ms, submission", blob=blob)


def list_unsent(connection: Connection, now_ms: int, most: int) -> list[SubmissionRow]:
    """Submissions whose file did not arrive in time."""
    condition = "WHERE state = 'committed' AND upload_ms <= :now_ms ORDER BY upload_ms, submission LIMIT :most"
    return db.list_rows(connection, SubmissionRow, condition, now_ms=now_ms, most=most)


def count_awaited(connection: Connection, most: int) -> tuple[int, int, int]:
    """Submissions whose file is expected, counted up to `most`; since when the first waits, and its deadline."""
    count, since_ms, due_ms = db.fetch_row(connection, _COUNT_AWAITED, lambda *row: row, most=most) or (0, None, None)
    return count, since_ms or 0, due_ms or 0


def list_open(connection: Connection, owner: str) -> list[SubmissionRow]:
    """Undecided submissions of an owner."""
    condition = "WHERE owner = :owner AND state IN ('committed', 'received') ORDER BY submission"
    return db.list_rows(connection, SubmissionRow, condition, owner=owner)


def count_open(connection: Connection, owner: str) -> int:
    return db.fetch_number(connection, _COUNT_OPEN, owner=owner)


def list_rivals(connection: Connection, step: int, first: int) -> list[SubmissionRow]:
    """Submissions for a range of groups whose file is expected."""
    condition = "WHERE step = :step AND first = :first AND state = 'committed' ORDER BY submission"
    return db.list_rows(connection, SubmissionRow, condition, step=step, first=first)


def list_duplicates(connection: Connection, submission: str) -> list[DuplicateRow]:
    return db.fetch_rows(connection, _SELECT_DUPLICATES, DuplicateRow, submission=submission)


def list_free_blobs(connection: Connection, times: KeepTimes, most: int) -> list[str]:
    """Files that are no longer needed: no submission with such a file is in the queue, expected, or kept for longer.

    The batches of the accepted ones were trained on before `kept_ms`.
    """
    found: dict[str, None] = {}
    for state in _DECIDED:  # each by its own time, so that appealable submissions are not scanned repeatedly
        values = {**times._asdict(), "state": state, "until_ms": times.find_end(state), "most": most - len(found)}
        found |= dict.fromkeys(db.fetch_rows(connection, _SELECT_FREE, str, **values))
    values = {**times._asdict(), "most": most - len(found)}
    found |= dict.fromkeys(db.fetch_rows(connection, _SELECT_EARLY, str, **values))
    return list(found)


def is_free_blob(connection: Connection, blob: str, times: KeepTimes) -> bool:
    """Whether a file is no longer needed."""
    return not db.fetch_number(connection, _COUNT_USES, blob=blob, **times._asdict())


def add_submission(event: Event, connection: Connection) -> None:
    """sub.commit"""
    manifest = read_body(event, Manifest)
    lease = submit_lease(event, connection)
    if lease.state == "expired":
        retake_range(connection, lease)
    name = f"s{event.seq}"
    row: dict[str, Any] = {name: getattr(manifest, name) for name in ("lease", "version", "blob", "size")}
    row |= {name: getattr(lease, name) for name in ("node", "owner", "step", "first", "count")}
    row |= {
        "submission": name,
        "tokens": sum(rollout.tokens for rollout in manifest.rollouts),
        "state": SubmissionState.COMMITTED.value,
        "committed_ms": event.time_ms,
        "upload_ms": event.time_ms + upload_time(lease.upload_s, manifest.size, len(manifest.rollouts)),
    }
    db.insert_rows(connection, SUBMISSION, {**row, "received_ms": 0, "decided_ms": 0, "paid": 0, "dropped": 0})
    _add_rollouts(connection, name, lease, manifest.rollouts)


def receive_submission(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    changes = {"state": "received", "received_ms": event.time_ms}
    if not db.update_rows(connection, SUBMISSION, changes, submission=event.subject, state="committed"):
        raise ValueError("receipt for a submission that does not expect a file")


def drop_submission(event: Event, connection: Connection) -> None:
    """lease.end of a lease whose file will not arrive"""
    body = read_body(event, LeaseEnd)
    if body.state == "unsent":
        changes = {"state": body.because, "decided_ms": event.time_ms}
        db.update_rows(connection, SUBMISSION, changes, lease=event.subject, state="committed")


def decide_submission(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, SubmissionOutcome)
    values = {"submission": event.subject, "state": body.state.value, "paid": body.paid}
    _DECIDE.run(connection, {**values, "time_ms": event.time_ms})
    if body.state is SubmissionState.ACCEPTED:
        _TAKE_OVER.run(connection, {"submission": event.subject, "step": body.step})


def drop_blobs(event: Event, connection: Connection) -> None:
    """blob.drop"""
    for blob in read_body(event, BlobDrop).blobs:
        db.execute(connection, "UPDATE submission SET dropped = 1 WHERE blob = :blob AND decided_ms > 0", blob=blob)


def shift_uploads(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": read_body(event, CoordinatorUp).shift_ms})


def _add_rollouts(connection: Connection, name: str, lease: LeaseRow, rollouts: Sequence[RolloutEntry]) -> None:
    """Store the hashes of long rollouts; record those that earlier submissions contain."""
    start, least = lease.first * (len(rollouts) // lease.count), lease.duplicate_tokens
    rows: list[dict[str, Any]] = [
        {"hash": rollout.hash, "submission": name, "step": lease.step, "position": start + place}
        for place, rollout in enumerate(rollouts)
        if least and rollout.tokens >= least
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
    db.insert_rows(connection, DUPLICATE, *duplicates)
