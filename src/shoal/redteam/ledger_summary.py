"""Summary of a ledger by owner: submissions, verdicts with the checks that failed, credit over time."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, text

from shoal.audit.database import open_reader
from shoal.audit.verify import verify_ledger
from shoal.coordinator.state import PROJECTIONS
from shoal.coordinator.state.run import read_run
from shoal.ledger.db import read_snapshot
from shoal.ledger.event import EventKind
from shoal.protocol.messages import Standing, SubmissionState, Verdict, VerdictStatement

_SUBMISSIONS = text(
    "SELECT submission, lease, owner, state, version, step, first, count AS groups, tokens, paid "
    "FROM submission ORDER BY committed_ms, lease"
)
_VERDICTS = text("SELECT subject, actor, body FROM event WHERE kind = :kind ORDER BY seq")
_OWNERS = text("SELECT owner, standing FROM owner")
_POSTINGS = text("SELECT seq, account, amount FROM posting ORDER BY seq, line")
_GRANTS = text("SELECT owner, sum(count) FROM lease GROUP BY owner")
_VERSIONS = text("SELECT version, root FROM version")
_NODES = text("SELECT node, owner FROM node")
_ACCEPTED = text("SELECT owner, sum(count) FROM submission WHERE state = 'accepted' GROUP BY owner")


@dataclass(frozen=True, slots=True)
class VerdictSummary:
    """One validator's verdict."""

    validator: str
    """its node"""
    verdict: Verdict
    failed: tuple[str, ...]
    """the failed checks"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionSummary:
    """One submission and its verdicts."""

    submission: str
    lease: str
    owner: str
    state: SubmissionState
    version: int
    place: tuple[int, int]
    """step and first group"""
    groups: int
    tokens: int
    """as stated in its manifest"""
    paid: int
    verdicts: list[VerdictSummary] = field(default_factory=list)


@dataclass(slots=True)
class OwnerBalance:
    """Credit of an owner over all accounts, in micro-credits."""

    now: int = 0
    peak: int = 0

    def add(self, amount: int) -> None:
        self.now += amount
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSummary:
    """Summary of a ledger."""

    holds: bool
    summary: str
    group_size: int
    price: int
    """micro-credits per token"""
    repeated: int
    """rejections after which an owner without accepted work is banned, whatever their cause"""
    submissions: Mapping[str, list[SubmissionSummary]]
    """by owner, in the order of commitment"""
    balances: Mapping[str, OwnerBalance]
    standings: Mapping[str, Standing]
    granted: Mapping[str, int]
    """number of groups leased to each owner"""
    nodes: Mapping[str, str]
    """owner of each node"""
    roots: Mapping[int, str] = field(default_factory=dict)
    """root of each version; a step with nothing to train on leaves the weights unchanged"""

    def is_same(self, one: int, other: int) -> bool:
        """Whether two versions have the same weights."""
        return one == other or (one in self.roots and self.roots[one] == self.roots.get(other))

    def list_submissions(self, owners: Collection[str]) -> list[SubmissionSummary]:
        """Submissions of some owners."""
        return [submission for owner in owners for submission in self.submissions.get(owner, [])]


def read_ledger_summary(ledger: Path) -> LedgerSummary:
    """Verify a ledger that is no longer written to, and read it."""
    with open_reader(str(ledger)) as engine:
        report = verify_ledger(engine, projections=PROJECTIONS)
        with read_snapshot(engine) as connection:
            params = read_run(connection).params
            return LedgerSummary(
                holds=report.holds,
                summary=report.problem
                or f"{report.num_events:,} events, {report.num_postings:,} postings, {report.num_heads:,} signed heads",
                group_size=params.group_size,
                price=params.price,
                repeated=2 * params.limit_after,
                submissions=_read_submissions(connection),
                balances=_read_balances(connection),
                standings={str(row[0]): Standing(row[1]) for row in connection.execute(_OWNERS)},
                granted={str(row[0]): int(row[1]) for row in connection.execute(_GRANTS)},
                nodes={str(row[0]): str(row[1]) for row in connection.execute(_NODES)},
                roots={int(row[0]): str(row[1]) for row in connection.execute(_VERSIONS)},
            )


def count_rollouts(ledger: Path, owners: Collection[str]) -> int:
    """Accepted rollouts of some owners so far; 0 while there is no ledger."""
    if not ledger.exists():
        return 0
    with open_reader(str(ledger)) as engine, read_snapshot(engine) as connection:
        groups = sum(int(row[1]) for row in connection.execute(_ACCEPTED) if row[0] in owners)
        return groups * read_run(connection).params.group_size if groups else 0


def _read_submissions(connection: Connection) -> dict[str, list[SubmissionSummary]]:
    found: dict[str, SubmissionSummary] = {}
    for row in connection.execute(_SUBMISSIONS).mappings():
        own = {**row, "state": SubmissionState(row["state"]), "place": (row["step"], row["first"])}
        del own["step"], own["first"]
        found[row["submission"]] = SubmissionSummary(**own)
    for subject, actor, body in connection.execute(_VERDICTS, {"kind": EventKind.VAL_VERDICT.value}):
        said = VerdictStatement.model_validate_json(body)
        failed = dict.fromkeys(finding.check for finding in said.findings if not finding.passed)
        found[subject].verdicts.append(VerdictSummary(str(actor), said.verdict, tuple(failed)))
    submissions: dict[str, list[SubmissionSummary]] = {}
    for submission in found.values():
        submissions.setdefault(submission.owner, []).append(submission)
    return submissions


def _read_balances(connection: Connection) -> dict[str, OwnerBalance]:
    """Sum all postings of an event: moving credit between accounts is not a gain."""
    moved: dict[tuple[int, str], int] = {}
    for seq, account, amount in connection.execute(_POSTINGS):
        if owner := str(account).partition(":")[2]:
            moved[seq, owner] = moved.get((seq, owner), 0) + int(amount)
    balances: dict[str, OwnerBalance] = {}
    for (_, owner), amount in moved.items():
        balances.setdefault(owner, OwnerBalance()).add(amount)
    return balances
