"""The queue of submissions to judge, and the verdicts.

    job: queued <-> claimed, -> done;   an appeal makes a done job queued again

A claim that passed its deadline has lapsed: the job goes to somebody else, and to the same owner only when it finds no
other. Owners take turns: the next job is one of the owner that was served longest ago.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.rules.outcome import CRASH_CHECK
from shoal.swarm.state.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

JOB = define_table(
    "job",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("round", INT64, nullable=False),
    Column("since_ms", INT64, nullable=False),
    Column("claims", INT64, nullable=False),
    Column("validator", Text, nullable=False),
    Column("deadline_ms", INT64, nullable=False),
    Column("appeal", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
)
Index("job_state", JOB.c.state, JOB.c.since_ms)
Index("job_validator", JOB.c.validator, JOB.c.state)
SERVED = define_table("served_owner", Column("owner", Text, primary_key=True), Column("seq", INT64, nullable=False))
VERDICT = define_table(
    "verdict",
    Column("submission", Text, primary_key=True),
    Column("round", INT64, primary_key=True, autoincrement=False),
    Column("validator", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("tokens", INT64, nullable=False),
    Column("crashed", INT64, nullable=False),
    Column("appeal", INT64, nullable=False),
    Column("time_ms", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("paid", INT64, nullable=False),
)
LAPSE = define_table(
    "lapse",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("validator", Text, nullable=False),
    Column("round", INT64, nullable=False),
)


class JobRow(NamedTuple):
    """A submission in the queue, or one that was."""

    submission: str
    owner: str
    state: str
    """queued or done"""
    round: int
    """of the verdict that is awaited, from 1"""
    since_ms: int
    """when that round began"""
    claims: int
    """in that round"""
    validator: str
    deadline_ms: int
    appeal: int
    """1 while an appeal is judged"""
    seq: int


class VerdictRow(NamedTuple):
    """A validator's word."""

    submission: str
    round: int
    validator: str
    verdict: str
    tokens: int
    crashed: int
    appeal: int
    time_ms: int
    seq: int
    state: str
    """of the submission right after it"""
    paid: int
    """to the submission's owner by the outcome that it brought"""


_JOBS, _VERDICTS = f"SELECT {list_columns(JOB)} FROM job", f"SELECT {list_columns(VERDICT)} FROM verdict"
_SELECT_JOB = Sql(f"{_JOBS} WHERE submission = :submission")
_SELECT_CLAIMED = Sql(
    f"{_JOBS} WHERE validator = :validator AND state = 'queued' AND deadline_ms > :now_ms ORDER BY seq LIMIT 1"
)
_SELECT_NEXT = Sql(
    f"SELECT {list_columns(JOB, 'j.')} FROM job j LEFT JOIN served_owner s ON s.owner = j.owner "
    "WHERE j.state = 'queued' AND j.deadline_ms <= :now_ms AND j.owner <> :owner AND NOT EXISTS ("
    "SELECT 1 FROM verdict v JOIN node n ON n.node = v.validator WHERE v.submission = j.submission "
    "AND (v.validator = :validator OR n.owner = :owner)) AND NOT EXISTS ("
    "SELECT 1 FROM duplicate d JOIN submission r ON r.submission = d.rival "
    "WHERE d.submission = j.submission AND r.state IN ('committed', 'received')) "
    "ORDER BY (SELECT count(*) FROM lapse l WHERE l.submission = j.submission AND l.owner = :owner), "
    "coalesce(s.seq, 0), j.seq LIMIT 1"
)
_SELECT_LAPSED = Sql(
    f"{_JOBS} WHERE state = 'queued' AND validator <> '' AND deadline_ms <= :now_ms ORDER BY deadline_ms, submission "
    "LIMIT :most"
)
_SELECT_LAPSE = Sql("SELECT validator FROM lapse WHERE submission = :submission AND owner = :owner AND round = :round")
_SELECT_WAITING = Sql(
    f"{_JOBS} WHERE state = 'queued' AND deadline_ms <= :now_ms AND ((claims >= :max_claims AND "
    "(SELECT count(*) FROM lapse l WHERE l.submission = job.submission) > 1) OR "
    "((round > 1 OR appeal = 1 OR claims >= :max_claims) AND since_ms <= :before_ms)) "
    "ORDER BY since_ms, submission LIMIT :most"
)
_SELECT_VERDICTS = Sql(f"{_VERDICTS} WHERE submission = :submission ORDER BY round")
_COUNT_QUEUED = Sql("SELECT count(*) FROM job WHERE state = 'queued'")
_COUNT_SOME = Sql("SELECT count(*) FROM (SELECT 1 FROM job WHERE state = 'queued' LIMIT :most) AS jobs")
_OLDEST_QUEUED = Sql("SELECT min(since_ms) FROM job WHERE state = 'queued'")
_INSERT_JOB, _INSERT_VERDICT = insert_into(JOB), insert_into(VERDICT)
_CLAIM = Sql(
    "UPDATE job SET validator = :validator, deadline_ms = :deadline_ms, claims = claims + 1 "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_SERVE = Sql(
    "INSERT INTO served_owner (owner, seq) VALUES (:owner, :seq) ON CONFLICT (owner) DO UPDATE SET seq = excluded.seq"
)
_NEXT_ROUND = Sql(
    "UPDATE job SET round = round + 1, since_ms = :time_ms, claims = 0, validator = '', deadline_ms = 0 "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_DONE = Sql("UPDATE job SET state = 'done', validator = '', deadline_ms = 0, appeal = 0 WHERE submission = :submission")
_REOPEN = Sql(
    "UPDATE job SET state = 'queued', appeal = 1, since_ms = :time_ms, claims = 0 "
    "WHERE submission = :submission AND state = 'done'"
)
_SHIFT = Sql(
    "UPDATE job SET since_ms = since_ms + :shift_ms, deadline_ms = CASE WHEN deadline_ms > 0 "
    "THEN deadline_ms + :shift_ms ELSE 0 END WHERE state = 'queued'"
)
_UNCLAIM = Sql(
    "UPDATE job SET validator = '', deadline_ms = 0 WHERE submission = :submission AND validator = :validator "
    "AND state = 'queued' AND round = :round"
)
_INSERT_LAPSE = Sql(
    "INSERT INTO lapse (submission, owner, validator, round) VALUES (:submission, :owner, :validator, :round) "
    "ON CONFLICT (submission, owner) DO UPDATE SET validator = excluded.validator, round = excluded.round"
)
_SET_RESULT = Sql("UPDATE verdict SET state = :state, paid = :paid WHERE submission = :submission AND round = :round")
_SELECT_SUBMISSION = Sql("SELECT state FROM submission WHERE submission = :submission")


def find_job(connection: Connection, submission: str) -> JobRow | None:
    return fetch_row(connection, _SELECT_JOB, JobRow, submission=submission)


def find_claimed(connection: Connection, validator: str, now_ms: int) -> JobRow | None:
    """What a validator has claimed and not judged."""
    return fetch_row(connection, _SELECT_CLAIMED, JobRow, validator=validator, now_ms=now_ms)


def find_next(connection: Connection, validator: str, owner: str, now_ms: int) -> JobRow | None:
    """The next job for a validator: never its own owner's work, never what its owner judged before."""
    return fetch_row(connection, _SELECT_NEXT, JobRow, validator=validator, owner=owner, now_ms=now_ms)


def list_lapsed(connection: Connection, now_ms: int, most: int) -> list[JobRow]:
    """Jobs whose claim passed its deadline."""
    return fetch_rows(connection, _SELECT_LAPSED, JobRow, now_ms=now_ms, most=most)


def find_lapse(connection: Connection, submission: str, owner: str, round_number: int) -> str | None:
    """The validator of an owner that let its claim in a round lapse; None if there is none."""
    values = {"submission": submission, "owner": owner, "round": round_number}
    return fetch_row(connection, _SELECT_LAPSE, str, **values)


def list_waiting(connection: Connection, now_ms: int, before_ms: int, max_claims: int, most: int) -> list[JobRow]:
    """Jobs that nobody judges: claimed in vain too often, by more than one owner, or waiting since `before_ms`."""
    values = {"now_ms": now_ms, "before_ms": before_ms, "max_claims": max_claims, "most": most}
    return fetch_rows(connection, _SELECT_WAITING, JobRow, **values)


def list_verdicts(connection: Connection, submission: str) -> list[VerdictRow]:
    return fetch_rows(connection, _SELECT_VERDICTS, VerdictRow, submission=submission)


def count_queued(connection: Connection) -> int:
    return fetch_number(connection, _COUNT_QUEUED)


def is_crowded(connection: Connection, most: int) -> bool:
    """Whether `most` jobs or more are in the queue, however many more there are."""
    return fetch_number(connection, _COUNT_SOME, most=most) >= most


def oldest_queued(connection: Connection) -> int:
    """Since when the oldest job waits; 0 for none."""
    return fetch_number(connection, _OLDEST_QUEUED)


def queue_job(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    _insert_job(connection, event, event.subject, event.content["owner"])


def queue_canary(event: Event, connection: Connection) -> None:
    """canary"""
    _insert_job(connection, event, f"s{event.seq}", event.actor)


def claim_job(event: Event, connection: Connection) -> None:
    """val.claim"""
    content = event.content
    values = {"submission": event.subject, "validator": content["validator"]}
    values |= {"deadline_ms": content["deadline_ms"], "round": content["round"]}
    if _CLAIM.run(connection, values).rowcount != 1:
        raise ValueError("a claim of a job that is not in the queue")
    _SERVE.run(connection, {"owner": content["owner"], "seq": event.seq})


def add_verdict(event: Event, connection: Connection) -> None:
    """val.verdict"""
    content = event.content
    job = find_job(connection, content["submission"])
    if job is None:
        raise ValueError("a verdict of what is not in the queue")
    row = {name: content[name] for name in ("submission", "round", "verdict", "tokens")}
    row |= {"validator": event.actor, "time_ms": event.time_ms, "seq": event.seq, "appeal": job.appeal}
    crashed = any(finding["check"] == CRASH_CHECK for finding in content["findings"])
    row |= {"crashed": int(crashed and content["verdict"] == "inconclusive"), "paid": 0}
    state = fetch_row(connection, _SELECT_SUBMISSION, str, submission=content["submission"])
    _INSERT_VERDICT.run(connection, {**row, "state": state})
    values = {"submission": content["submission"], "round": content["round"], "time_ms": event.time_ms}
    if _NEXT_ROUND.run(connection, values).rowcount != 1:
        raise ValueError("a verdict of a round that is not open")


def lapse_claim(event: Event, connection: Connection) -> None:
    """val.lapse"""
    content = event.content
    values = {"submission": event.subject, "validator": content["validator"], "round": content["round"]}
    if _UNCLAIM.run(connection, values).rowcount != 1:
        raise ValueError("the lapse of a claim that nobody had")
    _INSERT_LAPSE.run(connection, {**values, "owner": content["owner"]})


def finish_job(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    _DONE.run(connection, {"submission": event.subject})
    if event.content["round"]:
        values = {name: event.content[name] for name in ("state", "paid", "round")}
        _SET_RESULT.run(connection, {**values, "submission": event.subject})


def reopen_job(event: Event, connection: Connection) -> None:
    """appeal"""
    values = {"submission": event.content["submission"], "time_ms": event.time_ms}
    if _REOPEN.run(connection, values).rowcount != 1:
        raise ValueError("an appeal of what is not decided")


def shift_claims(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": event.content["shift_ms"]})


def _insert_job(connection: Connection, event: Event, submission: str, owner: str) -> None:
    row = {"submission": submission, "owner": owner, "state": "queued", "round": 1, "since_ms": event.time_ms}
    empty = {"claims": 0, "validator": "", "deadline_ms": 0, "appeal": 0}
    _INSERT_JOB.run(connection, {**row, **empty, "seq": event.seq})
