"""One run with everything in it, told once, and the means to tell it otherwise as its coordinator could."""

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from shoal.keys import Key
from shoal.swarm.db import EVENT, HEAD, MERKLE_NODE, POSTING, open_engine
from shoal.swarm.delegation import Scope, sign_revocation
from shoal.swarm.event import GENESIS_PREV, Event, Kind, encode_body, seal_event, sign_statement
from shoal.swarm.merkle import Frontier, hash_leaf
from shoal.swarm.messages import Action, Verdict
from shoal.swarm.postings import Posting, sort_postings
from shoal.swarm.rows import TILE_LEVEL, read_events
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import Finding, verify_ledger

JUDGES = ("judge-a", "judge-b", "judge-c", "judge-d", "judge-e")
PARAMS: dict[str, Any] = {
    "groups_per_batch": 4,
    "verdict_price": 3,
    "limit_lapses": 1,
    "limit_after": 2,
    "limited_s": 300,
    "appeal_s": 20_000,
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

    def find(self, kind: Kind, **fields: Any) -> Event:
        """The first event of a kind whose body says so."""
        found = [event for event in self.list(kind) if fields.items() <= event.content.items()]
        assert found, f"{kind} {fields}: not in this history"
        return found[0]

    def list(self, kind: Kind) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def history(make_world: Callable[..., Any]) -> History:
    """Made by the first test that asks for it; its ledger is verified at the end of that test."""
    if not _kept:
        world = tell_history(make_world(**PARAMS))
        world.coordinator.ledger.close()
        path = world.url.removeprefix("sqlite:///")
        with open_engine(world.url).connect() as connection:
            events = tuple(read_events(connection, 0, 10**6))
        with sqlite3.connect(path) as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        _kept["it"] = History(events, Path(path).read_bytes(), world.key, world.operator, world.owners, world.nodes)
        world.reopen()
    return _kept["it"]  # type: ignore[no-any-return]


@pytest.fixture
def tell() -> Callable[[Callable[..., Any], str], Any]:
    """Tells the same history in another database."""
    return lambda make, url: tell_history(make(url, **PARAMS))


@pytest.fixture
def accuse(history: History, quick_folder: Path) -> Callable[[Iterable[Event]], list[Finding]]:
    """What `verify` finds in a ledger of these events, chained and signed anew by the coordinator."""

    def accuse_events(events: Iterable[Event]) -> list[Finding]:
        path = quick_folder / "forged.db"
        path.write_bytes(history.database)
        engine = open_engine(f"sqlite:///{path}")
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
    """The history with one thing otherwise."""

    def __init__(self, history: History) -> None:
        self.history, self.stranger = history, Key.generate()

    def find_place(self, forged: list[Event]) -> int:
        """The first event that is another one."""
        pairs = zip(forged, self.history.events, strict=False)
        return next((seq for seq, (left, right) in enumerate(pairs) if left != right), len(self.history.events))

    def name_owner(self, owner: str) -> str:
        return self.history.owners[owner].public

    def repeat_command(self, kind: Kind, **values: Any) -> dict[str, Any]:
        """What the operator said, said once more with another nonce."""
        return {**self.history.find(kind).content, "nonce": "c" * 32, **values}

    def change(self, event: Event, postings: Iterable[Posting] | None = None, **fields: Any) -> list[Event]:
        """One event whose body says something else."""
        body = encode_body({**event.content, **fields})
        moved = event.postings if postings is None else sort_postings(postings)
        return self.swap(event, replace(event, body=body, postings=moved))

    def swap(self, event: Event, *others: Event) -> list[Event]:
        """Other events in the place of one, or none."""
        events = self.history.events
        return [*events[: event.seq], *others, *events[event.seq + 1 :]]

    def insert(self, before: Event, *others: Event) -> list[Event]:
        """Events that are not there, in front of one."""
        return self.swap(before, *others, before)

    def append(self, *others: Event) -> list[Event]:
        return [*self.history.events, *others]

    def say(self, kind: Kind, subject: str, postings: Iterable[Posting] = (), /, **body: Any) -> Event:
        """An event of the coordinator's own."""
        return self._draft(kind, self.history.key.public, subject, body, b"", postings)

    def sign(self, key: Key, kind: Kind, subject: str, postings: Iterable[Posting] = (), /, **body: Any) -> Event:
        """What somebody signs."""
        made = sign_statement(key, "demo", kind, subject, body)
        return self._draft(kind, made.actor, subject, body, made.signature, postings)

    def _draft(
        self, kind: Kind, actor: str, subject: str, body: dict[str, Any], signature: bytes, postings: Iterable[Posting]
    ) -> Event:
        return Event(0, 0, kind.value, actor, subject, encode_body(body), signature, b"", b"", sort_postings(postings))


def chain_events(events: Iterable[Event]) -> list[Event]:
    """Events in their places; those without a time get that of the event before."""
    chained: list[Event] = []
    for seq, event in enumerate(events):
        last_hash, last_ms = (chained[-1].hash, chained[-1].time_ms) if chained else (GENESIS_PREV, 0)
        chained.append(seal_event(replace(event, seq=seq, prev_hash=last_hash, time_ms=max(event.time_ms, last_ms))))
    return chained


def rewrite_ledger(engine: sa.Engine, events: Iterable[Event]) -> None:
    """What a coordinator can do to its own ledger: every event, posting and node of the tree anew."""
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


def tell_history(world: Any) -> Any:
    """Everything that can happen to a run of three steps."""
    for judge in JUDGES[3:]:
        world.join(judge, judge, scopes={Scope.VALIDATE})
    world.change(validators=tuple(world.owner_id(judge) for judge in JUDGES))
    world.seal("canary", "spare")
    for node, owner in (("w1", "ann"), ("w2", "bob"), ("w3", "cleo"), ("m1", "mal"), ("d1", "dave"), ("c1", "canary")):
        world.join(node, owner)
    world.publish(0)
    tell_work(world)
    tell_doubt(world)
    tell_guilt(world)
    tell_members(world)
    tell_credit(world)
    tell_end(world)
    return world


def tell_work(world: Any) -> None:
    """Leases that come to something, and such that do not."""
    world.work("w1")
    world.work("w1")
    world.run(world.coordinator.return_lease(world.id("w2"), world.lease("w2").lease))
    world.work("w2", drift=[(0, 100_000, 60, 60)], numbers=(500_000, 700_000))
    world.lease("w3")
    world.wait(world.params.lease_first_s)
    lease = world.lease("w3")
    world.commit("w3", world.make_manifest(lease))
    world.wait(world.params.upload_s + 10)


def tell_doubt(world: Any) -> None:
    """Verdicts that do not agree, that do not come, and a rejection that is appealed in vain."""
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


def tell_guilt(world: Any) -> None:
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


def tell_members(world: Any) -> None:
    """Who goes, who is sent away, and a coordinator that was away itself."""
    world.join("w2", "bob", max_leases=8)
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


def tell_credit(world: Any) -> None:
    """Credit that becomes free, is asked for, paid out and given back."""
    for end in (Action.REDEEM_DONE, Action.REDEEM_FAILED):
        world.order(end, request=world.redeem("ann", 10).request)
    world.redeem("ann", 10)
    world.unbond("ann")
    world.wait(world.params.unbond_s)
    world.unbond("bob")


def tell_watch(world: Any) -> None:
    """Who is watched since the first cut hands in something clean."""
    world.submit("w2", world.lease("w2"))
    world.judge("judge-a")
    world.judge("judge-b")


def tell_end(world: Any) -> None:
    """The steps are trained; somebody works too long on the last one, and a backup is given."""
    for step in (1, 2):
        while world.cut(step).batch is None:
            world.work("w1")
        world.train(step)
        if step == 1:
            tell_watch(world)
    for _ in range(3):
        world.work("w1")
    world.lease("w3")
    world.wait(world.params.lease_min_s // 2)
    world.work("w1")
    world.train(3)
    world.wait(world.params.challenge_s + world.params.appeal_s + 1000)


@pytest.fixture
def check_named(forge, accuse):
    """Forges a ledger, and sees that `verify` names the event and the reason."""

    def check(make, words):
        forged = make(forge)
        findings = accuse(forged)
        assert [finding.check for finding in findings] == ["law"], findings
        assert findings[0].text.startswith(f"event {forge.find_place(forged)}: "), findings
        assert words in findings[0].text, findings

    return check
