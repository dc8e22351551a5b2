"""A submission's story in plain words: every check, number, threshold and posting. For the accused, and for all."""

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, text

from shoal.errors import ConfigError
from shoal.swarm.clock import show_time
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import SubmissionState
from shoal.swarm.postings import MICRO
from shoal.swarm.rows import read_event
from shoal.swarm.state.credit import find_appeal
from shoal.swarm.state.history import find_history
from shoal.swarm.state.queue import find_job
from shoal.swarm.state.run import count_away, read_run
from shoal.swarm.state.submissions import SubmissionRow, find_submission, list_duplicates
from shoal.swarm.state.verdicts import list_verdicts
from shoal.swarm.watching import describe_watch

_PURSES = {
    "mint": "where credit is made",
    "burn": "where credit is destroyed",
    "treasury": "where fees wait",
    "pending": "pay that is held until the challenge window is over",
    "avail": "credit that is free",
    "stake": "the owner's bond",
    "unbond": "a bond on its way back",
    "redeeming": "credit on its way out",
    "redeemed": "credit that went out",
}
_REJECTIONS = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)

_TOLD = (Kind.SUB_OUTCOME, Kind.SLASH, Kind.APPEAL, Kind.CANARY_GRADE, Kind.VAL_DOUBT, Kind.VAL_GRADE)
_DOUBTS = {
    "drawn": "a second opinion was drawn",
    "rejected": "a rejection is confirmed by another owner's validator",
    "watched": "its owner is watched",
}

_EVENTS = text("SELECT seq FROM event WHERE subject = :subject ORDER BY seq")


def explain_submission(connection: Connection, submission: str) -> str:
    """All that is known of a submission; ConfigError if there is none."""
    row = _require_submission(connection, submission)
    lines = [*_tell_start(row), *_tell_duplicates(connection, row), *_tell_verdicts(connection, row)]
    lines += [*_tell_outcomes(connection, row), *_tell_watch(connection, row), *_tell_rest(connection, row)]
    return "\n".join(lines)


def read_state(connection: Connection, submission: str) -> SubmissionState:
    """Where a submission is; ConfigError if there is none."""
    return SubmissionState(_require_submission(connection, submission).state)


def _require_submission(connection: Connection, submission: str) -> SubmissionRow:
    row = find_submission(connection, submission)
    if row is None:
        raise ConfigError(f"{submission[:40]}: no such submission in this ledger")
    return row


def _tell_start(row: SubmissionRow) -> Iterator[str]:
    groups = f"group {row.first}" if row.count == 1 else f"groups {row.first} to {row.first + row.count - 1}"
    yield f"{row.submission} is {row.state}."
    yield f"Node {row.node} of owner {row.owner} committed it under {row.lease}."
    yield f"It is about {groups} of step {row.step}, computed with v{row.version}."
    yield f"File {row.blob}, {row.size} bytes, {row.tokens} tokens by its manifest."
    if row.received_ms:
        yield f"Its file arrived {max(0, row.received_ms - row.committed_ms)} ms after the manifest."


def _tell_duplicates(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    for duplicate in list_duplicates(connection, row.submission):
        yield f"Rollout {duplicate.place} has the tokens of one in {duplicate.rival}, which is {duplicate.rival_state}."


def _tell_verdicts(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    for vote in list_verdicts(connection, row.submission):
        on = " on appeal" if vote.appeal else ""
        yield f"Round {vote.round}{on}: validator {vote.validator} says {vote.verdict} ({vote.tokens} tokens)."
        event = read_event(connection, vote.seq)
        for finding in [] if event is None else event.content["findings"]:
            word = "passed" if finding["passed"] else "FAILED"
            where = f" at {finding['where']}" if finding["where"] else ""
            yield f"  {finding['check']}: {finding['statistic']}, threshold {finding['threshold']}{where}: {word}"


def _tell_watch(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    history = find_history(connection, row.owner)
    if history is not None and history.watch_seq:
        yield f"Its owner is watched since event {history.watch_seq}: {describe_watch(history)}."


def _tell_outcomes(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    for (seq,) in connection.execute(_EVENTS, {"subject": row.submission}):
        event = read_event(connection, int(seq))
        if event is not None and event.kind in _TOLD:
            yield _tell_event(event)
            for account, amount in event.postings:
                meaning = _PURSES[account.partition(":")[0]]
                yield f"  {account}: {amount:+d} micro-credits ({amount / MICRO:+.6f}), {meaning}"


def _tell_event(event: Event) -> str:
    content = json.loads(event.body)
    match event.kind:
        case Kind.SUB_OUTCOME:
            return f"Event {event.seq}: {content['state']}, {content['because']}; paid {content['paid']} micro-credits."
        case Kind.SLASH:
            return f"Event {event.seq}: {content['amount']} micro-credits of owner {content['owner']} were burned."
        case Kind.CANARY_GRADE:
            known = "good" if content["good"] else "bad"
            return f"Event {event.seq}: a canary, known to be {known}; {_tell_grade(content)}."
        case Kind.VAL_DOUBT:
            return f"Event {event.seq}: one verdict is not enough ({_DOUBTS[content['because']]})."
        case Kind.VAL_GRADE:
            return f"Event {event.seq}: the work was {content['side']}; {_tell_right(content)}."
    return f"Event {event.seq}: the owner appealed."


def _tell_grade(content: dict[str, Any]) -> str:
    said, names = "rejected" if content["good"] else "accepted", ", ".join(content["missed_by"])
    if content["state"] not in ("missed", "wronged"):
        return {"caught": "it was rejected", "passed": "it was accepted"}.get(content["state"], "nobody judged it")
    trained = f", and step {content['trained']} was trained on it" if content["trained"] and not content["good"] else ""
    return f"{said} by validator {names}{trained}"


def _tell_right(content: dict[str, Any]) -> str:
    wrong = [grade["validator"] for grade in content["grades"] if not grade["right"]]
    return f"validator {', '.join(wrong)} was wrong about it" if wrong else "all who judged it were right"


def _tell_rest(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    job, appeal = find_job(connection, row.submission), find_appeal(connection, row.submission)
    if job is not None and job.state == "queued":
        yield f"It waits for verdict {job.round}, claimed {job.claims} times so far."
    if row.state == SubmissionState.HARD:
        yield "Two validators found it faked, so its owner was banned."
    if appeal is not None:
        yield f"The appeal is {appeal.state}."
    elif row.state in _REJECTIONS:
        away_ms = count_away(connection, row.decided_ms)
        end = show_time(row.decided_ms + away_ms + 1000 * read_run(connection).params.appeal_s)
        yield f"Its owner may appeal until {end}: shoal appeal URL {row.submission} --owner KEY"
