"""The queue of submissions to judge.

    job: queued <-> claimed, -> done;   an appeal makes a done job queued again

A claim that passed its deadline has lapsed: the job goes to somebody else, and to the same owner only when it finds no
other. Owners take turns: the next job is one of the owner that was served longest ago.

Invariant: what is asked each second, or by each claim, is found by an index of its own, so that it costs the same
however long the queue is and however many jobs are done. What those indexes need stands in the job: whose turn it is,
who judged it last, whether it has to wait for what it is a duplicate of.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Index, Text, text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event, Kind
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.verdicts import note_result, record_verdict

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
    Column("judge", Text, nullable=False),
    Column("turn", INT64, nullable=False),
    Column("blocked", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
    Column("check_ppm", INT64, nullable=False),
)


def _index_some(name: str, condition: str, *columns: Column[Any]) -> None:
    """An index of the jobs for which something holds; statements repeat the condition to the letter."""
    Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


_WINDOW = 64
"""jobs among which a second one of the same version is looked for"""
_WAITING = "state = 'queued' AND validator = ''"
_READY = f"{_WAITING} AND blocked = 0"
_CLAIMED = "state = 'queued' AND validator <> ''"
_DOUBTED = f"{_WAITING} AND (round > 1 OR appeal = 1)"
_index_some("job_queued", "state = 'queued'", JOB.c.since_ms)
_index_some("job_next", _READY, JOB.c.judge, JOB.c.turn, JOB.c.seq)
_index_some("job_owner", "state = 'queued'", JOB.c.owner)
_index_some("job_claimed", _CLAIMED, JOB.c.deadline_ms, JOB.c.submission)
_index_some("job_tired", _WAITING, JOB.c.claims, JOB.c.submission)
_index_some("job_doubted", _DOUBTED, JOB.c.since_ms, JOB.c.submission)
_index_some("job_validator", _CLAIMED, JOB.c.validator)
SERVED = define_table("served_owner", Column("owner", Text, primary_key=True), Column("seq", INT64, nullable=False))
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
    judge: str
    """owner of the validator that judged it last"""
    turn: int
    """event by which its owner was last served, 0 for never"""
    blocked: int
    """1 while a submission that had one of its rollouts before is not decided"""
    seq: int
    check_ppm: int
    """share of rollouts that its last claim is about"""


_JOBS = f"SELECT {list_columns(JOB)} FROM job"
_SELECT_JOB = Sql(f"{_JOBS} WHERE submission = :submission")
_SELECT_CLAIMED = Sql(f"{_JOBS} WHERE {_CLAIMED} AND validator = :validator AND deadline_ms > :now_ms ORDER BY seq")
_SELECT_BARRED = Sql(
    f"SELECT j.* FROM ({_JOBS} WHERE {_CLAIMED}) AS j JOIN node n ON n.node = j.validator "
    "JOIN owner o ON o.owner = n.owner WHERE o.standing IN ('limited', 'banned') ORDER BY j.submission LIMIT :most"
)
_SELECT_LIKE = Sql(
    f"SELECT j.* FROM ({_JOBS} WHERE {_READY} AND judge = '' ORDER BY turn, seq LIMIT :window) AS j "
    "JOIN submission s ON s.submission = j.submission AND s.version = :version "
    "WHERE j.claims = 0 AND j.owner <> :owner ORDER BY j.turn, j.seq LIMIT 1"
)
_COUNT_READY = Sql(f"SELECT count(*) FROM (SELECT 1 FROM job WHERE {_READY} LIMIT :most) AS jobs")
_SELECT_NEXT = Sql(
    f"{_JOBS} WHERE {_READY} AND judge = :judge AND owner <> :owner AND NOT EXISTS ("
    "SELECT 1 FROM verdict v JOIN node n ON n.node = v.validator WHERE v.submission = job.submission "
    "AND (v.validator = :validator OR n.owner = :owner)) AND (claims < :most_claims OR NOT EXISTS ("
    "SELECT 1 FROM lapse l WHERE l.submission = job.submission AND l.owner = :owner)) "
    "ORDER BY turn, seq LIMIT 1"
)
_SELECT_JUDGE = Sql(f"SELECT judge FROM job WHERE {_READY} AND judge > :after ORDER BY judge LIMIT 1")
_SELECT_LAPSED = Sql(
    f"{_JOBS} WHERE {_CLAIMED} AND deadline_ms <= :now_ms ORDER BY deadline_ms, submission LIMIT :most"
)
_SELECT_LAPSE = Sql("SELECT validator FROM lapse WHERE submission = :submission AND owner = :owner AND round = :round")
_SELECT_TIRED = Sql(
    f"{_JOBS} WHERE {_WAITING} AND claims >= :max_claims AND (since_ms <= :before_ms OR "
    "(SELECT count(*) FROM lapse l WHERE l.submission = job.submission) > 1) ORDER BY claims, submission LIMIT :most"
)
_SELECT_DOUBTED = Sql(f"{_JOBS} WHERE {_DOUBTED} AND since_ms <= :before_ms ORDER BY since_ms, submission LIMIT :most")
_SELECT_UNHEARD = Sql(
    f"{_JOBS} WHERE {_DOUBTED} AND appeal = 0 AND claims = 0 AND since_ms <= :before_ms "
    "ORDER BY since_ms, submission LIMIT :most"
)
_COUNT_QUEUED = Sql("SELECT count(*) FROM job WHERE state = 'queued'")
_COUNT_SOME = Sql("SELECT count(*) FROM (SELECT 1 FROM job WHERE state = 'queued' LIMIT :most) AS jobs")
_COUNT_DOUBTED = Sql(
    f"SELECT count(*), min(since_ms) FROM (SELECT since_ms FROM job WHERE {_DOUBTED} AND appeal = :appeal "
    "ORDER BY since_ms LIMIT :most) AS jobs"
)
_OLDEST_QUEUED = Sql("SELECT min(since_ms) FROM job WHERE state = 'queued'")
_INSERT_JOB = insert_into(JOB)
_CLAIM = Sql(
    "UPDATE job SET validator = :validator, deadline_ms = :deadline_ms, check_ppm = :check_ppm, claims = claims + 1 "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_SERVE = Sql(
    "INSERT INTO served_owner (owner, seq) VALUES (:owner, :seq) ON CONFLICT (owner) DO UPDATE SET seq = excluded.seq"
)
_PASS_TURN = Sql("UPDATE job SET turn = :seq WHERE state = 'queued' AND owner = :owner")
_SELECT_TURN = Sql("SELECT seq FROM served_owner WHERE owner = :owner")
_SET_BLOCKED = (
    "UPDATE job SET blocked = CASE WHEN EXISTS (SELECT 1 FROM duplicate d JOIN submission r ON r.submission = d.rival "
    "WHERE d.submission = job.submission AND r.state IN ('committed', 'received')) THEN 1 ELSE 0 END "
)
_BLOCK = Sql(f"{_SET_BLOCKED} WHERE submission = :submission")
_UNBLOCK = Sql(
    f"{_SET_BLOCKED} WHERE blocked = 1 AND submission IN (SELECT d.submission FROM duplicate d WHERE d.rival = :rival)"
)
_NEXT_ROUND = Sql(
    "UPDATE job SET round = round + 1, since_ms = :time_ms, claims = 0, validator = '', deadline_ms = 0, "
    "judge = (SELECT n.owner FROM node n WHERE n.node = :judge) "
    "WHERE submission = :submission AND state = 'queued' AND round = :round"
)
_DONE = Sql("UPDATE job SET state = 'done', validator = '', deadline_ms = 0, appeal = 0 WHERE submission = :submission")
_REOPEN = Sql(
    "UPDATE job SET state = 'queued', appeal = 1, since_ms = :time_ms, claims = 0, turn = :turn "
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
_SELECT_OF_LEASE = Sql("SELECT submission FROM submission WHERE lease = :lease")


def find_job(connection: Connection, submission: str) -> JobRow | None:
    return fetch_row(connection, _SELECT_JOB, JobRow, submission=submission)


def list_claimed(connection: Connection, validator: str, now_ms: int) -> list[JobRow]:
    """What a validator has claimed and not judged; never many."""
    return fetch_rows(connection, _SELECT_CLAIMED, JobRow, validator=validator, now_ms=now_ms)


def find_next(connection: Connection, validator: str, owner: str, max_claims: int) -> JobRow | None:
    """The next job for a validator: never its own owner's work, never what its owner judged before.

    What its owner let lapse only if there is nothing else, and only while it was claimed less than `max_claims` times:
    a file that kills who looks at it does so a few times and not for ever. Claims that lapsed have ended before.
    """
    values = {"validator": validator, "owner": owner}
    for most_claims in (0, max_claims):
        # Of each judge that waits for a second opinion its first job, and there are few judges.
        rows = [
            fetch_row(connection, _SELECT_NEXT, JobRow, **values, judge=judge, most_claims=most_claims)
            for judge in ("", *_list_judges(connection, owner))
        ]
        if found := [row for row in rows if row is not None]:
            return min(found, key=lambda job: (job.turn, job.seq))
    return None


def find_like(connection: Connection, owner: str, version: int) -> JobRow | None:
    """One more job for a validator's owner beside others of a version: a first opinion that nobody has tried yet.

    Looked for among the jobs whose turn is next, so that no owner's work waits longer for it than it would anyway.
    """
    return fetch_row(connection, _SELECT_LIKE, JobRow, owner=owner, version=version, window=_WINDOW)


def count_ready(connection: Connection, most: int) -> int:
    """Jobs that can be claimed, counted up to `most`."""
    return fetch_number(connection, _COUNT_READY, most=most)


def list_lapsed(connection: Connection, now_ms: int, most: int) -> list[JobRow]:
    """Jobs whose claim passed its deadline."""
    return fetch_rows(connection, _SELECT_LAPSED, JobRow, now_ms=now_ms, most=most)


def list_barred(connection: Connection, most: int) -> list[JobRow]:
    """Jobs that are claimed by who may not judge any more; of all that is claimed, which never is much."""
    return fetch_rows(connection, _SELECT_BARRED, JobRow, most=most)


def find_lapse(connection: Connection, submission: str, owner: str, round_number: int) -> str | None:
    """The validator of an owner that let its claim in a round lapse; None if there is none."""
    values = {"submission": submission, "owner": owner, "round": round_number}
    return fetch_row(connection, _SELECT_LAPSE, str, **values)


def list_waiting(connection: Connection, before_ms: int, max_claims: int, most: int) -> list[JobRow]:
    """Jobs that nobody judges: claimed in vain too often, by more than one owner, or waiting since `before_ms`."""
    values = {"before_ms": before_ms, "most": most}
    tired = fetch_rows(connection, _SELECT_TIRED, JobRow, **values, max_claims=max_claims)
    doubted = fetch_rows(connection, _SELECT_DOUBTED, JobRow, **values)
    return list(dict.fromkeys(tired + doubted))[:most]


def list_unheard(connection: Connection, before_ms: int, most: int) -> list[JobRow]:
    """Jobs on which another opinion could be given since `before_ms`, and nobody tried; appeals aside."""
    return fetch_rows(connection, _SELECT_UNHEARD, JobRow, before_ms=before_ms, most=most)


def count_queued(connection: Connection) -> int:
    return fetch_number(connection, _COUNT_QUEUED)


def count_doubted(connection: Connection, *, is_appeal: bool, most: int) -> tuple[int, int]:
    """Jobs that wait for another opinion, or for one on an appeal, counted up to `most`; and since when the first."""
    row = fetch_row(connection, _COUNT_DOUBTED, lambda *row: row, appeal=int(is_appeal), most=most)
    count, since_ms = row or (0, None)
    return count, since_ms or 0


def is_crowded(connection: Connection, most: int) -> bool:
    """Whether `most` jobs or more are in the queue, however many more there are."""
    return fetch_number(connection, _COUNT_SOME, most=most) >= most


def oldest_queued(connection: Connection) -> int:
    """Since when the oldest job waits; 0 for none."""
    return fetch_number(connection, _OLDEST_QUEUED)


def queue_job(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    owner = event.content["owner"]
    row = {"submission": event.subject, "owner": owner, "state": "queued", "round": 1, "since_ms": event.time_ms}
    row |= {"turn": fetch_number(connection, _SELECT_TURN, owner=owner), "seq": event.seq}
    empty = {"claims": 0, "validator": "", "deadline_ms": 0, "appeal": 0, "judge": "", "blocked": 0, "check_ppm": 0}
    _INSERT_JOB.run(connection, {**row, **empty})
    _BLOCK.run(connection, {"submission": event.subject})


def claim_job(event: Event, connection: Connection) -> None:
    """val.claim"""
    content = event.content
    values = {"submission": event.subject, "validator": content["validator"]}
    values |= {name: content[name] for name in ("check_ppm", "deadline_ms", "round")}
    if _CLAIM.run(connection, values).rowcount != 1:
        raise ValueError("a claim of a job that is not in the queue")
    for serve in (_SERVE, _PASS_TURN):
        serve.run(connection, {"owner": content["owner"], "seq": event.seq})


def add_verdict(event: Event, connection: Connection) -> None:
    """val.verdict"""
    content = event.content
    job = find_job(connection, content["submission"])
    if job is None:
        raise ValueError("a verdict of what is not in the queue")
    record_verdict(event, connection, appeal=job.appeal)
    values = {"submission": content["submission"], "round": content["round"], "time_ms": event.time_ms}
    values["judge"] = event.actor
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
        note_result(event, connection)


def reopen_job(event: Event, connection: Connection) -> None:
    """appeal"""
    turn = fetch_number(connection, _SELECT_TURN, owner=event.actor)
    values = {"submission": event.content["submission"], "time_ms": event.time_ms, "turn": turn}
    if _REOPEN.run(connection, values).rowcount != 1:
        raise ValueError("an appeal of what is not decided")
    _BLOCK.run(connection, {"submission": event.content["submission"]})


def unblock_jobs(event: Event, connection: Connection) -> None:
    """sub.outcome, and lease.end of a lease whose file does not come: what waited for that need wait no more"""
    if event.kind == Kind.SUB_OUTCOME:
        _UNBLOCK.run(connection, {"rival": event.subject})
    elif event.content["state"] == "unsent":
        rival = fetch_row(connection, _SELECT_OF_LEASE, str, lease=event.subject)
        _UNBLOCK.run(connection, {"rival": rival})


def shift_claims(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": event.content["shift_ms"]})


def _list_judges(connection: Connection, owner: str) -> Iterator[str]:
    """Owners of validators who judged a job last that waits for another opinion; but not this one."""
    after = ""
    while (judge := fetch_row(connection, _SELECT_JUDGE, str, after=after)) is not None:
        after = judge
        if judge != owner:
            yield judge
