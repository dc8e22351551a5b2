"""The tables of drift evidence: weighed in order of index whatever the order of arrival, at a constant cost."""

import random
from itertools import pairwise

import pytest

from shoal.audit.verify import open_scratch
from shoal.coordinator.rules.drift import MAX_BAG
from shoal.coordinator.state import drift, run
from shoal.ledger.db import Sql
from shoal.ledger.event import Event, EventKind, encode_body
from shoal.protocol.events import WatchStart
from shoal.protocol.params import RunParams, dump_params
from shoal.util.canonical import encode_canonical

TABLES = (drift.NUMBERS, drift.BAG, drift.HISTORY, run.RUN_STATE)


@pytest.fixture
def scratch():
    with open_scratch(TABLES) as connection:
        params = encode_canonical(dump_params(RunParams(async_level=1))).decode()
        row = {"run": "demo", "operator": "", "beacon": "", "params": params, "stopped": 0}
        connection.execute(run.RUN_STATE.insert(), [row])
        yield connection


def make_rows(groups, step=1, seed=0, owners=4):
    rng = random.Random(seed)
    return [
        {
            "step": step,
            "position": position,
            "submission": f"s{position}",
            "owner": f"o{rng.randrange(owners)}",
            "author": f"o{rng.randrange(owners)}",
            "version": 0,
            "numbers": f"[{rng.randrange(50)},{rng.randrange(9)},{rng.randrange(1000)}]",
            "drift": "[[0,300000,5,1]]" if position % 2 else "",
        }
        for position in range(groups)
    ]


def cut_step(connection, rows):
    connection.execute(drift.NUMBERS.insert(), rows)
    body = encode_body({"beacon": "", "groups": 1, "hash": "", "step": rows[0]["step"]})
    drift.weigh_step(Event(9, 0, EventKind.BATCH_CUT, "ab" * 32, "", body, b"", bytes(32), bytes(32)), connection)


def read_all(connection):
    return [connection.execute(table.select()).all() for table in (drift.NUMBERS, drift.BAG, drift.HISTORY)]


def watch(connection, owner, seq=5):
    numbers = {"evidence": 1, "groups": 1, "line": 1, "submissions": 3}
    body = WatchStart(because="odd", stream="length", **numbers).to_body()
    event = Event(seq, 0, EventKind.NODE_WATCH, "ab" * 32, owner, encode_body(body), b"", bytes(32), bytes(32))
    drift.set_watch(event, connection)


def test_in_which_order_the_numbers_came_does_not_matter(scratch):
    rows, results = make_rows(40), []
    for order in (rows, rows[::-1]):
        cut_step(scratch, order)
        results.append(read_all(scratch))
        for table in (drift.BAG, drift.HISTORY):
            scratch.execute(table.delete())
    assert results[0] == results[1]
    waiting, bags, owners = results[0]
    assert (waiting, len(bags), len(owners)) == ([], 1, 4)


def test_two_steps_of_a_version_share_its_bag_until_no_step_may_use_it(scratch):
    sizes = []
    for step in (1, 2):
        cut_step(scratch, make_rows(20, step))
        sizes.append([len(row.length) // 8 for row in read_all(scratch)[1]])
    assert sizes == [[20], []], "v0 may be used for steps 1 and 2 if work may be one version old"


def test_a_watched_owner_is_neither_bet_on_nor_in_a_bag(scratch):
    rows = make_rows(40)
    cut_step(scratch, rows)
    watch(scratch, "o1")
    before = drift.find_history(scratch, "o1")
    cut_step(scratch, make_rows(40, step=0))
    assert drift.find_history(scratch, "o1") == before
    (bag,) = read_all(scratch)[1]
    others = sum(row["owner"] != "o1" for row in rows)
    assert len(bag.length) // 8 == 40 + others


def test_an_owner_is_watched_once_at_a_time_and_only_one_that_is_known(scratch):
    cut_step(scratch, make_rows(10))
    watch(scratch, "o1")
    for owner in ("o1", "stranger"):
        with pytest.raises(ValueError, match="already watched, or is not watched"):
            watch(scratch, owner)


def test_a_cut_asks_as_many_questions_for_many_groups_as_for_few(scratch, monkeypatch):
    questions, real = [], Sql.run

    def count(statement, connection, values=None):
        questions[-1] += 1
        return real(statement, connection, values)

    monkeypatch.setattr(Sql, "run", count)
    for groups in (20, 2000):
        questions.append(0)
        cut_step(scratch, make_rows(groups))
    assert all(few == many for few, many in pairwise(questions))
    (bag,) = read_all(scratch)[1]
    assert len(bag.length) // 8 == (2020 - 1) % MAX_BAG + 1
    assert max(len(row.wealth) for row in read_all(scratch)[2]) < 2000
