"""kill -9 of a process that appends: everything that was answered is stored, and nothing is stored partially."""

import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from shoal.audit.verify import verify_ledger
from shoal.identity.keys import Key
from shoal.ledger.db import Projection, open_database, read_balances
from shoal.ledger.ledger import Ledger
from shoal.ledger.reader import read_events

OWNER = "ab" * 32
ROUNDS = 3
WRITER = """
    import asyncio, sys
    from pathlib import Path
    import sqlalchemy as sa
    from shoal.identity.keys import Key
    from shoal.ledger.db import INT64
    from shoal.ledger.event import EventKind
    from shoal.ledger.ledger import Ledger
    from shoal.ledger.event import move_credit
    from shoal.ledger.db import Projection

    url, key_path, owner, round = sys.argv[1:]

    def apply_lease(event, connection):
        if event.kind == EventKind.LEASE_GRANT:
            row = {"name": event.subject, "hash": event.hash}
            connection.execute(sa.text("INSERT INTO test_lease VALUES (:name, 1, :hash)"), row)

    def decide(name):
        def run(draft):
            draft.append(EventKind.LEASE_GRANT, subject=name, body={"grants": 1})
            postings = move_credit("mint", f"pending:{owner}", 10)
            draft.append(EventKind.VAL_VERDICT, subject=name, body={}, postings=postings)
        return run

    async def work(ledger, worker):
        for number in range(100_000):
            name = f"r{round}/w{worker}/n{number}"
            await ledger.transact(decide(name))
            print(name, flush=True)

    async def main():
        columns = sa.Column("grants", INT64, nullable=False), sa.Column("last_hash", sa.LargeBinary, nullable=False)
        table = sa.Table("test_lease", sa.MetaData(), sa.Column("name", sa.Text, primary_key=True), *columns)
        leases = Projection("leases", (table,), {EventKind.LEASE_GRANT: (apply_lease,)})
        ledger = Ledger.open(url, run="demo", key=Key.load(Path(key_path)), projections=[leases], lock_wait_s=10)
        await asyncio.gather(*(work(ledger, worker) for worker in range(16)))

    asyncio.run(main())
"""


def append_until_killed(url: str, key_path: Path, number: int, answers: int) -> list[str]:
    """Start a writer, kill it after some answers, and return all the answers that it gave."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), url, str(key_path), OWNER, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(answers)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert all(lines[:answers]), "the writer ended unexpectedly"
    return [line.strip() for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("seed", [1])
def test_a_killed_writer_loses_nothing_it_answered_and_leaves_nothing_half(
    open_ledger: Callable[..., Ledger], url: str, key: Key, tmp_path: Path, leases: Projection, seed: int
) -> None:
    open_ledger().close()
    key.save(tmp_path / "key")
    generator = random.Random(seed)
    answered: list[str] = []
    for number in range(ROUNDS):
        answered += append_until_killed(url, tmp_path / "key", number, generator.randrange(1, 150))
    ledger = open_ledger(lock_wait_s=10)
    engine = open_database(url)
    assert verify_ledger(engine, projections=[leases]).findings == []
    engine.dispose()
    with ledger.read() as connection:
        events = list(read_events(connection, 1, 1 << 40))
        names = set(connection.execute(sa.text("SELECT name FROM test_lease")).scalars())
        balance = read_balances(connection, [f"pending:{OWNER}"])[f"pending:{OWNER}"]
    kinds = [(event.subject, event.kind) for event in events]
    assert kinds[::2] == [(name, "lease.grant") for name, _ in kinds[1::2]]
    assert [kind for _, kind in kinds[1::2]] == ["val.verdict"] * (len(kinds) // 2)
    assert set(answered) <= names == {name for name, _ in kinds}
    assert balance == 10 * len(names) == 5 * len(events)
