"""A ledger holds only if the coordinator signed all of it, up to the last event."""

import asyncio
import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.commands.ledger import verify_database
from shoal.coordinator.coordinator import open_run
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger.db import open_database, read_snapshot
from shoal.ledger.event import EventKind
from shoal.ledger.head import Head, SignedHead, sign_head
from shoal.ledger.ledger import Ledger, _head_row
from shoal.ledger.reader import read_event, read_newest_head
from shoal.protocol.descriptor import Descriptor
from shoal.protocol.params import RunParams

KEY, FORGER = Key.generate(), Key.generate()


def open_demo(path: Path, key: Key = KEY, run: str = "demo") -> Ledger:
    return open_run(
        str(path), run=run, key=key, operator=KEY.public, secret=bytes(32), params=RunParams(), recipe="0" * 64
    )


def append(ledger: Ledger, count: int = 3) -> None:
    """Harmless events of the coordinator, which carry no signature of their own."""
    for _ in range(count):
        ledger.submit(lambda draft: draft.append(EventKind.COORDINATOR_UP, body={"shift_ms": 0})).result()


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """A ledger that ends with a head."""
    ledger = open_demo(tmp_path / "ledger.db")
    append(ledger)
    asyncio.run(ledger.sign_head())
    ledger.close()
    assert verify_database(str(tmp_path / "ledger.db"), expected=KEY.public).code == 0
    return tmp_path / "ledger.db"


def edit(path: Path, *statements: str, rows: tuple[dict[str, object], ...] = ()) -> None:
    raw = sqlite3.connect(path, isolation_level=None)
    for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        raw.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        raw.execute(statement)
    for row in rows:
        raw.execute("INSERT INTO head VALUES (:size, :time_ms, :root, :last_hash, :signature)", row)
    raw.close()


def read_head(path: Path) -> SignedHead:
    engine = open_database(str(path))
    with read_snapshot(engine) as connection:
        head = read_newest_head(connection, "demo")
    engine.dispose()
    assert head is not None
    return head


def refuse(path: Path, match: str, **options: object) -> None:
    code, text, data = verify_database(str(path), **{"expected": KEY.public, **options})  # type: ignore[arg-type]
    assert code == 1 and match in text and not data["holds"] and data["problem"]
    assert ": holds" not in text


def test_a_ledger_without_heads_does_not_hold(ledger_file: Path) -> None:
    edit(ledger_file, "DELETE FROM head")
    refuse(ledger_file, "no head signed by the coordinator covers events 0 to 3")


def test_a_ledger_that_the_coordinator_never_saw_does_not_hold(tmp_path: Path) -> None:
    """The same events under another key, with heads and all."""
    ledger = open_demo(tmp_path / "forged.db", FORGER)
    append(ledger)
    asyncio.run(ledger.sign_head())
    ledger.close()
    assert verify_database(str(tmp_path / "forged.db"), expected=FORGER.public).code == 0
    refuse(tmp_path / "forged.db", f"coordinator: signed by {FORGER.public}, expected {KEY.public}")


def test_events_after_the_last_head_are_covered_by_nothing(ledger_file: Path) -> None:
    ledger = open_demo(ledger_file)
    append(ledger, 2)
    ledger.close()
    refuse(ledger_file, "no head signed by the coordinator covers events 4 to 5")


def test_a_head_of_a_node_covers_them_too(ledger_file: Path) -> None:
    head = read_head(ledger_file)
    edit(ledger_file, "DELETE FROM head")
    assert verify_database(str(ledger_file), expected=KEY.public, held=head).code == 0


def test_a_head_of_another_ledger_is_a_mistake_and_no_finding(ledger_file: Path) -> None:
    head = read_head(ledger_file).head
    other = sign_head(KEY, Head("other", 99, head.root, head.last_hash, head.time_ms))
    with pytest.raises(ConfigError, match="--head: it belongs to run other, this ledger to run demo"):
        verify_database(str(ledger_file), held=other)
    for held in (SignedHead(head, bytes(64)), sign_head(FORGER, replace(head, size=99))):
        with pytest.raises(ConfigError, match=f"--head: not signed by {KEY.public}, the coordinator of this ledger"):
            verify_database(str(ledger_file), held=held)


@pytest.mark.parametrize(
    ("key", "run", "match"),
    [(FORGER, "demo", "not signed by this run's coordinator"), (KEY, "other", "not signed by this run's coordinator")],
)
def test_a_head_of_another_key_or_run_covers_nothing(ledger_file: Path, key: Key, run: str, match: str) -> None:
    head = read_head(ledger_file).head
    other = sign_head(key, Head(run, head.size, head.root, head.last_hash, head.time_ms))
    edit(ledger_file, "DELETE FROM head", rows=(_head_row(other),))
    refuse(ledger_file, match)


@pytest.mark.parametrize("change", [{"root": "ab" * 32}, {"last_hash": "ab" * 32}])
def test_a_head_over_other_events_covers_nothing(ledger_file: Path, change: dict[str, str]) -> None:
    head = read_head(ledger_file).head
    values = {"root": head.root, "last_hash": head.last_hash, **change}
    other = sign_head(KEY, Head("demo", head.size, values["root"], values["last_hash"], head.time_ms))
    edit(ledger_file, "DELETE FROM head", rows=(_head_row(other),))
    refuse(ledger_file, "signed over different events" if "root" in change else "names a different last event")


def test_a_head_of_a_longer_ledger_shows_that_the_end_is_missing(ledger_file: Path, tmp_path: Path) -> None:
    short = Path(shutil.copy(ledger_file, tmp_path / "short.db"))
    ledger = open_demo(ledger_file)
    append(ledger)
    head = asyncio.run(ledger.sign_head())
    ledger.close()
    edit(short, rows=(_head_row(head),))
    refuse(short, "a head was signed over 7 events, but there are 4")
    edit(short, "DELETE FROM head WHERE size = 7")
    refuse(short, "a head was signed over 7 events, but there are 4", held=head)


def test_the_genesis_is_compared_with_the_descriptor(ledger_file: Path) -> None:
    engine = open_database(str(ledger_file))
    with read_snapshot(engine) as connection:
        genesis = read_event(connection, 0)
    engine.dispose()
    assert genesis is not None
    right = {
        "run": "demo",
        "coordinator": KEY.public,
        "operator": KEY.public,
        "urls": ("http://127.0.0.1:1",),
        "genesis": genesis.hash.hex(),
        "tasks": "0" * 64,
    }
    assert verify_database(str(ledger_file), descriptor=Descriptor(**right)).code == 0  # type: ignore[arg-type]
    wrong = {"run": "other", "coordinator": FORGER.public, "operator": FORGER.public}
    wrong |= {"genesis": "ab" * 32, "tasks": "ab" * 32}
    for name, value in wrong.items():
        refuse(ledger_file, f"the genesis has {name}", descriptor=Descriptor(**{**right, name: value}))  # type: ignore[arg-type]


def test_the_command_compares_a_folder_with_its_descriptor(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.cli import main
    from shoal.identity.documents import Tag, sign_document

    body = {"run": "demo", "coordinator": KEY.public, "operator": KEY.public, "urls": ["http://127.0.0.1:1"]}
    body |= {"genesis": "ab" * 32, "params": "", "publisher": "", "relays": [], "model": "", "tasks": "", "stores": []}
    document = sign_document(KEY, Tag.DESCRIPTOR, {**body, "format": 1})
    (ledger_file.parent / "descriptor.json").write_bytes(document)
    assert main(["ledger", "verify", str(ledger_file.parent), "--json"]) == 1
    assert "the genesis has genesis" in json.loads(capsys.readouterr().out)["problem"]
    assert main(["ledger", "verify", str(ledger_file)]) == 0
    path = str(ledger_file.parent / "descriptor.json")
    assert main(["ledger", "verify", str(ledger_file), "--descriptor", path]) == 1
