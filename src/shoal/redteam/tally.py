"""What the ledger of a field says, owner by owner: work, verdicts with the checks that failed, credit over time."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, text

from shoal.swarm.db import open_engine, read_snapshot
from shoal.swarm.event import Kind
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.state.run import read_run
from shoal.swarm.verify import verify_ledger

_PIECES = text(
    "SELECT submission, owner, state, version, step, first, count, tokens, paid FROM submission "
    "ORDER BY committed_ms, lease"
)
_WORDS = text("SELECT subject, actor, body FROM event WHERE kind = :kind ORDER BY seq")
_OWNERS = text("SELECT owner, standing, accepted, rejected FROM owner")
_POSTINGS = text("SELECT seq, account, amount FROM posting ORDER BY seq, line")
_GRANTS = text("SELECT owner, sum(count), count(*) FROM lease GROUP BY owner")
_VERSIONS = text("SELECT version, root FROM version")
_NODES = text("SELECT node, owner FROM node")
_ACCEPTED = text("SELECT owner, sum(count) FROM submission WHERE state = 'accepted' GROUP BY owner")


@dataclass(frozen=True, slots=True)
class Word:
    """One validator's verdict."""

    validator: str
    """its node"""
    verdict: Verdict
    failed: tuple[str, ...]
    """the checks that did not pass"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One submission."""

    submission: str
    owner: str
    state: SubmissionState
    version: int
    place: tuple[int, int]
    """step and first group"""
    groups: int
    tokens: int
    """as its manifest says"""
    paid: int
    words: list[Word] = field(default_factory=list)


@dataclass(slots=True)
class Purse:
    """The credit of an owner, all purses together, in micro-credits."""

    now: int = 0
    peak: int = 0

    def add(self, amount: int) -> None:
        self.now += amount
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A ledger in short."""

    holds: bool
    summary: str
    group_size: int
    price: int
    """micro-credits for a token"""
    pieces: Mapping[str, list[Piece]]
    """by owner, in the order in which they were committed"""
    purses: Mapping[str, Purse]
    standings: Mapping[str, Standing]
    granted: Mapping[str, int]
    """groups that were leased to each owner"""
    nodes: Mapping[str, str]
    """owners by their nodes"""
    roots: Mapping[int, str] = field(default_factory=dict)
    """of versions; a step that had nothing to train on leaves the weights as they were"""

    def is_same(self, one: int, other: int) -> bool:
        """Whether two versions have the same weights."""
        return one == other or (one in self.roots and self.roots[one] == self.roots.get(other))

    def find_pieces(self, owners: Collection[str]) -> list[Piece]:
        """What some owners handed in."""
        return [piece for owner in owners for piece in self.pieces.get(owner, [])]


def read_tally(ledger: Path) -> Tally:
    """Verify a ledger that nobody writes to any more, and read it."""
    engine = open_engine(str(ledger))
    try:
        report = verify_ledger(engine, projections=PROJECTIONS)
        with read_snapshot(engine) as connection:
            params = read_run(connection).params
            return Tally(
                holds=report.holds,
                summary="; ".join(f"{finding.check}: {finding.text}" for finding in report.findings[:3])
                or f"{report.num_events:,} events, {report.num_postings:,} postings, {report.num_heads:,} signed heads",
                group_size=params.group_size,
                price=params.price,
                pieces=_read_pieces(connection),
                purses=_read_purses(connection),
                standings={str(row[0]): Standing(row[1]) for row in connection.execute(_OWNERS)},
                granted={str(row[0]): int(row[1]) for row in connection.execute(_GRANTS)},
                nodes={str(row[0]): str(row[1]) for row in connection.execute(_NODES)},
                roots={int(row[0]): str(row[1]) for row in connection.execute(_VERSIONS)},
            )
    finally:
        engine.dispose()


def count_rollouts(ledger: Path, owners: Collection[str]) -> int:
    """Rollouts of some owners that were accepted so far; 0 while there is no ledger."""
    if not ledger.exists():
        return 0
    engine = open_engine(str(ledger))
    try:
        with read_snapshot(engine) as connection:
            groups = sum(int(row[1]) for row in connection.execute(_ACCEPTED) if row[0] in owners)
            return groups * read_run(connection).params.group_size if groups else 0
    finally:
        engine.dispose()


def _read_pieces(connection: Connection) -> dict[str, list[Piece]]:
    found: dict[str, Piece] = {}
    for name, owner, state, version, step, first, groups, tokens, paid in connection.execute(_PIECES):
        found[name] = Piece(
            submission=str(name),
            owner=str(owner),
            state=SubmissionState(state),
            version=int(version),
            place=(int(step), int(first)),
            groups=int(groups),
            tokens=int(tokens),
            paid=int(paid),
        )
    for subject, actor, body in connection.execute(_WORDS, {"kind": Kind.VAL_VERDICT.value}):
        content = json.loads(body)
        failed = dict.fromkeys(str(finding["check"]) for finding in content["findings"] if not finding["passed"])
        found[subject].words.append(Word(str(actor), Verdict(content["verdict"]), tuple(failed)))
    pieces: dict[str, list[Piece]] = {}
    for piece in found.values():
        pieces.setdefault(piece.owner, []).append(piece)
    return pieces


def _read_purses(connection: Connection) -> dict[str, Purse]:
    """All that an event moves at once: what goes from one purse to another is no gain on its way."""
    moved: dict[tuple[int, str], int] = {}
    for seq, account, amount in connection.execute(_POSTINGS):
        if owner := str(account).partition(":")[2]:
            moved[seq, owner] = moved.get((seq, owner), 0) + int(amount)
    purses: dict[str, Purse] = {}
    for (_, owner), amount in moved.items():
        purses.setdefault(owner, Purse()).add(amount)
    return purses
