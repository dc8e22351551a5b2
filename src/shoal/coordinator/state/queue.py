"""The queue of submissions to judge.

    job: queued <-> claimed, -> done;   an appeal makes a done job queued again

A claim that passed its deadline has lapsed: the job goes to another owner, and to the same one only if it finds no
other job. Work of owners of record comes first, then that of new owners, then that of suspects; a job that waits for
as long as a claim lasts is treated as one of the first. Among these, owners take turns: the next job belongs to the
owner that was served longest ago.

Invariant: queries that run every second, or for each claim, each have their own index, so their cost does not depend on
the length of the queue or the number of done jobs. The job contains what those indexes need: its owner's turn, who
judged it last, whether it must wait for the submission that it duplicates.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection

from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.validators import note_result, record_verdict
from shoal.ledger import db
from shoal.ledger.event import Event, EventKind
from shoal.protocol import events
from shoal.protocol.events import read_body
from shoal.protocol.messages import AppealStatement, VerdictStatement

_WINDOW = 64
"""jobs that are searched for a second one of the same version"""
_WAITING = "state = 'queued' AND validator = ''"
_READY = f"{_WAITING} AND blocked = 0"
_CLAIMED = "state = 'queued' AND validator <> ''"
_DOUBTED = f"{_WAITING} AND (round > 1 OR appeal = 1)"
SERVED = db.define_table("served_owner", {"owner": str, "seq": int}, key="owner")
LAPSE = db.define_table(
    "lapse", {"submission": str, "owner": str, "validator": str, "round": int}, key=("submission", "owner")
)


class JobRow(NamedTuple):
    """A submission that is or was in the queue."""

    submission: str
    owner: str
    state: str
    """queued or done"""
    round: int
    """number of the expected verdict, from 1"""
    since_ms: int
    """when that round began"""
    claims: int
    """claims in that round"""
    validator: str
    deadline_ms: int
    appeal: int
    """1 while an appeal is being judged"""
    judge: str
    """owner of the validator that judged it last"""
    turn: int
    """event by which its owner was last served, 0 for never"""
    blocked: int
    """1 while an earlier submission with one of its rollouts is not decided"""
    seq: int
    rank: int
    """how its owner stood when the file arrived, see `OwnerRow.rank`"""
    check_ppm: int
    """share of rollouts that its last claim covers"""


JOB = db.define_table("job", JobRow, key="submission")
db.index_some("job_queued", "state = 'queued'", JOB.c.since_ms)
db.index_some("job_next", _READY, JOB.c.judge, JOB.c.rank, JOB.c.turn, JOB.c.seq)
db.index_some("job_aged", f"{_READY} AND rank > 0", JOB.c.judge, JOB.c.since_ms, JOB.c.seq)
db.index_some("job_owner", "state = 'queued'", JOB.c.owner)
db.index_some("job_claimed", _CLAIMED, JOB.c.deadline_ms, JOB.c.submission)
db.index_some("job_tired", _WAITING, JOB.c.claims, JOB.c.submission)
db.index_some("job_doubted", _DOUBTED, JOB.c.since_ms, JOB.c.submission)
db.index_some("job_validator", _CLAIMED, JOB.c.validator)

_JOBS = f"SELECT {db.list_columns(JOB)} FROM job"
_SELECT_BARRED = db.Sql(
    f"SELECT j.* FROM ({_JOBS} WHERE {_CLAIMED}) AS j JOIN node n ON n.node = j.validator "
    "JOIN owner o ON o.owner = n.owner WHERE o.standing IN ('limited', 'banned') ORDER BY j.submission LIMIT :most"
)
_SELECT_LIKE = db.Sql(
    f"SELECT j.* FROM ({_JOBS} WHERE {_READY} AND judge = '' AND rank = :rank ORDER BY turn, seq LIMIT :window) AS j "
    "JOIN submission s ON s.submission = j.submission AND s.version = :version "
    "WHERE j.claims = 0 AND j.owner <> :owner ORDER BY j.turn, j.seq LIMIT 1"
)
_COUNT_READY = db.Sql(f"SELECT count(*) FROM (SELECT 1 FROM job WHERE {_READY} LIMIT :most) AS jobs")
_FOR_VALIDATOR = (
    f"{_JOBS} WHERE {_READY} AND judge = :judge AND owner <> :owner AND NOT EXISTS ("
    "SELECT 1 FROM verdict v JOIN node n ON n.node = v.validator WHERE v.submission = job.submission "
    "AND (v.validator = :validator OR n.owner = :owner)) AND (claims < :most_claims OR NOT EXISTS ("
    "SELECT 1 FROM lapse l WHERE l.submission = job.submission AND l.owner = :owner)) "
)
_SELECT_NEXT = db.Sql(f"{_FOR_VALIDATOR} ORDER BY rank, turn, seq LIMIT 1")
_SELECT_AGED = db.Sql(f"{_FOR_VALIDATOR} AND rank > 0 AND since_ms <= :aged_ms ORDER BY since_ms, seq LIMIT 1")
_SELECT_JUDGE = db.Sql(f"SELECT judge FROM job WHERE {_READY} AND judge > :after ORDER BY judge LIMIT 1")
_SELECT_LAPSE = db.Sql(
    "SELECT validator FROM lapse WHERE submission = :submission AND owner = :owner AND round = :round"
)
_SELECT_TIRED = db.Sql(
    f"{_JOBS} WHERE {_WAITING} AND claims >= :max_claims AND (since_ms <= :before_ms OR "
    "(SELECT count(*) FROM lapse l WHERE l.submission = job.submission) > 1) ORDER BY claims, submission LIMIT :most"
)
_SELECT_DOUBTED = db.Sql(
    f"{_JOBS} WHERE {_DOUBTED} AND since_ms <= :before_ms ORDER BY since_ms, submission LIMIT :most"
)
_COUNT_SOME = db.Sql("SELECT count(*) FROM (SELECT 1 FROM job WHERE state = 'queued' LIMIT :most) AS jobs")
_COUNT_DOUBTED = db.Sql(
    f"SELECT count(*), min(since_ms) FROM (SELECT since_ms FROM job WHERE {_DOUBTED} AND appeal = :appeal "
    "ORDER BY since_ms LIMIT :most) AS jobs"
)
_CLAIM = db.Sql(
    "UPDATE job SET validator = :validator, deadline_ms = :deadline_ms, check_ppm = :check_ppm, claims = claims + 1 "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_PASS_TURN = db.Sql("UPDATE job SET turn = :seq WHERE state = 'queued' AND owner = :owner")
_SELECT_TURN = db.Sql("SELECT seq FROM served_owner WHERE owner = :owner")
_SET_BLOCKED = (
    "UPDATE job SET blocked = CASE WHEN EXISTS (SELECT 1 FROM duplicate d JOIN submission r ON r.submission = d.rival "
    "WHERE d.submission = job.submission AND r.state IN ('committed', 'received')) THEN 1 ELSE 0 END "
)
_BLOCK = db.Sql(f"{_SET_BLOCKED} WHERE submission = :submission")
_UNBLOCK = db.Sql(
    f"{_SET_BLOCKED} WHERE blocked = 1 AND submission IN (SELECT d.submission FROM duplicate d WHERE d.rival = :rival)"
)
_NEXT_ROUND = db.Sql(
    "UPDATE job SET round = round + 1, since_ms = :time_ms, claims = 0, validator = '', deadline_ms = 0, "
    "judge = (SELECT n.owner FROM node n WHERE n.node = :judge) "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_REOPEN = db.Sql(
    "UPDATE job SET state = 'queued', appeal = 1, since_ms = :time_ms, claims = 0, turn = :turn "
    "WHERE submission = :submission AND state = 'done'"
)
_SHIFT = db.Sql(
    "UPDATE job SET since_ms = since_ms + :shift_ms, deadline_ms = CASE WHEN deadline_ms > 0 "
    "THEN deadline_ms + :shift_ms ELSE 0 END WHERE state = 'queued'"
)
_SELECT_OF_LEASE = db.Sql("SELECT submission FROM submission WHERE lease = :lease")


def find_job(connection: Connection, submission: str) -> JobRow | None:
    return db.find_row(connection, JobRow, submission=submission)


def list_claimed(connection: Connection, validator: str, now_ms: int) -> list[JobRow]:
    """The current claims of a validator; never many."""
    condition = f"WHERE {_CLAIMED} AND validator = :validator AND deadline_ms > :now_ms ORDER BY seq"
    return db.list_rows(connection, JobRow, condition, validator=validator, now_ms=now_ms)


def find_next(connection: Connection, validator: str, owner: str, max_claims: int, aged_ms: int = 0) -> JobRow | None:
    """The next job for a validator: never its own owner's work, never a submission that its owner already judged.

    A job that waits since `aged_ms` is treated like those of owners of record.

    A job that its owner let lapse only if there is nothing else, and only while it was claimed less than `max_claims`
    times: a file that crashes its validator does so a few times and not forever. Lapsed claims have ended before.
    """
    values = {"validator": validator, "owner": owner}
    for most_claims in (0, max_claims):
        # For each judge whose jobs wait for a second opinion, the first of them; there are few judges.
        found = list[JobRow]()
        for judge in ("", *_list_validator_owners(connection, owner)):
            wanted = {**values, "judge": judge, "most_claims": most_claims}
            rows = (
                db.fetch_row(connection, _SELECT_NEXT, JobRow, **wanted),
                db.fetch_row(connection, _SELECT_AGED, JobRow, **wanted, aged_ms=aged_ms),
            )
            found += [row for row in rows if row is not None]
        if found:
            return min(found, key=lambda job: (job.rank if job.since_ms > aged_ms else 0, job.turn, job.seq))
    return None


def find_like(connection: Connection, owner: str, version: int, rank: int) -> JobRow | None:
    """One more job for a validator's owner in addition to others of a version and rank: a first opinion that was never
    claimed.

    Searched among the jobs whose turn is next, so that no owner's work is delayed by it.
    """
    return db.fetch_row(connection, _SELECT_LIKE, JobRow, owner=owner, version=version, rank=rank, window=_WINDOW)


def count_ready(connection: Connection, most: int) -> int:
    """Jobs that can be claimed, counted up to `most`."""
    return db.fetch_number(connection, _COUNT_READY, most=most)


def list_lapsed(connection: Connection, now_ms: int, most: int) -> list[JobRow]:
    """Jobs whose claim passed its deadline."""
    condition = f"WHERE {_CLAIMED} AND deadline_ms <= :now_ms ORDER BY deadline_ms, submission LIMIT :most"
    return db.list_rows(connection, JobRow, condition, now_ms=now_ms, most=most)


def list_barred(connection: Connection, most: int) -> list[JobRow]:
    """Jobs claimed by validators that may no longer judge."""
    return db.fetch_rows(connection, _SELECT_BARRED, JobRow, most=most)


def find_lapse(connection: Connection, submission: str, owner: str, round_number: int) -> str | None:
    """The validator of an owner that let its claim in a round lapse; None if no claim lapsed."""
    values = {"submission": submission, "owner": owner, "round": round_number}
    return db.fetch_row(connection, _SELECT_LAPSE, str, **values)


def list_waiting(connection: Connection, before_ms: int, max_claims: int, most: int) -> list[JobRow]:
    """Jobs that nobody judges: too many lapsed claims by several owners, or waiting since `before_ms`."""
    values = {"before_ms": before_ms, "most": most}
    tired = db.fetch_rows(connection, _SELECT_TIRED, JobRow, **values, max_claims=max_claims)
    doubted = db.fetch_rows(connection, _SELECT_DOUBTED, JobRow, **values)
    return list(dict.fromkeys(tired + doubted))[:most]


def list_unheard(connection: Connection, before_ms: int, most: int) -> list[JobRow]:
    """Jobs that have waited for another opinion since `before_ms` and were never claimed; without appeals."""
    condition = (
        f"WHERE {_DOUBTED} AND appeal = 0 AND claims = 0 AND since_ms <= :before_ms ORDER BY since_ms, submission "
        "LIMIT :most"
    )
    return db.list_rows(connection, JobRow, condition, before_ms=before_ms, most=most)


def count_queued(connection: Connection) -> int:
    return db.fetch_number(connection, "SELECT count(*) FROM job WHERE state = 'queued'")


def count_awaiting_opinion(connection: Connection, *, is_appeal: bool, most: int) -> tuple[int, int]:
    """Jobs that wait for another opinion, or for one on an appeal, counted up to `most`; and since when the first."""
    row = db.fetch_row(connection, _COUNT_DOUBTED, lambda *row: row, appeal=int(is_appeal), most=most)
    count, since_ms = row or (0, None)
    return count, since_ms or 0


def is_crowded(connection: Connection, most: int) -> bool:
    """Whether the queue has at least `most` jobs; does not count further."""
    return db.fetch_number(connection, _COUNT_SOME, most=most) >= most


def oldest_queued(connection: Connection) -> int:
    """Since when the oldest job has been waiting; 0 for none."""
    return db.fetch_number(connection, "SELECT min(since_ms) FROM job WHERE state = 'queued'")


def queue_job(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    owner = read_body(event, events.SubmissionReceipt).owner
    record = find_owner(connection, owner)
    if record is None:
        raise ValueError("file of an unknown owner")
    row: dict[str, str | int] = {"rank": record.rank}
    row |= {"submission": event.subject, "owner": owner, "state": "queued", "round": 1, "since_ms": event.time_ms}
    row |= {"turn": db.fetch_number(connection, _SELECT_TURN, owner=owner), "seq": event.seq}
    empty = {"claims": 0, "validator": "", "deadline_ms": 0, "appeal": 0, "judge": "", "blocked": 0, "check_ppm": 0}
    db.insert_rows(connection, JOB, {**row, **empty})
    _BLOCK.run(connection, {"submission": event.subject})


def claim_job(event: Event, connection: Connection) -> None:
    """val.claim"""
    body = read_body(event, events.ValidationClaim)
    values = {"submission": event.subject, "validator": body.validator, "check_ppm": body.check_ppm}
    values |= {"deadline_ms": body.deadline_ms, "round": body.round}
    db.change_one(connection, _CLAIM, "claim of a job that is not in the queue", **values)
    db.replace_rows(connection, SERVED, {"owner": body.owner, "seq": event.seq})
    _PASS_TURN.run(connection, {"owner": body.owner, "seq": event.seq})


def add_verdict(event: Event, connection: Connection) -> None:
    """val.verdict"""
    body = read_body(event, VerdictStatement)
    job = find_job(connection, body.submission)
    if job is None:
        raise ValueError("verdict on a submission that is not in the queue")
    record_verdict(event, connection, appeal=job.appeal)
    values = {"submission": body.submission, "round": body.round, "time_ms": event.time_ms, "judge": event.actor}
    db.change_one(connection, _NEXT_ROUND, "verdict of a round that is not open", **values)


def lapse_claim(event: Event, connection: Connection) -> None:
    """val.lapse"""
    body = read_body(event, events.ClaimLapse)
    values = {"submission": event.subject, "validator": body.validator, "round": body.round}
    if not db.update_rows(connection, JOB, {"validator": "", "deadline_ms": 0}, **values, state="queued"):
        raise ValueError("lapse of a claim that nobody had")
    db.replace_rows(connection, LAPSE, {**values, "owner": body.owner})


def finish_job(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    ended = {"state": "done", "validator": "", "deadline_ms": 0, "appeal": 0}
    db.update_rows(connection, JOB, ended, submission=event.subject)
    if read_body(event, events.SubmissionOutcome).round:
        note_result(event, connection)


def reopen_job(event: Event, connection: Connection) -> None:
    """appeal"""
    submission = read_body(event, AppealStatement).submission
    turn = db.fetch_number(connection, _SELECT_TURN, owner=event.actor)
    values = {"submission": submission, "time_ms": event.time_ms, "turn": turn}
    db.change_one(connection, _REOPEN, "appeal of a submission that is not decided", **values)
    _BLOCK.run(connection, {"submission": submission})


def unblock_jobs(event: Event, connection: Connection) -> None:
    """sub.outcome, and lease.end of a lease whose file does not arrive: jobs that waited for it can be claimed"""
    if event.kind == EventKind.SUB_OUTCOME:
        _UNBLOCK.run(connection, {"rival": event.subject})
    elif read_body(event, events.LeaseEnd).state == "unsent":
        rival = db.fetch_row(connection, _SELECT_OF_LEASE, str, lease=event.subject)
        _UNBLOCK.run(connection, {"rival": rival})


def shift_claims(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": read_body(event, events.CoordinatorUp).shift_ms})


def _list_validator_owners(connection: Connection, owner: str) -> Iterator[str]:
    """Validator owners, except this one, that judged last a job that waits for another opinion."""
    after = ""
    while (judge := db.fetch_row(connection, _SELECT_JUDGE, str, after=after)) is not None:
        after = judge
        if judge != owner:
            yield judge
