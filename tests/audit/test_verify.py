"""Verification finds every change that bypasses the guards of a ledger's database."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from shoal.audit.verify import MAX_FINDINGS, AuditReport, verify_ledger
from shoal.coordinator.state import TABLES as STATE_TABLES
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger.db import EVENT, METADATA, POSTING, Projection, is_sqlite, open_database
from shoal.ledger.event import Event, EventKind, Posting, move_credit, seal_event, sign_statement
from shoal.ledger.head import SignedHead, sign_head
from shoal.ledger.ledger import Ledger, LedgerTransaction
from shoal.ledger.reader import read_events
from shoal.ledger.schema import SCHEMA_VERSION

OpenLedger = Callable[..., Ledger]
OWNER = "ab" * 32
TABLES = {
    "event": ("seq",),
    "posting": ("seq", "line"),
    "head": ("size",),
    "merkle_node": ("level", "position"),
    "balance": ("account",),
    "test_lease": ("name",),
}


def decide_one(index: int, worker: Key) -> Callable[[LedgerTransaction], None]:
    def decide(draft: LedgerTransaction) -> None:
        draft.append(EventKind.LEASE_GRANT, subject=f"lease:{index % 7}", body={"grants": index})
        if index % 5 == 0:
            postings = move_credit("mint", f"pending:{OWNER}", index + 1)
            draft.append(EventKind.VAL_VERDICT, subject=f"sub:{index}", body={"verdict": "accepted"}, postings=postings)
        if index % 50 == 0:
            draft.record(sign_statement(worker, "demo", EventKind.SUB_COMMIT, f"lease:{index}", {"root": "ab"}))

    return decide


def fill(ledger: Ledger, count: int = 230) -> SignedHead:
    """230 decisions give 282 events, enough for a stored node of the tree; 12 give every other kind of row."""
    worker = Key.generate()
    for index in range(count):
        ledger.submit(decide_one(index, worker))
    return asyncio.run(ledger.sign_head())


def verify(url: str, projections: list[Projection], held: SignedHead | None = None) -> AuditReport:
    engine = open_database(url)
    try:
        return verify_ledger(engine, projections=projections, held=held)
    finally:
        engine.dispose()


@contextmanager
def open_unguarded(url: str) -> Iterator[sa.Connection]:
    """A connection without triggers and foreign keys."""
    engine = sa.create_engine(open_database(url).url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if is_sqlite(engine):
            for name in (
                connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).scalars().all()
            ):
                connection.exec_driver_sql(f"DROP TRIGGER {name}")
            connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        else:
            connection.exec_driver_sql("SET session_replication_role = replica")
            connection.exec_driver_sql("ALTER TABLE balance DROP CONSTRAINT IF EXISTS balance_amount_check")
            connection.exec_driver_sql("ALTER TABLE balance DROP CONSTRAINT IF EXISTS balance_check")
        yield connection
    engine.dispose()


def list_changes(value: Any) -> list[Any]:
    """Other values of a column's type."""
    match value:
        case int():
            return [value + 1, -value - 1, 1 << 62]
        case str():
            return [value + "x", "", value[:-1] + ("a" if value[-1:] != "a" else "b")]
        case _:
            return [b"", bytes(32), bytes([value[0] ^ 1]) + value[1:] if value else bytes(64)]


def size_for(table: str) -> int:
    """Few decisions, because each change costs a verification; many where there would be no row to change."""
    return 230 if table == "merkle_node" else 12


def pick_rows(connection: sa.Connection, table: str) -> list[dict[str, Any]]:
    keys = ", ".join(TABLES[table])
    rows = [dict(row._mapping) for row in connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY {keys}"))]
    assert rows, f"{table} holds rows to change"
    chosen = {0, len(rows) - 1, *random.Random(table).sample(range(len(rows)), min(2, len(rows)))}
    return [rows[index] for index in sorted(chosen)]


def change_row(connection: sa.Connection, table: str, row: dict[str, Any], column: str, value: Any) -> bool:
    """Whether the database accepted the change (it may collide with another row's key)."""
    where = " AND ".join(f"{key} = :old_{key}" for key in TABLES[table])
    old = {f"old_{key}": row[key] for key in TABLES[table]}
    try:
        connection.execute(sa.text(f"UPDATE {table} SET {column} = :new WHERE {where}"), {"new": value, **old})
    except sa.exc.IntegrityError:
        return False
    return True


def restore_row(connection: sa.Connection, table: str, row: dict[str, Any], column: str, value: Any) -> None:
    changed = {**row, column: value}
    assert change_row(connection, table, changed, column, row[column])


def test_a_ledger_as_it_was_written_holds(open_ledger: OpenLedger, url: str, leases: Projection, key: Key) -> None:
    ledger = open_ledger()
    head = fill(ledger)
    report = verify(url, [leases], head)
    assert report.findings == []
    assert (report.run, report.coordinator, report.root) == ("demo", key.public, head.head.root)
    assert (report.num_events, report.num_postings, report.num_tables) == (282, 92, 2)
    assert report.num_heads in (1, 2)


def test_a_long_verification_says_how_far_it_is(
    open_ledger: OpenLedger, url: str, leases: Projection, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    fill(open_ledger())
    monkeypatch.setattr("shoal.audit.verify._SHOWN_EVERY_S", 0.0)
    with caplog.at_level("INFO", logger="shoal.audit.verify"):
        verify(url, [leases])
    assert "checked the hash and signature of 281 events" in caplog.messages
    assert "checked the decision of 281 of 282 events" in caplog.messages


@pytest.mark.parametrize("table", list(TABLES))
def test_a_change_of_any_column_of_any_row_is_found(
    open_ledger: OpenLedger, url: str, leases: Projection, table: str
) -> None:
    ledger = open_ledger()
    fill(ledger, size_for(table))
    ledger.close()
    tried = 0
    with open_unguarded(url) as connection:
        for row in pick_rows(connection, table):
            for column, old in row.items():
                for value in list_changes(old):
                    if value == old or not change_row(connection, table, row, column, value):
                        continue
                    assert not verify(url, [leases]).holds, f"{table} {row}: {column} = {value!r} was not noticed"
                    restore_row(connection, table, row, column, value)
                    tried += 1
    assert tried >= 6
    assert verify(url, [leases]).findings == []


@pytest.mark.parametrize("table", list(TABLES))
def test_a_missing_row_is_found(open_ledger: OpenLedger, url: str, leases: Projection, table: str) -> None:
    ledger = open_ledger()
    fill(ledger, size_for(table))
    ledger.close()
    with open_unguarded(url) as connection:
        for row in pick_rows(connection, table)[:-1] or pick_rows(connection, table):
            where = " AND ".join(f"{key} = :{key}" for key in TABLES[table])
            connection.execute(sa.text(f"DELETE FROM {table} WHERE {where}"), row)
            found = not verify(url, [leases]).holds
            # A deleted head is not noticed: the events that it covered still exist.
            assert found or table == "head"
            names = ", ".join(f":{name}" for name in row)
            connection.execute(sa.text(f"INSERT INTO {table} VALUES ({names})"), row)
    assert verify(url, [leases]).findings == []


@pytest.mark.parametrize(
    "command",
    [
        "INSERT INTO posting VALUES (3, 0, 'mint', -5)",
        "INSERT INTO posting VALUES (3, 0, 'mint', 0)",
        "INSERT INTO posting VALUES (999, 0, 'mint', -5)",
        "INSERT INTO posting VALUES (-7, 0, 'mint', -5)",
        "INSERT INTO balance VALUES ('burn', 0)",
        "INSERT INTO balance VALUES ('zzz', 1)",
        "INSERT INTO test_lease SELECT 'a', grants, last_hash FROM test_lease WHERE name = 'lease:1'",
        "INSERT INTO merkle_node SELECT 8, 1, hash FROM merkle_node",
        "INSERT INTO merkle_node SELECT 9, 0, hash FROM merkle_node",
        "INSERT INTO head SELECT size + 1, time_ms, root, last_hash, signature FROM head ORDER BY size LIMIT 1",
        "INSERT INTO head SELECT 1, time_ms, root, last_hash, signature FROM head ORDER BY size LIMIT 1",
        "INSERT INTO event SELECT seq + 1, time_ms, kind, actor, subject, body, signature, prev_hash, signature "
        "FROM event ORDER BY seq DESC LIMIT 1",
    ],
)
def test_an_inserted_row_is_found(open_ledger: OpenLedger, url: str, leases: Projection, command: str) -> None:
    ledger = open_ledger()
    fill(ledger, size_for(command.split()[2]))
    ledger.close()
    with open_unguarded(url) as connection:
        connection.exec_driver_sql(command)
    assert not verify(url, [leases]).holds


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("subject = CAST(X'ff' AS TEXT)", "event 4: '\\\\xff': invalid subject"),
        ("body = 'text'", "event: a row with values of the wrong type, starting with '4'"),
        ("time_ms = 'x'", "event: a row with values of the wrong type, starting with '4'"),
        ("time_ms = 1.5", "event: a row with values of the wrong type, starting with '4'"),
        ("signature = 10000000000000", "event: a row with values of the wrong type, starting with '4'"),
    ],
)
def test_values_of_a_wrong_type_and_invalid_text_are_found(tmp_path: Path, key: Key, change: str, found: str) -> None:
    url = str(tmp_path / "ledger.db")
    ledger = Ledger.open(url, run="demo", key=key)
    fill(ledger, 10)
    ledger.close()
    with open_unguarded(url) as connection:
        connection.exec_driver_sql("PRAGMA writable_schema = ON")
        connection.exec_driver_sql("UPDATE sqlite_master SET sql = replace(sql, 'STRICT', '') WHERE name = 'event'")
    with open_unguarded(url) as connection:
        connection.exec_driver_sql(f"UPDATE event SET {change} WHERE seq = 4")
    assert any(finding.text.startswith(found) for finding in verify(url, []).findings)


def test_events_that_were_written_anew_do_not_give_the_signed_heads(
    open_ledger: OpenLedger, url: str, leases: Projection, key: Key
) -> None:
    """The coordinator rewrites history with correct hashes: its own old heads convict it."""
    ledger = open_ledger()
    ledger.submit(decide_one(1, key)).result()
    head = asyncio.run(ledger.sign_head())
    ledger.close()
    with open_unguarded(url) as connection:
        for table in TABLES:
            connection.exec_driver_sql(f"DELETE FROM {table}")
    ledger = open_ledger()
    ledger.submit(decide_one(2, key)).result()
    asyncio.run(ledger.sign_head())
    ledger.close()
    assert verify(url, [leases]).holds
    (finding,) = verify(url, [leases], head).findings
    assert finding.check == "head" and "signed over different events" in finding.text


def forge(url: str, *changes: dict[str, Any]) -> None:
    """Append events like a coordinator that keeps all hashes correct and breaks another rule."""
    engine = open_database(url)
    with engine.begin() as connection:
        (genesis,) = read_events(connection, 0, 1)
        last = genesis
        for seq, change in enumerate(changes, 1):
            values = {"kind": "admin", "subject": "", "body": b"{}", "signature": b"", **change}
            plain = {"seq": seq, "time_ms": last.time_ms, "actor": genesis.actor, "prev_hash": last.hash, "hash": b""}
            last = seal_event(Event(**plain | values))
            connection.execute(EVENT.insert(), {column.name: getattr(last, column.name) for column in EVENT.columns})
            for line, (account, amount) in enumerate(last.postings):
                row = {"seq": seq, "line": line, "account": account, "amount": amount}
                connection.execute(POSTING.insert(), row)
    engine.dispose()


WORKER = Key.generate()
SIGNED = sign_statement(WORKER, "demo", EventKind.APPEAL, "sub:1", {"why": "test"})
STATED = {"actor": WORKER.public, "kind": "appeal", "subject": "sub:1", "body": SIGNED.body}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"prev_hash": bytes(32)}, "chain: event 2: does not contain the hash of the previous event"),
        ({"time_ms": 1}, "chain: event 2: earlier than the previous event"),
        ({"kind": "genesis"}, "form: event 2: a second genesis"),
        ({"kind": "made.up"}, "form: event 2: 'made.up': unknown kind of event"),
        ({"body": b'{"a": 1}'}, "form: event 2: event body is not canonical"),
        (STATED, "signature: event 2: invalid signature: the actor did not sign"),
        (
            STATED | {"signature": SIGNED.signature, "subject": "sub:2"},
            "signature: event 2: invalid signature: the actor",
        ),
        ({"signature": bytes(64)}, "signature: event 2: invalid signature: the actor did not sign"),
        ({"kind": "slash", "postings": (Posting("burn", 1),)}, "form: event 2: postings sum to 1"),
        (
            {"postings": move_credit("mint", "treasury", 1)},
            "form: event 2: admin: events of this kind cannot have postings",
        ),
        (
            {"kind": "slash", "postings": move_credit("treasury", "burn", 1)},
            "projection: event 2: rejected by balances (PostingError('treasury: balance 0",
        ),
    ],
)
def test_a_coordinator_that_keeps_the_hashes_right_and_breaks_a_rule_is_found(
    open_ledger: OpenLedger, url: str, leases: Projection, change: dict[str, Any], found: str
) -> None:
    open_ledger().close()
    forge(url, {}, change)
    (finding,) = verify(url, [leases]).findings
    assert f"{finding.check}: {finding.text}".startswith(found)


def test_what_a_coordinator_forges_by_the_rules_holds(open_ledger: OpenLedger, url: str, leases: Projection) -> None:
    """So the findings above are caused by the changes made there."""
    open_ledger().close()
    forge(url, {}, STATED | {"signature": SIGNED.signature}, {})
    assert verify(url, [leases]).findings == []


def test_a_signed_head_that_names_another_last_event_is_found(
    open_ledger: OpenLedger, url: str, leases: Projection, key: Key
) -> None:
    ledger = open_ledger()
    head = replace(asyncio.run(ledger.sign_head()).head, last_hash="0" * 64)
    (finding,) = verify(url, [leases], sign_head(key, head)).findings
    assert finding.text == "held head of size 1: names a different last event"


def test_a_ledger_that_was_cut_off_is_found_by_who_holds_a_later_head(
    open_ledger: OpenLedger, url: str, leases: Projection
) -> None:
    ledger = open_ledger()
    ledger.submit(lambda draft: draft.append(EventKind.ADMIN, body={})).result()
    asyncio.run(ledger.sign_head())
    ledger.submit(lambda draft: draft.append(EventKind.ADMIN, body={})).result()
    later = asyncio.run(ledger.sign_head())
    ledger.close()
    with open_unguarded(url) as connection:
        connection.exec_driver_sql("DELETE FROM event WHERE seq = 2")
        assert not verify(url, [leases]).holds
        connection.exec_driver_sql("DELETE FROM head WHERE size = 3")
    assert verify(url, [leases]).holds
    (finding,) = verify(url, [leases], later).findings
    assert finding.text == "a head was signed over 3 events, but there are 2"


def test_a_projection_that_depends_on_more_than_events_is_found(
    open_ledger: OpenLedger, url: str, leases: Projection
) -> None:
    def apply(event: Event, connection: sa.Connection) -> None:
        leases.apply(event, connection)
        connection.execute(sa.text("UPDATE test_lease SET grants = :now"), {"now": time.monotonic_ns()})

    wayward = Projection("leases", leases.tables, dict.fromkeys(EventKind, (apply,)))
    ledger = open_ledger(projections=[wayward])
    fill(ledger, 3)
    report = verify(url, [wayward])
    assert {finding.check for finding in report.findings} == {"projection"}


def test_a_projection_that_refuses_an_event_of_the_ledger_is_a_finding(
    open_ledger: OpenLedger, url: str, leases: Projection
) -> None:
    lenient = Projection("leases", leases.tables, {})
    ledger = open_ledger(projections=[lenient])
    ledger.submit(lambda draft: draft.append(EventKind.LEASE_GRANT, subject="a", body={"other": 1})).result()
    (finding,) = verify(url, [leases]).findings
    assert finding.check == "projection" and finding.text.startswith("event 1: rejected by leases (KeyError('grants')")


def test_the_number_of_findings_is_bounded(open_ledger: OpenLedger, url: str, leases: Projection) -> None:
    ledger = open_ledger()
    fill(ledger)
    ledger.close()
    with open_unguarded(url) as connection:
        connection.exec_driver_sql("UPDATE event SET time_ms = 5 - seq WHERE seq > 0")
    assert len(verify(url, [leases]).findings) == MAX_FINDINGS


def test_a_ledger_can_be_verified_while_it_is_written(open_ledger: OpenLedger, url: str, leases: Projection) -> None:
    ledger = open_ledger()
    futures = [ledger.submit(decide_one(index, Key.generate())) for index in range(300)]
    reports = [verify(url, [leases]) for _ in range(3)]
    assert [report.findings for report in reports] == [[], [], []]
    futures[-1].result()


def test_a_database_without_a_ledger_is_refused(url: str, leases: Projection) -> None:
    with pytest.raises(ConfigError, match="contains no ledger"):
        verify(url, [leases])


def test_an_empty_ledger_is_found(open_ledger: OpenLedger, url: str, leases: Projection) -> None:
    open_ledger().close()
    with open_unguarded(url) as connection:
        connection.exec_driver_sql("DELETE FROM event")
    (finding,) = verify(url, [leases]).findings
    assert finding.text == "no events: a ledger begins with its genesis"


def test_every_table_of_the_ledger_is_among_those_that_are_tampered_with() -> None:
    state = {table.name for table in STATE_TABLES}  # these are tampered with in audit/test_tampering
    assert set(METADATA.tables) - state - {SCHEMA_VERSION.name} <= set(TABLES)
