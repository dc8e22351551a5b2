"""What the ledger of a swarm says at the end: whether it holds, verdicts, credit, and why somebody was banned."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, text

from shoal.swarm.db import open_engine, read_snapshot
from shoal.swarm.explain import explain_submission
from shoal.swarm.messages import LeaderLine, SubmissionState
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.status import read_leaders
from shoal.swarm.verify import verify_ledger

MAX_OWNERS = 1000
_COUNTS = text("SELECT owner, state, count(*) FROM submission GROUP BY owner, state")
_WORST = text("SELECT submission FROM submission WHERE owner = :owner AND state = :state ORDER BY committed_ms LIMIT 1")
_REJECTED = (SubmissionState.HARD, SubmissionState.SOFT, SubmissionState.FORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The ledger in short."""

    holds: bool
    summary: str
    """what its verification found"""
    leaders: tuple[LeaderLine, ...]
    verdicts: Mapping[str, Counter[str]]
    """how many submissions of each owner ended how"""
    cases: Mapping[str, str]
    """of each owner that was rejected, the story of its gravest submission"""


def collect_evidence(ledger: Path) -> Evidence:
    """Verify a ledger that nobody writes to any more, and read what it says of its owners."""
    engine = open_engine(str(ledger))
    try:
        report = verify_ledger(engine, projections=PROJECTIONS)
        with read_snapshot(engine) as connection:
            leaders = tuple(read_leaders(connection, MAX_OWNERS))
            verdicts = _count_states(connection)
            cases = {owner: _tell_case(connection, owner, states) for owner, states in verdicts.items()}
    finally:
        engine.dispose()
    found = "; ".join(f"{finding.check}: {finding.text}" for finding in report.findings[:3])
    counts = f"{report.num_events} events, {report.num_postings} postings, {report.num_heads} signed heads"
    return Evidence(
        holds=report.holds,
        summary=f"the ledger holds: {counts}" if report.holds else f"THE LEDGER IS BROKEN: {found}",
        leaders=leaders,
        verdicts=verdicts,
        cases={owner: story for owner, story in cases.items() if story},
    )


def _count_states(connection: Connection) -> dict[str, Counter[str]]:
    verdicts: dict[str, Counter[str]] = {}
    for owner, state, count in connection.execute(_COUNTS):
        verdicts.setdefault(str(owner), Counter())[str(state)] += int(count)
    return verdicts


def _tell_case(connection: Connection, owner: str, states: Counter[str]) -> str:
    for state in _REJECTED:
        if states[state.value]:
            row = connection.execute(_WORST, {"owner": owner, "state": state.value}).one()
            return explain_submission(connection, str(row[0]))
    return ""
