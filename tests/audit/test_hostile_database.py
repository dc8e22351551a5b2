"""A ledger file from a stranger: whatever is in it, reading it ends, with one sentence, and runs nothing of its own."""

import asyncio
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.audit.database import open_reader, read_range
from shoal.commands.ledger import verify_database
from shoal.coordinator.coordinator import open_run
from shoal.coordinator.state import PROJECTIONS
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger import untrusted
from shoal.ledger.db import BALANCES, open_database, read_snapshot
from shoal.ledger.schema import check_copy
from shoal.ledger.untrusted import open_untrusted
from shoal.protocol.params import RunParams

LIMIT_S = 20.0
"""far below forever, far above what is needed"""
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a run, as one file, with a head over all of it."""
    path = tmp_path_factory.mktemp("honest") / "ledger.db"
    key = Key.generate()
    ledger = open_run(
        str(path), run="demo", key=key, operator=key.public, secret=bytes(32), params=RunParams(), recipe="0" * 64
    )
    asyncio.run(ledger.sign_head())
    ledger.close()
    assert verify_database(str(path)).code == 0
    return path


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(honest, tmp_path / "ledger.db"))


def edit(path: Path, *statements: str) -> None:
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        raw.execute(statement)
    raw.close()


def drop_table(name: str) -> str:
    return f"DROP TABLE {name}"


def refuse(path: Path, match: str) -> None:
    """Both ways to read a ledger end soon, with a sentence."""
    start_s = time.monotonic()
    for read in (lambda: verify_database(str(path)), lambda: read_range(str(path), None, 10)):
        with pytest.raises(ConfigError, match=match):
            read()
    assert time.monotonic() - start_s < LIMIT_S


def try_verify(path: Path) -> tuple[int, str]:
    """Exit code and text of the command."""
    try:
        code, text, _ = verify_database(str(path))
    except ConfigError as error:
        return 2, str(error)
    return code, text


@pytest.mark.parametrize(
    "statements",
    [
        [drop_table("event"), f"CREATE VIEW event AS {ENDLESS} x AS seq, 0, '', '', '', x'', x'', x'', x'' FROM n"],
        [drop_table("head"), f"CREATE VIEW head AS {ENDLESS} x AS size, 0, x'', x'', x'' FROM n"],
        [drop_table("schema_version"), f"CREATE VIEW schema_version AS {ENDLESS} 'chain' AS name, max(x) FROM n"],
        [drop_table("event"), "CREATE TABLE real AS SELECT 1 AS seq", "CREATE VIEW Event AS SELECT * FROM real"],
        [drop_table("event"), "CREATE VIRTUAL TABLE event USING fts5(seq, body)"],
        [
            drop_table("event"),
            "CREATE TABLE event (seq INTEGER PRIMARY KEY, time_ms, kind, actor, subject, signature, prev_hash, hash, "
            "body AS (hex(zeroblob(400000000))))",
            "INSERT INTO event (seq) VALUES (0), (1), (2)",
        ],
        [
            drop_table("merkle_node"),
            "CREATE TABLE merkle_node (level, position, hash AS (zeroblob(500000000)) STORED)",
        ],
    ],
)
def test_what_is_no_plain_table_is_not_read(copy: Path, statements: list[str]) -> None:
    edit(copy, *statements)
    refuse(copy, "is not what shoal creates")


def test_a_view_or_function_is_not_reached_by_any_statement(copy: Path) -> None:
    """Even if a name slipped through: the connection itself reads stored columns of tables and nothing else."""
    edit(copy, f"CREATE VIEW trap AS {ENDLESS} x FROM n", "CREATE VIEW plain AS SELECT seq FROM event")
    engine = open_untrusted(str(copy))
    raw = engine.raw_connection().driver_connection
    assert raw is not None
    for statement in (
        "SELECT * FROM trap",
        "SELECT * FROM plain",
        "ATTACH DATABASE ':memory:' AS other",
        "ATTACH DATABASE '/etc/passwd' AS other",
        "SELECT randomblob(1000000000)",
        "SELECT load_extension('x')",
        "SELECT writefile('x', 'y')",
        f"{ENDLESS} count(*) FROM n",
        "PRAGMA query_only = OFF",
        "PRAGMA writable_schema = ON",
        "PRAGMA journal_mode = DELETE",
        "DELETE FROM balance",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x (y)",
        "CREATE VIRTUAL TABLE temp.x USING fts5(y)",
        "VACUUM INTO 'stolen.db'",
    ):
        with pytest.raises(sqlite3.Error):
            raw.execute(statement).fetchall()
    engine.dispose()


def test_triggers_are_not_run_by_reading(copy: Path) -> None:
    edit(copy, f"CREATE TRIGGER trap AFTER INSERT ON event BEGIN {ENDLESS} count(*) FROM n; END")
    assert verify_database(str(copy)).code == 0


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER trap AFTER INSERT ON event BEGIN DELETE FROM head; END",
        "CREATE TRIGGER Trap AFTER UPDATE ON balance BEGIN SELECT 1; END",
        "CREATE INDEX trap ON event (length(body) * 2)",
        "CREATE UNIQUE INDEX trap ON posting (account)",
    ],
)
def test_a_copy_with_anything_of_someone_else_is_not_written_to(copy: Path, statement: str) -> None:
    def check() -> None:
        with open_reader(str(copy)) as engine, read_snapshot(engine) as connection:
            check_copy(connection, (BALANCES, *PROJECTIONS))

    check()
    edit(copy, statement)
    with pytest.raises(ConfigError, match="is not what shoal creates"):
        check()


@pytest.mark.parametrize("where", ["seq = 0", "seq = (SELECT max(seq) FROM event)"])
def test_a_value_that_no_event_can_have_is_not_loaded(copy: Path, where: str) -> None:
    edit(
        copy,
        *(f"DROP TRIGGER event_no_{verb}" for verb in ("update", "delete", "replace")),
        f"UPDATE event SET body = zeroblob({64 << 20}) WHERE {where}",
    )
    refuse(copy, "too big")


def find_root(path: Path, table: str) -> tuple[int, int]:
    """Size of a page, and the number of a table's first page."""
    raw = sqlite3.connect(path)
    (size,), (root,) = (
        raw.execute("PRAGMA page_size").fetchone(),
        raw.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone(),
    )
    raw.close()
    return size, root


@pytest.mark.parametrize("table", ["event", "head", "schema_version"])
def test_a_small_file_with_endless_rows_ends(
    copy: Path, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interior pages, each of which names the next one hundreds of times: more rows than anyone can read."""
    monkeypatch.setattr(untrusted, "BASE_STEPS", 100_000)
    monkeypatch.setattr(untrusted, "STEPS_PER_BYTE", 1)
    size, root = find_root(copy, table)
    data = bytearray(copy.read_bytes())
    leaf = len(data) // size + 1
    data += data[(root - 1) * size : root * size]  # the table's own rows, at a new page
    children = [leaf]
    for _ in range(8):
        count = (size - 12) // 8
        cells = b"".join(struct.pack(">IB", children[-1], 1) for _ in range(count))
        start = size - len(cells)
        head = struct.pack(">BHHHBI", 5, 0, count, start, 0, children[-1])
        pointers = b"".join(struct.pack(">H", start + 5 * index) for index in range(count))
        page = head + pointers
        page += bytes(start - len(page)) + cells
        assert len(page) == size
        data += page
        children.append(children[-1] + 1)
    data[(root - 1) * size : root * size] = data[-size:]
    data[28:32] = struct.pack(">I", len(data) // size)
    copy.write_bytes(bytes(data))
    start_s = time.monotonic()
    code, text = try_verify(copy)
    assert code != 0 and text
    assert time.monotonic() - start_s < LIMIT_S


def test_a_damaged_file_gives_a_sentence(copy: Path) -> None:
    data = copy.read_bytes()
    for place in range(0, len(data), len(data) // 20):
        damaged = bytearray(data)
        damaged[place : place + 64] = os.urandom(len(damaged[place : place + 64]))
        copy.write_bytes(bytes(damaged))
        start_s = time.monotonic()
        code, text = try_verify(copy)
        assert code < 2 or text.count("\n") == 0
        assert time.monotonic() - start_s < LIMIT_S


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(copy: Path, suffix: str) -> None:
    path = copy.with_name(copy.name + suffix)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refuse(copy, "not a regular file")


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_pipe_beside_the_file_that_a_link_leads_to_is_not_waited_for(copy: Path, suffix: str) -> None:
    """SQLite follows the link before it looks for its other files."""
    os.mkfifo(copy.with_name(copy.name + suffix))
    link = copy.with_name("link.db")
    link.symlink_to(copy.name)
    refuse(link, "not a regular file")


@pytest.mark.parametrize(("suffix", "content"), [("-wal", b"rubbish" * 999), ("-shm", bytes(40000)), ("-wal", b"")])
def test_files_beside_the_database_do_no_harm(copy: Path, suffix: str, content: bytes) -> None:
    copy.with_name(copy.name + suffix).write_bytes(content)
    assert verify_database(str(copy)).code == 0


def test_reading_leaves_the_file_as_it_is(copy: Path) -> None:
    before = copy.read_bytes()
    copy.with_name(f"{copy.name}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(4096))
    code, text = try_verify(copy)
    assert code == 0 or "cannot be read" in text
    assert copy.read_bytes() == before


def test_the_events_of_a_running_coordinator_are_read_from_its_log(tmp_path: Path) -> None:
    """In WAL mode the last events are in a file beside the database."""
    key, url = Key.generate(), str(tmp_path / "ledger.db")
    ledger = open_run(
        url, run="demo", key=key, operator=key.public, secret=bytes(32), params=RunParams(), recipe="0" * 64
    )
    asyncio.run(ledger.sign_head())
    assert (tmp_path / "ledger.db-wal").stat().st_size > 0
    assert verify_database(url).code == 0
    ledger.close()


def test_an_honest_ledger_takes_a_small_part_of_its_steps(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[untrusted._StepBudget] = []

    class Counted(untrusted._StepBudget):
        def __init__(self, max_steps: int) -> None:
            super().__init__(max_steps)
            budgets.append(self)

    monkeypatch.setattr(untrusted, "_StepBudget", Counted)
    assert verify_database(str(honest)).code == 0
    (budget,) = budgets
    size = honest.stat().st_size
    spent = untrusted.BASE_STEPS + untrusted.STEPS_PER_BYTE * size - budget._left
    assert spent < untrusted.BASE_STEPS / 20


def test_a_view_of_a_server_is_not_read(make_database: Callable[[], str]) -> None:
    url = make_database()
    engine = open_database(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE head CASCADE")
        connection.exec_driver_sql("CREATE VIEW head AS SELECT 1 AS size, pg_sleep(1000)::text AS time_ms")
    engine.dispose()
    with pytest.raises(ConfigError, match="head is not a plain table"):
        verify_database(url)
