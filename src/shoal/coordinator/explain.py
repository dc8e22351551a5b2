"""A submission explained as text: every check, number, threshold and posting. For its owner, and for everyone."""

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, text

from shoal.coordinator.decide.context import RunSnapshot
from shoal.coordinator.decide.drift_watch import describe_watch
from shoal.coordinator.decide.settlement import name_shut_out
from shoal.coordinator.decide.validators import refuse_early, refuse_vain
from shoal.coordinator.rules.storage import appeal_time
from shoal.coordinator.state.credit import find_appeal
from shoal.coordinator.state.drift import find_history
from shoal.coordinator.state.members import find_ban
from shoal.coordinator.state.queue import find_job
from shoal.coordinator.state.run import count_away, read_run
from shoal.coordinator.state.submissions import SubmissionRow, find_submission, list_duplicates
from shoal.coordinator.state.validators import VerdictRow, is_convicted_by_odds, list_verdicts
from shoal.errors import ConfigError
from shoal.ledger.event import MICRO, Event, EventKind
from shoal.ledger.reader import read_event
from shoal.net.api_error import ApiError
from shoal.protocol import events
from shoal.protocol.events import parse_event, read_body
from shoal.protocol.messages import REJECTED, Finding, SubmissionState, VerdictStatement, describe_appeal
from shoal.util.clock import show_time
from shoal.util.units import count_things

_ACCOUNTS = {
    "mint": "where credit is created",
    "burn": "where credit is destroyed",
    "treasury": "where fees are kept",
    "pending": "pay held until the challenge window is over",
    "avail": "available credit",
    "stake": "the owner's bond",
    "unbond": "a bond being returned",
    "redeeming": "credit being paid out",
    "redeemed": "credit that was paid out",
}

_SHOWN_KINDS = (
    EventKind.SUB_OUTCOME,
    EventKind.SLASH,
    EventKind.APPEAL,
    EventKind.CANARY_GRADE,
    EventKind.VAL_DOUBT,
    EventKind.VAL_GRADE,
)
_SECOND_OPINIONS = {
    "drawn": "a second opinion was drawn",
    "rejected": "a rejection is confirmed by another owner's validator",
    "watched": "its owner is watched",
}

_EVENTS = text("SELECT seq FROM event WHERE subject = :subject ORDER BY seq")


def explain_submission(connection: Connection, submission: str, *, now_ms: int) -> str:
    """A submission in words, with the worst value of each check; ConfigError if it does not exist."""
    row = _require_submission(connection, submission)
    lines = [*_describe_start(row), *_describe_duplicates(connection, row), *_describe_verdicts(connection, row)]
    lines += [*_describe_outcomes(connection, row), *_describe_watch(connection, row)]
    return "\n".join([*lines, *_describe_rest(connection, row, now_ms)])


def list_findings(connection: Connection, submission: str) -> list[str]:
    """Every finding of every verdict on a submission, one line each; empty if it does not exist.

    Validators with the same arithmetic find the same values: those are listed once.
    """
    found: list[str] = []
    earlier: dict[tuple[str, ...], int] = {}
    for vote in list_verdicts(connection, submission):
        lines = tuple(map(_describe_finding, _read_findings(connection, vote)))
        if lines and lines in earlier:
            lines = (f"the same {count_things(len(lines), 'value')} as in round {earlier[lines]}",)
        else:
            earlier[lines] = vote.round
        found += [f"round {vote.round}: {line}" for line in lines]
    return found


def read_state(connection: Connection, submission: str) -> SubmissionState:
    """State of a submission; ConfigError if it does not exist."""
    return SubmissionState(_require_submission(connection, submission).state)


def _require_submission(connection: Connection, submission: str) -> SubmissionRow:
    row = find_submission(connection, submission)
    if row is None:
        raise ConfigError(f"{submission[:40]}: no such submission in this ledger")
    return row


def _describe_start(row: SubmissionRow) -> Iterator[str]:
    groups = f"group {row.first}" if row.count == 1 else f"groups {row.first} to {row.first + row.count - 1}"
    yield f"{row.submission} {SubmissionState(row.state).phrase}."
    yield f"Node {row.node} of owner {row.owner} submitted it for lease {row.lease}."
    yield f"It covers {groups} of step {row.step}, generated with v{row.version}."
    yield f"File {row.blob}, {row.size} bytes, {row.tokens} tokens by its manifest."
    if row.received_ms:
        yield f"Its file arrived {max(0, row.received_ms - row.committed_ms)} ms after the manifest."


def _describe_duplicates(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    for duplicate in list_duplicates(connection, row.submission):
        rival = f"{duplicate.rival}, which {SubmissionState(duplicate.rival_state).phrase}"
        yield f"Rollout {duplicate.place} has the tokens of one in {rival}."


def _describe_verdicts(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    earlier: dict[tuple[str, ...], int] = {}
    for vote in list_verdicts(connection, row.submission):
        on = " on appeal" if vote.appeal else ""
        tokens = count_things(vote.tokens, "token")
        yield f"Round {vote.round}{on}, validator {vote.validator}: verdict {vote.verdict} ({tokens})."
        lines = tuple(_summarise_findings(_read_findings(connection, vote)))
        if lines and lines in earlier:
            yield f"  the same findings as in round {earlier[lines]}"
        else:
            earlier[lines] = vote.round
            yield from lines


def _read_findings(connection: Connection, vote: VerdictRow) -> tuple[Finding, ...]:
    event = read_event(connection, vote.seq)
    return () if event is None else read_body(event, VerdictStatement).findings


def _summarise_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """One line for each check: its worst finding, and how many there are. Failed checks come first."""
    for check in dict.fromkeys(finding.check for finding in sorted(findings, key=lambda finding: finding.passed)):
        own = [finding for finding in findings if finding.check == check]
        failed = [finding for finding in own if not finding.passed]
        worst = max(failed, key=_measure_gap) if failed else min(own, key=_measure_gap)
        count = f"; {len(failed)} of {len(own)} failed" if failed else f"; all {len(own)} passed"
        yield f"  {_describe_finding(worst)}{f', the worst{count}' if len(own) > 1 else ''}"


def _describe_finding(finding: Finding) -> str:
    where = f" at {finding.where}" if finding.where else ""
    word = "passed" if finding.passed else "FAILED"
    return f"{finding.check}: {finding.statistic}, threshold {finding.threshold}{where}: {word}"


def _measure_gap(finding: Finding) -> float:
    """The distance of a value from its threshold, whichever side is the right one."""
    return abs(float(finding.statistic) - float(finding.threshold))


def _describe_watch(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    history = find_history(connection, row.owner)
    if history is not None and history.watch_seq:
        yield f"Its owner is watched since event {history.watch_seq}: {describe_watch(history)}."


def _describe_outcomes(connection: Connection, row: SubmissionRow) -> Iterator[str]:
    for (seq,) in connection.execute(_EVENTS, {"subject": row.submission}):
        event = read_event(connection, int(seq))
        if event is not None and event.kind in _SHOWN_KINDS:
            yield _describe_event(event)
            for account, amount in event.postings:
                meaning = _ACCOUNTS[account.partition(":")[0]]
                yield f"  {account}: {amount:+d} micro-credits ({amount / MICRO:+.6f}), {meaning}"


def _describe_event(event: Event) -> str:
    match parse_event(event):
        case events.SubmissionOutcome() as body:
            return f"Event {event.seq}: {body.state}, {body.reason}; paid {body.paid} micro-credits."
        case events.Slash() as body:
            return f"Event {event.seq}: {body.amount} micro-credits of owner {body.owner} were burned."
        case events.CanaryGraded() as body:
            known = "good" if body.good else "bad"
            return f"Event {event.seq}: a canary, known to be {known}; {_describe_canary(body)}."
        case events.SecondOpinion() as body:
            return f"Event {event.seq}: one verdict is not enough ({_SECOND_OPINIONS[body.because]})."
        case events.VerdictGrades() as body:
            return f"Event {event.seq}: the work was {body.side}; {_describe_grades(body)}."
    return f"Event {event.seq}: the owner appealed."


def _describe_canary(body: events.CanaryGraded) -> str:
    said, names = "rejected" if body.good else "accepted", ", ".join(body.missed_by)
    if body.state not in ("missed", "wronged"):
        return {"caught": "it was rejected", "passed": "it was accepted"}.get(body.state, "nobody judged it")
    trained = f", and step {body.trained} was trained on it" if body.trained and not body.good else ""
    return f"{said} by validator {names}{trained}"


def _describe_grades(body: events.VerdictGrades) -> str:
    wrong = [grade.validator for grade in body.grades if not grade.right]
    if not wrong:
        return "all validators that judged it were right"
    return f"validator{'s' * (len(wrong) > 1)} {', '.join(wrong)} {'was' if len(wrong) == 1 else 'were'} wrong about it"


def _describe_rest(connection: Connection, row: SubmissionRow, now_ms: int) -> Iterator[str]:
    job, appeal = find_job(connection, row.submission), find_appeal(connection, row.submission)
    if job is not None and job.state == "queued":
        yield f"It waits for verdict {job.round}, claimed {count_things(job.claims, 'time')} so far."
    if is_convicted_by_odds(connection, row):
        yield "Its owner was banned for the odds of several submissions, of which this one is the last."
    elif row.state == SubmissionState.HARD:
        yield "Two validators found it faked, so its owner was banned."
    ban = find_ban(connection, row.owner, row.owner)
    if ban is not None and ban.reason == name_shut_out(row.submission):
        yield "Too much work of its owner was rejected, so it was banned. A right appeal lifts the ban."
    if appeal is not None:
        yield f"{describe_appeal(appeal.state).capitalize()}."
    elif row.state in REJECTED and row.dropped:
        yield "Its file was deleted, so it can no longer be appealed."
    elif row.state in REJECTED:
        away_ms = count_away(connection, row.decided_ms)
        window_s = appeal_time(read_run(connection).params, SubmissionState(row.state))
        end = show_time(row.decided_ms + away_ms + 1000 * window_s)
        vain = _find_obstacle(connection, row, now_ms)
        how = f", but not now: {vain}" if vain else f": shoal owner appeal URL {row.submission} --owner FILE"
        yield f"Its owner may appeal until {end}{how}"


def _find_obstacle(connection: Connection, row: SubmissionRow, now_ms: int) -> str:
    """Why an appeal would be refused now; empty if it would be heard."""
    view = RunSnapshot(connection, now_ms, read_run(connection).params)
    try:
        refuse_early(view, row.owner)
        refuse_vain(view, row)
    except ApiError as error:
        return error.text
    return ""
