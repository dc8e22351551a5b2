"""One run that contains everything, played once, and the means to forge its ledger as its coordinator could."""

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from shoal.audit.verify import AuditFinding, verify_ledger
from shoal.coordinator.state import PROJECTIONS
from shoal.identity.delegation import Scope, sign_revocation
from shoal.identity.keys import Key
from shoal.ledger.db import EVENT, HEAD, MERKLE_NODE, POSTING, open_database
from shoal.ledger.event import (
    GENESIS_PREV,
    Event,
    EventKind,
    Posting,
    encode_body,
    seal_event,
    sign_statement,
    sort_postings,
)
from shoal.ledger.merkle import Frontier, hash_leaf
from shoal.ledger.reader import TILE_LEVEL, read_events
from shoal.protocol.messages import Action, Heartbeat, LeaseProgress, Verdict

JUDGES = ("judge-a", "judge-b", "judge-c", "judge-d", "judge-e")
PARAMS: dict[str, Any] = {
    "groups_per_batch": 4,
    "verdict_price": 3,
    "limit_lapses": 1,
    "limit_after": 2,
    "limited_s": 300,
    "appeal_s": 20_000,
    "lease_first_s": 300,
    "lease_max_s": 600,
    "watch_submissions": 1,
}
_kept: dict[str, Any] = {}


@dataclass(frozen=True)
class History:
    """The events of an honest run, its keys, and a copy of its database."""

    events: tuple[Event, ...]
    database: bytes
    key: Key
    operator: Key
    owners: dict[str, Key]
    nodes: dict[str, Key]

    def find(self, kind: EventKind, **fields: Any) -> Event:
        """The first event of a kind with these fields in its body."""
        found = [event for event in self.list(kind) if fields.items() <= event.content.items()]
        assert found, f"{kind} {fields}: not in this history"
        return found[0]

    def list(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def history(make_world: Callable[..., Any]) -> History:
    """Created by the first test that needs it; its ledger is verified at the end of that test."""
    if not _kept:
        world = play_history(make_world(**PARAMS))
        world.coordinator.ledger.close()
        path = world.url.removeprefix("sqlite:///")
        with open_database(world.url).connect() as connection:
            events = tuple(read_events(connection, 0, 10**6))
        with sqlite3.connect(path) as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        _kept["it"] = History(events, Path(path).read_bytes(), world.key, world.operator, world.owners, world.nodes)
        world.reopen()
    return _kept["it"]  # type: ignore[no-any-return]


@pytest.fixture
def play() -> Callable[[Callable[..., Any], str], Any]:
    """Plays the same history in another database."""
    return lambda make, url: play_history(make(url, **PARAMS))


@pytest.fixture
def accuse(history: History, quick_folder: Path) -> Callable[[Iterable[Event]], list[AuditFinding]]:
    """What `verify` finds in a ledger of these events, with hashes and signatures recomputed by the coordinator."""

    def accuse_events(events: Iterable[Event]) -> list[AuditFinding]:
        path = quick_folder / "forged.db"
        path.write_bytes(history.database)
        engine = open_database(f"sqlite:///{path}")
        try:
            rewrite_ledger(engine, events)
            return verify_ledger(engine, projections=PROJECTIONS).findings
        finally:
            engine.dispose()

    return accuse_events


@pytest.fixture
def forge(history: History) -> "Forger":
    return Forger(history)


class Forger:
    """The history with one change."""

    def __init__(self, history: History) -> None:
        self.history, self.stranger = history, Key.generate()

    def find_place(self, forged: list[Event]) -> int:
        """The index of the first event that differs."""
        pairs = zip(forged, self.history.events, strict=False)
        return next((seq for seq, (left, right) in enumerate(pairs) if left != right), len(self.history.events))

    def name_owner(self, owner: str) -> str:
        return self.history.owners[owner].public

    def repeat_command(self, kind: EventKind, **values: Any) -> dict[str, Any]:
        """The operator's command again, with another nonce."""
        return {**self.history.find(kind).content, "nonce": "c" * 32, **values}

    def change(self, event: Event, postings: Iterable[Posting] | None = None, **fields: Any) -> list[Event]:
        """Change the body of one event."""
        body = encode_body({**event.content, **fields})
        moved = event.postings if postings is None else sort_postings(postings)
        return self.swap(event, replace(event, body=body, postings=moved))

    def swap(self, event: Event, *others: Event) -> list[Event]:
        """Replace one event by others, or by none."""
        events = self.history.events
        return [*events[: event.seq], *others, *events[event.seq + 1 :]]

    def insert(self, before: Event, *others: Event) -> list[Event]:
        """Insert events before one."""
        return self.swap(before, *others, before)

    def append(self, *others: Event) -> list[Event]:
        return [*self.history.events, *others]

    def say(self, kind: EventKind, subject: str, postings: Iterable[Posting] = (), /, **body: Any) -> Event:
        """One of the coordinator's own events."""
        return self._draft(kind, self.history.key.public, subject, body, b"", postings)

    def sign(self, key: Key, kind: EventKind, subject: str, postings: Iterable[Posting] = (), /, **body: Any) -> Event:
        """An event signed by another key."""
        made = sign_statement(key, "demo", kind, subject, body)
        return self._draft(kind, made.actor, subject, body, made.signature, postings)

    def _draft(
        self,
        kind: EventKind,
        actor: str,
        subject: str,
        body: dict[str, Any],
        signature: bytes,
        postings: Iterable[Posting],
    ) -> Event:
        return Event(0, 0, kind.value, actor, subject, encode_body(body), signature, b"", b"", sort_postings(postings))


def chain_events(events: Iterable[Event]) -> list[Event]:
    """Chain the events; those without a time get that of the previous event."""
    chained: list[Event] = []
    for seq, event in enumerate(events):
        last_hash, last_ms = (chained[-1].hash, chained[-1].time_ms) if chained else (GENESIS_PREV, 0)
        chained.append(seal_event(replace(event, seq=seq, prev_hash=last_hash, time_ms=max(event.time_ms, last_ms))))
    return chained


def rewrite_ledger(engine: sa.Engine, events: Iterable[Event]) -> None:
    """What a coordinator can do to its own ledger: rewrite every event, posting and tree node."""
    frontier, chained, nodes = Frontier(), chain_events(events), []
    for event in chained:
        frontier, made = frontier.grow_leaf(hash_leaf(event.hash))
        nodes += [{"level": node.level, "position": node.position, "hash": node.hash} for node in made]
    names = [column.name for column in EVENT.columns]
    rows = [
        {"seq": event.seq, "line": line, "account": account, "amount": amount}
        for event in chained
        for line, (account, amount) in enumerate(event.postings)
    ]
    with engine.begin() as connection:
        for name in connection.scalars(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).all():
            connection.execute(sa.text(f"DROP TRIGGER {name}"))
        for table in (POSTING, EVENT, MERKLE_NODE, HEAD):
            connection.execute(table.delete())
        connection.execute(EVENT.insert(), [{name: getattr(event, name) for name in names} for event in chained])
        connection.execute(POSTING.insert(), rows)
        if stored := [node for node in nodes if node["level"] >= TILE_LEVEL]:
            connection.execute(MERKLE_NODE.insert(), stored)


def play_history(world: Any) -> Any:
    """Everything that can happen in a run of three steps."""
    for judge in JUDGES[3:]:
        world.join(judge, judge, scopes={Scope.VALIDATE})
    world.change(validators=tuple(world.owner_id(judge) for judge in JUDGES))
    world.seal("canary", "spare")
    for node, owner in (("w1", "ann"), ("w2", "bob"), ("w3", "cleo"), ("m1", "mal"), ("d1", "dave"), ("c1", "canary")):
        world.join(node, owner)
    world.publish(0)
    play_work(world)
    play_doubt(world)
    play_guilt(world)
    play_members(world)
    play_credit(world)
    play_end(world)
    return world


def play_work(world: Any) -> None:
    """Leases that are delivered, and leases that are not."""
    world.work("w1")
    world.work("w1")
    world.run(world.coordinator.return_lease(world.id("w2"), world.lease("w2").lease))
    world.work("w2", drift=[(0, 100_000, 60, 60)], numbers=(500_000, 700_000))
    slow = world.lease("w3")
    beat = Heartbeat(leases=(LeaseProgress(lease=slow.lease, done=1),))
    world.coordinator.heartbeat(world.id("w3"), beat)
    world.wait(world.params.lease_first_s)
    world.wait(world.params.lease_max_s)
    lease = world.lease("w3")
    world.commit("w3", world.make_manifest(lease))
    world.wait(world.params.upload_s + 10)


def play_doubt(world: Any) -> None:
    """Verdicts that disagree, verdicts that never arrive, and a failed appeal of a rejection."""
    world.submit("w2", world.lease("w2"))
    world.judge("judge-a", Verdict.INCONCLUSIVE)
    world.take("judge-b")
    world.wait(world.params.claim_s)
    world.judge("judge-c", Verdict.FORM)
    world.work("w3", Verdict.HARD)
    world.wait(world.params.opinion_s)
    rejected = world.work("w1", Verdict.SOFT)
    world.change(appeal_fee=5)
    world.appeal("ann", rejected)
    world.judge("judge-d", Verdict.SOFT)
    world.change(appeal_fee=0, price=7)


def play_guilt(world: Any) -> None:
    """A conviction that stands, one that is reversed, and a canary that was missed."""
    world.work("m1")
    world.join("m2", "mal")
    faked = world.work("m1", Verdict.HARD)
    world.lease("m2")
    world.judge("judge-b", Verdict.HARD)
    world.appeal("mal", faked)
    world.judge("judge-c")
    world.judge("judge-d")
    world.convict("d1")
    missed = world.work("c1")
    world.reveal("canary", missed)


def play_members(world: Any) -> None:
    """A node leaves, an owner is banned, and the coordinator itself is down for a while."""
    world.join("w2", "bob", max_leases=8)
    world.join("w3", "cleo")  # two of its leases failed
    world.lease("w3")
    world.run(world.coordinator.leave(world.id("w3")))
    world.join("w3", "cleo")
    world.join("w4", "cleo")
    world.run(world.coordinator.revoke(sign_revocation(world.owners["cleo"], world.id("w4"), "demo")))
    world.order(Action.STOP)
    world.run(world.coordinator.stop())
    world.now_ms += 5000
    world.restart()
    world.order(Action.RESUME)
    world.submit("w2", world.lease("w2"))
    world.order(Action.BAN, target=world.owner_id("bob"), reason="a word of the operator")
    world.order(Action.UNBAN, target=world.owner_id("bob"))


def play_credit(world: Any) -> None:
    """Credit that is released, requested, paid out and returned."""
    for end in (Action.REDEEM_DONE, Action.REDEEM_FAILED):
        world.order(end, request=world.redeem("ann", 10).request)
    world.redeem("ann", 10)
    world.unbond("ann")
    world.wait(world.params.unbond_s)
    world.unbond("bob")


def play_watch(world: Any) -> None:
    """An owner that is watched since the first cut submits clean work."""
    world.submit("w2", world.lease("w2"))
    world.judge("judge-a")
    world.judge("judge-b")


def play_end(world: Any) -> None:
    """The steps are trained; one node is too slow on the last one, and a backup is granted."""
    for step in (1, 2):
        while world.cut(step).batch is None:
            world.work("w1")
        world.train(step)
        if step == 1:
            play_watch(world)
    for _ in range(3):
        world.work("w1")
    world.lease("w3")
    world.wait(world.params.lease_min_s // 2)
    world.work("w1")
    world.train(3)
    world.wait(world.params.challenge_s + world.params.appeal_s + 1000)


@pytest.fixture
def check_named(forge, accuse):
    """Forge a ledger, and check that `verify` names the event and the reason."""

    def check(make, words):
        forged = make(forge)
        findings = accuse(forged)
        assert [finding.check for finding in findings] == ["rules"], findings
        assert findings[0].text.startswith(f"event {forge.find_place(forged)}: "), findings
        assert words in findings[0].text, findings

    return check
