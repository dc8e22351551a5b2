"""`ledger verify` finds an edit of any row of the state."""

import shutil

import pytest
import sqlalchemy as sa

from shoal.audit.verify import verify_ledger
from shoal.coordinator.state import PROJECTIONS, TABLES
from shoal.ledger.db import open_database
from shoal.protocol.messages import Verdict
from shoal.protocol.params import MILLION

TOLD = {"drift": [(0, 100_000, 60, 1)], "numbers": (500_000, 700_000), "odds": {"int8": (900_000, 500_000, 1000)}}
"""what a validator reports about the work besides its verdict"""


@pytest.fixture
def full_world(make_world):
    """A run in which every table has rows."""
    world = make_world(groups_per_batch=3, appeal_s=1000)
    for node, owner in (("w1", "ann"), ("w2", "bob"), ("w3", "cleo")):
        world.join(node, owner)
    world.publish(0)
    first = world.lease("w1")
    world.submit("w1", first)
    world.judge("judge-a")
    for _ in range(2):
        world.work("w1", **TOLD)
    world.train(1)
    world.wait(world.params.challenge_s)
    world.redeem("ann", 1)
    world.unbond("ann")
    world.work("w1")
    world.convict("w1")
    world.change(second_share=MILLION)
    world.work("w2", **TOLD)
    world.judge("judge-b", **TOLD)
    world.change(second_share=0)
    world.appeal("bob", world.work("w2", Verdict.SOFT))
    world.seal("canary", "spare")
    world.join("c1", "canary")
    world.reveal("canary", world.work("c1", Verdict.SOFT))
    world.submit("w2", world.lease("w2"))
    world.take("judge-b")
    world.wait(world.params.claim_s)
    world.submit("w3", world.lease("w3"), rollouts=world.make_manifest(first).rollouts)
    world.lease("w2")
    return world


def test_every_edited_added_or_removed_row_is_found(full_world, quick_folder):
    world = full_world
    world.coordinator.ledger.close()
    source, copy = world.url.removeprefix("sqlite:///"), quick_folder / "copy.db"
    for make_edit in (edit_row, remove_row):  # in all tables at once: each is compared with its own replay
        shutil.copy(source, copy)
        engine = open_database(f"sqlite:///{copy}")
        with engine.begin() as connection:
            for table in TABLES:
                assert connection.execute(sa.text(make_edit(table))).rowcount == 1, f"{table.name} has no row"
        report = verify_ledger(engine, projections=PROJECTIONS)
        engine.dispose()
        assert {finding.check for finding in report.findings} == {"projection"}
        found = [finding.text.split(" ")[0] for finding in report.findings]
        assert sorted(found) == sorted(table.name for table in TABLES), "one finding for each edit"
    world.reopen()


def remove_row(table):
    return f"DELETE FROM {table.name} WHERE rowid = (SELECT max(rowid) FROM {table.name})"


def edit_row(table):
    """Change the last column of one row."""
    column = list(table.columns)[-1]
    values = {sa.Integer: f"{column.name} + 1", sa.LargeBinary: "x'00'"}
    value = next((value for kind, value in values.items() if isinstance(column.type, kind)), f"{column.name} || 'x'")
    return f"UPDATE {table.name} SET {column.name} = {value} WHERE rowid = (SELECT min(rowid) FROM {table.name})"
