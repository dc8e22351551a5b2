import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.audit.database import prove_event
from shoal.commands.ledger import EXIT_BROKEN, check_proof, load_head, show_events, verify_database
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger.db import Projection, is_sqlite, open_database
from shoal.ledger.event import Event, EventError, EventKind, move_credit, seal_event
from shoal.ledger.head import Head, InclusionProof, sign_head
from shoal.ledger.ledger import Ledger
from shoal.ledger.merkle import hash_leaf, root_leaves

OpenLedger = Callable[..., Ledger]
OWNER = "ab" * 32


@pytest.fixture
def ledger(open_ledger: OpenLedger) -> Ledger:
    """Three events and a head over them; the last one moves two and a half credits."""
    ledger = open_ledger()
    ledger.submit(
        lambda draft: draft.append(EventKind.LEASE_GRANT, subject="lease:1", body={"grants": 1, "t": "\u009b31m"})
    )
    postings = move_credit("mint", f"pending:{OWNER}", 2_500_000)
    ledger.submit(
        lambda draft: draft.append(EventKind.VAL_VERDICT, subject="sub:1", body={}, postings=postings)
    ).result()
    asyncio.run(ledger.sign_head())
    return ledger


def test_verify_says_that_a_ledger_holds(ledger: Ledger, url: str, leases: Projection, key: Key) -> None:
    code, text, _ = verify_database(url, projections=[leases])
    assert code == 0
    assert text.splitlines()[:2] == [
        "ledger of run demo: holds",
        "  3 events, 2 postings, 1 signed head, 2 tables rebuilt",
    ]
    assert key.public in text


def test_verify_names_what_is_broken(ledger: Ledger, url: str, leases: Projection) -> None:
    engine = open_database(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE balance SET amount = amount + 1 WHERE account <> 'mint'")
    engine.dispose()
    code, text, _ = verify_database(url, projections=[leases])
    assert code == EXIT_BROKEN
    assert f"projection: balance 'pending:{OWNER}': amount is 2500001, not 2500000" in text
    assert "BROKEN, 1 finding" in text


def test_verify_compares_with_a_head_that_a_node_holds(
    ledger: Ledger, url: str, leases: Projection, tmp_path: Path
) -> None:
    head = asyncio.run(ledger.sign_head())
    (tmp_path / "head").write_bytes(head.to_bytes())
    assert verify_database(url, held=load_head(tmp_path / "head"), projections=[leases]).code == 0
    (tmp_path / "head").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="malformed signed head"):
        load_head(tmp_path / "head")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_head(tmp_path / "none")


def test_show_lists_the_last_events_one_per_line(ledger: Ledger, url: str) -> None:
    lines = show_events(url, count=2).text.splitlines()
    assert len(lines) == 3 and lines[2] == "3 events"
    assert "lease.grant" in lines[0] and "lease:1" in lines[0]
    assert "val.verdict" in lines[1] and "2.5 credits" in lines[1]
    assert show_events(url, first=0, count=1).text.splitlines()[0].split()[0] == "0"


def test_show_gives_one_event_in_full_by_number_or_hash(ledger: Ledger, url: str) -> None:
    text = show_events(url, event="2").text
    assert f"posting    +2.500000  pending:{OWNER}" in text
    digest = text.split("\nhash       ")[1][:64]
    assert show_events(url, event=digest).text == text


def test_show_sends_nothing_to_the_terminal_that_it_would_obey(ledger: Ledger, url: str) -> None:
    assert "\\u009b31m" in show_events(url, event="1").text
    assert show_events(url, event="1").text.isascii() and show_events(url).text.isascii()


@pytest.mark.parametrize("event", ["9", "x", "-1", "0" * 64, "\u0663", "1" * 30, ""])
def test_an_event_that_does_not_exist_is_named(ledger: Ledger, url: str, event: str) -> None:
    for command in (lambda: show_events(url, event=event), lambda: prove_event(url, event)):
        with pytest.raises(ConfigError, match="no event with this number or hash"):
            command()


def test_a_proof_can_be_checked_with_the_public_key_alone(ledger: Ledger, url: str, key: Key, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    for event in ("0", "1", "2"):
        path.write_text(prove_event(url, event).to_bytes().decode() + "\n")
        code, text, _ = check_proof(path, run="demo", coordinator=key.public)
        assert code == 0 and text.startswith(f"valid: event {event} is in the ledger of run demo")
    assert check_proof(path, run="demo", coordinator=Key.generate().public).code == EXIT_BROKEN
    assert check_proof(path, run="other", coordinator=key.public).code == EXIT_BROKEN


def test_a_changed_proof_proves_nothing(ledger: Ledger, url: str, key: Key) -> None:
    data = prove_event(url, "2").to_bytes()
    value = json.loads(data)
    assert InclusionProof.from_bytes(data).to_bytes() == data
    changes = [
        (name, field)
        for name in ("event", "head")
        for field in (value[name] if name == "event" else value[name]["head"])
    ]
    for name, field in changes:
        changed = json.loads(data)
        part = changed[name] if name == "event" else changed[name]["head"]
        part[field] = change_value(part[field])
        with pytest.raises(EventError):
            check_bytes(json.dumps(changed, sort_keys=True, separators=(",", ":")).encode(), key)
    for path in ([], value["path"][::-1], [*value["path"], "0" * 64], ["x"], "x"):
        if path != value["path"]:
            with pytest.raises(EventError):
                check_bytes(json.dumps(value | {"path": path}, sort_keys=True, separators=(",", ":")).encode(), key)


def change_value(value: object) -> object:
    match value:
        case int():
            return value + 1
        case str():
            return ("1" if value[:1] != "1" else "2") + value[1:]
    return []


def check_bytes(data: bytes, key: Key) -> None:
    InclusionProof.from_bytes(data).check_proof("demo", key.public)


def test_a_coordinator_cannot_prove_a_statement_that_its_actor_did_not_sign(key: Key) -> None:
    for actor in (key.public, Key.generate().public):
        event = seal_event(Event(0, 1, "appeal", actor, "sub:1", b"{}", b"", bytes(32), b""))
        root = root_leaves([hash_leaf(event.hash)]).hex()
        bundle = InclusionProof(event, sign_head(key, Head("demo", 1, root, event.hash.hex(), 1)), ())
        if actor == key.public:
            bundle.check_proof("demo", key.public)
        else:
            with pytest.raises(EventError, match="did not sign"):
                bundle.check_proof("demo", key.public)


def test_an_event_without_a_head_over_it_cannot_be_proved_yet(ledger: Ledger, url: str) -> None:
    ledger.submit(lambda draft: draft.append(EventKind.ADMIN, body={})).result()
    with pytest.raises(ConfigError, match="no signed head covers it yet"):
        prove_event(url, "3")
    asyncio.run(ledger.sign_head())
    assert prove_event(url, "3").event.seq == 3


def test_what_is_no_ledger_is_refused_and_no_file_is_made(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing.db", tmp_path / "other.db"
    other.write_bytes(b"something else " * 100)
    with pytest.raises(ConfigError, match="no such file"):
        verify_database(str(missing))
    assert not missing.exists()
    with pytest.raises(ConfigError, match="cannot be read"):
        show_events(str(other))


def test_a_damaged_ledger_is_named_when_it_is_shown(ledger: Ledger, url: str) -> None:
    edit_row(url, "posting", "line = 7 WHERE line = 1")
    with pytest.raises(ConfigError, match=r"the ledger is corrupt \(posting: line 7 of event 2"):
        show_events(url)
    assert verify_database(url).code == EXIT_BROKEN


@pytest.mark.parametrize("body", [b"nonsense", b"[" * 60_000, b"[]", b"\xff"])
def test_an_invalid_event_body_is_a_one_line_error(ledger: Ledger, url: str, body: bytes) -> None:
    """Tests the first event, which every command reads."""
    edit_row(url, "event", f"body = {quote_bytes(url, body)} WHERE seq = 0")
    for ask in (lambda: show_events(url), lambda: show_events(url, event="0"), lambda: prove_event(url, "1")):
        with pytest.raises(ConfigError, match=r"the ledger is corrupt \(event 0: event body is not"):
            ask()
    assert verify_database(url).code == EXIT_BROKEN


def test_a_time_that_no_calendar_has_is_shown_as_its_number(ledger: Ledger, url: str) -> None:
    edit_row(url, "event", f"time_ms = {2**60} WHERE seq = 1")
    assert f"{2**60} ms" in show_events(url).text and f"time       {2**60} ms" in show_events(url, event="1").text


def test_a_proof_with_a_time_that_no_calendar_has_is_shown(key: Key, tmp_path: Path) -> None:
    event = seal_event(Event(0, 2**60, "admin", key.public, "", b"{}", b"", bytes(32), b""))
    head = Head("demo", 1, root_leaves([hash_leaf(event.hash)]).hex(), event.hash.hex(), 2**60)
    path = tmp_path / "proof"
    path.write_bytes(InclusionProof(event, sign_head(key, head), ()).to_bytes())
    assert f"time       {2**60} ms" in check_proof(path, run="demo", coordinator=key.public).text


def edit_row(url: str, table: str, change: str) -> None:
    """Edit a row, which only someone with access to the database can do."""
    engine = open_database(url)
    with engine.begin() as connection:
        if is_sqlite(engine):
            connection.exec_driver_sql(f"DROP TRIGGER {table}_no_update")
        else:
            connection.exec_driver_sql("SET session_replication_role = replica")
        connection.exec_driver_sql(f"UPDATE {table} SET {change}")
    engine.dispose()


def quote_bytes(url: str, data: bytes) -> str:
    return f"x'{data.hex()}'" if url.startswith("sqlite") else f"decode('{data.hex()}', 'hex')"
