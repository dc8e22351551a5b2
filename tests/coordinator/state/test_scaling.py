"""Queries that run every second or for each request cost the same in a long run with a long queue as in a short one.

Work is counted, not timed: steps of SQLite's machine, rows that PostgreSQL touched. The tables are filled by hand with
far more rows than a query may read.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from shoal.coordinator.cache import LastSeen, RunCache
from shoal.coordinator.decide.context import RunContext
from shoal.coordinator.state import credit, drift, leases, members, queue, run, storage, submissions
from shoal.coordinator.state import credit as redeems
from shoal.coordinator.state.validators import VERDICT
from shoal.coordinator.status import build_status
from shoal.identity.keys import Key
from shoal.ledger.db import Sql, open_database
from shoal.protocol.beacon import BeaconChain
from shoal.protocol.messages import NodeWait
from shoal.protocol.params import RunParams, dump_params
from shoal.util.canonical import encode_canonical
from shoal.util.waits import WaitTable

MANY = 1000
STEPS, ROWS = 3000, 200
"""allowed work; a query that reads everything does many times that"""
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000

Ask = Callable[[sa.Connection], Any]


class Tables:
    """A database to fill and to query."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self._is_changed = False

    def fill(self, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        empty = {column.name: "" if isinstance(column.type, sa.Text) else 0 for column in table.columns}
        self.connection.execute(table.insert(), [{**empty, **row} for row in rows])
        self._is_changed = True

    def ask(self, ask: Ask) -> tuple[Any, int]:
        """The result, and the work in multiples of what is allowed; 1 is too much."""
        if self.connection.dialect.name == "sqlite":
            return self._count_steps(ask)
        if self._is_changed:
            self.connection.execute(
                sa.text("ANALYZE job, lapse, verdict, hold, bond, owner, span, lease, submission, history")
            )
            self._is_changed = False
        return self._count_rows(ask)

    def _count_steps(self, ask: Ask) -> tuple[Any, int]:
        raw: Any = self.connection.connection.driver_connection
        steps = [0]

        def count() -> int:
            steps[0] += 10
            return 0

        raw.set_progress_handler(count, 10)
        try:
            answer = ask(self.connection)
        finally:
            raw.set_progress_handler(None, 0)
        return answer, steps[0] // STEPS

    def _count_rows(self, ask: Ask) -> tuple[Any, int]:
        """Each statement is run, then explained with its actual row counts."""
        statements: list[tuple[str, Any]] = []
        run_one = Sql.run

        def note(statement: Sql, connection: sa.Connection, values: Any = None) -> Any:
            statements.append((statement._choose(connection), values or {}))
            return run_one(statement, connection, values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sql, "run", note)
            answer = ask(self.connection)
        raw: Any = self.connection.connection.driver_connection
        plans = [
            raw.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", values).fetchone()[0] for text, values in statements
        ]
        return answer, round(sum(_sum_rows(plan[0]["Plan"]) for plan in plans)) // ROWS


def _sum_rows(plan: dict[str, Any]) -> float:
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck")
    rows = plan["Actual Loops"] * sum(plan.get(name, 0) for name in names)
    return rows + sum(_sum_rows(child) for child in plan.get("Plans", []))


@pytest.fixture
def tables(url: str) -> Iterator[Tables]:
    engine = open_database(url)
    with engine.connect() as connection:
        yield Tables(connection)
        connection.rollback()
    engine.dispose()


def make_owners(number: int, **values: Any) -> list[dict[str, Any]]:
    return [{"owner": f"o{place:05d}", "standing": "good", **values} for place in range(number)]


def make_jobs(number: int, start: int, **values: Any) -> list[dict[str, Any]]:
    """Jobs of many owners, queued and waiting by default."""
    shared = {"state": "queued", "round": 1, "since_ms": NOW_MS}
    return [
        {
            "submission": f"s{place}",
            "owner": f"o{place % 500:05d}",
            "turn": place % 500,
            "seq": place,
            **shared,
            **values,
        }
        for place in range(start, start + number)
    ]


def fill_queue(tables: Tables) -> None:
    """A queue in which most jobs are not available to the asking validator, for different reasons."""
    tables.fill(members.NODE, [{"node": f"v{place}", "owner": f"judge-{place}"} for place in range(4)])
    rivals = [{"submission": "s-rival", "lease": "l-rival", "state": "received"}]
    tables.fill(submissions.SUBMISSION, rivals)
    mine, theirs = {"round": 2, "judge": "judge-0"}, {"round": 2, "judge": "judge-2"}
    tables.fill(queue.JOB, make_jobs(MANY, 0, state="done", judge="judge-1"))
    tables.fill(queue.JOB, make_jobs(MANY, 10_000, **mine))
    tables.fill(queue.JOB, make_jobs(MANY, 20_000, blocked=1))
    tables.fill(queue.JOB, make_jobs(MANY, 30_000, validator="v1", deadline_ms=NOW_MS + 1, claims=1))
    tables.fill(queue.JOB, make_jobs(8, 40_000, owner="judge-0", turn=0))
    tables.fill(queue.JOB, make_jobs(MANY, 50_000, turn=1000))
    tables.fill(queue.JOB, make_jobs(2, 60_000, turn=900, **theirs))
    verdicts = [{"submission": f"s{10_000 + place}", "round": 1, "validator": "v0"} for place in range(MANY)]
    verdicts += [{"submission": f"s{60_000 + place}", "round": 1, "validator": "v2"} for place in range(2)]
    tables.fill(VERDICT, verdicts)
    tables.fill(queue.LAPSE, [{"submission": "s50000", "owner": "judge-0", "validator": "v0", "round": 1}])


def test_a_claim_looks_at_few_jobs_however_long_the_queue_is(tables: Tables) -> None:
    fill_queue(tables)
    job, work = tables.ask(lambda connection: queue.find_next(connection, "v0", "judge-0", 5))
    assert (job.submission, work) == ("s60000", 0), "its owner was served before those of the fresh ones"
    job, work = tables.ask(lambda connection: queue.find_next(connection, "v2", "judge-2", 5))
    assert (job.submission, work) == ("s10000", 0), "another opinion on a job of another judge"
    assert tables.ask(lambda connection: queue.list_claimed(connection, "v0", NOW_MS)) == ([], 0)


def test_a_second_without_anything_to_do_costs_nothing_with_a_long_queue(tables: Tables) -> None:
    fill_queue(tables)
    assert tables.ask(lambda connection: queue.list_lapsed(connection, NOW_MS, 64)) == ([], 0)
    assert tables.ask(lambda connection: queue.list_waiting(connection, NOW_MS - 1, 5, 64)) == ([], 0)
    lapsed, work = tables.ask(lambda connection: queue.list_lapsed(connection, NOW_MS + 1, 64))
    assert (len(lapsed), work) == (64, 0)
    waiting, work = tables.ask(lambda connection: queue.list_waiting(connection, NOW_MS, 5, 64))
    assert (len(waiting), work) == (64, 0)
    assert tables.ask(queue.oldest_queued) == (NOW_MS, 0)


def test_credit_that_is_held_is_not_looked_at_until_its_time(tables: Tables) -> None:
    params = encode_canonical(dump_params(RunParams(hold_submissions=20))).decode()
    tables.fill(run.RUN_STATE, [{"run": "demo", "params": params}])
    tables.fill(members.OWNER, make_owners(100))
    shared = {"owner": "o00001", "amount": 5, "made_ms": NOW_MS - 2 * DAY_MS}
    for start, state in ((0, "held"), (10_000, "frozen"), (20_000, "released"), (30_000, "burned")):
        tables.fill(credit.HOLD, [{"seq": start + place, **shared, "state": state} for place in range(MANY)])
        tables.fill(credit.BOND, [{"seq": start + place, **shared, "state": state} for place in range(MANY)])
    tables.fill(credit.HOLD, [{"seq": 50_000, **shared, "state": "ready"}])
    tables.fill(credit.BOND, [{"seq": 50_000, **shared, "state": "waiting", "free_ms": NOW_MS}])

    def list_ripe(connection: sa.Connection) -> list[int]:
        times = {"challenged_ms": NOW_MS - DAY_MS, "longest_ms": NOW_MS - 7 * DAY_MS}
        return [hold.seq for hold in credit.list_ripe(connection, **times, most=256)]

    assert tables.ask(list_ripe) == ([50_000], 0)
    free, work = tables.ask(lambda connection: credit.list_free(connection, NOW_MS, 256))
    assert ([bond.seq for bond in free], work) == ([50_000], 0)
    assert tables.ask(lambda connection: credit.list_bonds(connection, "o00002")) == ([], 0)


def test_owners_are_found_by_standing_and_by_rank_without_reading_all(tables: Tables) -> None:
    tables.fill(members.OWNER, make_owners(2 * MANY))
    tables.fill(members.OWNER, [{"owner": "x", "standing": "limited", "since_ms": NOW_MS, "tokens": 7}])
    limited, work = tables.ask(lambda connection: members.list_limited(connection, NOW_MS, 64))
    assert ([row.owner for row in limited], work) == (["x"], 0)
    leaders, work = tables.ask(lambda connection: members.list_leaders(connection, 20))
    assert (leaders[0].owner, len(leaders), work) == ("x", 20, 0)


def test_unusual_and_watched_owners_are_found_without_reading_all_histories(tables: Tables) -> None:
    rows = [{"owner": f"o{place:05d}", "peak": place} for place in range(2 * MANY)]
    tables.fill(drift.HISTORY, [*rows, {"owner": "x", "peak": 5 * MANY}, {"owner": "y", "watch_seq": 7}])
    odd, work = tables.ask(lambda connection: drift.list_odd(connection, 3 * MANY, 64))
    assert ([row.owner for row in odd], work) == (["x"], 0)
    watched, work = tables.ask(lambda connection: drift.list_watched(connection, 8))
    assert ([row.owner for row in watched], work) == (["y"], 0)
    assert tables.ask(drift.count_watched) == (1, 0)
    assert tables.ask(lambda connection: drift.is_watched(connection, "y")) == (True, 0)


def test_a_lease_is_found_without_reading_the_step(tables: Tables) -> None:
    held = {"state": "leased", "fence": 1, "holders": 1, "count": 1}
    for start, values in (
        (0, {"state": "accepted"}),
        (10_000, {"state": "offered", "reserved": "ann", "offered_ms": NOW_MS}),
        (20_000, {**held, "holders": 2}),
    ):
        tables.fill(leases.SPAN, [{"step": 1, "first": start + place, **values} for place in range(MANY)])
    tables.fill(
        leases.SPAN, [{"step": 1, "first": 30_000 + place, **held, "granted_ms": place} for place in range(MANY)]
    )
    active = {"step": 1, "fence": 1, "state": "active", "owner": "bob"}
    tables.fill(
        leases.LEASE,
        [{"lease": f"l{place}", "request_key": f"{place}", "first": 30_000 + place, "granted_ms": place, **active}
         for place in range(MANY)],
    )  # fmt: skip

    assert tables.ask(lambda connection: leases.find_offer(connection, 1, "cleo", NOW_MS - 1)) == (None, 0)
    for owner, until_ms in (("ann", NOW_MS - 1), ("cleo", NOW_MS)):
        asked = partial(leases.find_offer, step=1, owner=owner, until_ms=until_ms)
        offer, work = tables.ask(asked)
        assert (offer.first, work) == (10_000, 0)
    assert tables.ask(lambda connection: leases.oldest_offer(connection, 1)) == (NOW_MS, 0)
    slow, work = tables.ask(lambda connection: leases.find_slowest(connection, 1, "ann"))
    assert (slow.lease, work) == ("l0", 0)
    oldest, work = tables.ask(lambda connection: leases.list_oldest(connection, 1, 8))
    assert ([lease.lease for lease in oldest], work) == ([f"l{place}" for place in range(8)], 0)
    assert tables.ask(lambda connection: leases.list_due(connection, -1, 64)) == ([], 0)


def test_files_that_may_still_be_appealed_are_not_looked_at_again_and_again(tables: Tables) -> None:
    def make(start: int, state: str, decided_ms: int) -> list[dict[str, Any]]:
        names = [(f"s{start + place}", f"l{start + place}", f"b{start + place}") for place in range(MANY)]
        return [
            {"submission": name, "lease": lease, "blob": blob, "state": state, "decided_ms": decided_ms}
            for name, lease, blob in names
        ]

    tables.fill(submissions.SUBMISSION, make(0, "rejected_soft", NOW_MS - 2 * DAY_MS))
    tables.fill(submissions.SUBMISSION, make(10_000, "accepted", NOW_MS))
    tables.fill(submissions.SUBMISSION, make(20_000, "committed", 0))
    tables.fill(storage.OWNER_ROOM, [{"owner": f"{place:064x}", "held": 1, "earned": 1} for place in range(MANY)])
    times = submissions.KeepTimes(NOW_MS, NOW_MS - DAY_MS, NOW_MS - DAY_MS, NOW_MS - 7 * DAY_MS, patience=0)
    assert tables.ask(lambda connection: submissions.list_free_blobs(connection, times, 64)) == ([], 0)
    tables.fill(submissions.SUBMISSION, make(30_000, "superseded", NOW_MS - 2 * DAY_MS)[:1])
    assert tables.ask(lambda connection: submissions.list_free_blobs(connection, times, 64)) == (["b30000"], 0)
    assert tables.ask(lambda connection: submissions.list_unsent(connection, -1, 64)) == ([], 0)


def test_the_status_of_five_thousand_nodes_takes_as_many_questions_as_that_of_five(tables: Tables) -> None:
    """And its answer is as short: it names a few of what waits, and counts the rest."""
    params = encode_canonical(dump_params(RunParams())).decode()
    tables.fill(run.RUN_STATE, [{"run": "demo", "params": params}])
    tables.fill(run.VERSION, [{"version": 0}])
    tables.fill(run.STEP, [{"step": step, "state": "open", "offered": 1, "leased": 1} for step in (1, 2, 3)])
    found = {}
    for number, start in ((5, 0), (5000, 1000)):
        places, held, offers = range(start, start + number), [], []
        names = [f"{place:064x}" for place in places]
        tables.fill(members.OWNER, [{"owner": name, "standing": "good"} for name in names])
        tables.fill(members.NODE, [{"node": name, "owner": name, "scopes": "work"} for name in names])
        for place, name in list(zip(places, names, strict=True))[:2000]:
            held.append({"lease": f"l{place}", "node": name, "owner": name, "request_key": name, "state": "active"})
            held[-1] |= {"step": 1 + place % 3}
            offers.append({"step": 1 + place % 3, "first": place, "state": "offered"})
        tables.fill(leases.LEASE, held)
        tables.fill(leases.SPAN, offers)
        tables.fill(queue.JOB, make_jobs(number // 5, start))
        asked = {"state": "open", "amount": 7}
        tables.fill(redeems.REDEEM, [{**asked, "request": name, "owner": name} for name in names[:100]])
        setting = _prepare_status(tables.connection)
        found[number] = tables.ask(lambda connection, setting=setting: _build_status(connection, setting))
    (few, _), (many, work) = found[5], found[5000]
    assert (many["nodes_live"], many["queue"]) == (5005, 1001)
    assert work <= 15, "no work that grows, except counting the queue, which has a limit"
    assert len(many["waits"]) <= 48 and len(many["text"]) < 40_000
    assert many["questions"] == few["questions"] < 40


def _prepare_status(connection: sa.Connection) -> RunContext:
    """A run in which all nodes wait for something."""
    cache = RunCache(connection, run.read_run(connection))
    wait = NodeWait(name="x" * 80, for_whom="y" * 80, since_ms=NOW_MS, deadline_ms=NOW_MS - 1)
    for node in cache._members:
        cache.seen[node] = LastSeen(NOW_MS, role="worker", wait=wait)
    return RunContext("demo", Key.generate(), BeaconChain(bytes(32), 1), cache)


def _build_status(connection: sa.Connection, setting: RunContext) -> dict[str, Any]:
    book, questions = WaitTable(lambda: NOW_MS), [0]
    real = Sql.run

    def count(statement: Sql, connection: sa.Connection, values: Any = None) -> Any:
        questions[0] += 1
        return real(statement, connection, values)

    with ExitStack() as stack:
        for number in range(100):
            stack.enter_context(book.wait("upload", owner=f"node {number}", waiting_for="a file"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Sql, "run", count)
        status = build_status(connection, setting, book, NOW_MS)
    return {**status.model_dump(), "text": status.model_dump_json(), "questions": questions[0]}


def test_the_next_job_is_the_one_that_a_plain_search_would_find(tables: Tables) -> None:
    """The same rules, implemented again without an index: permissions, waiting, turns."""
    judges = [f"judge-{place}" for place in range(3)]
    tables.fill(members.NODE, [{"node": f"v{place}", "owner": judge} for place, judge in enumerate(judges)])
    for seed in range(25):
        draw = random.Random(seed)
        jobs, verdicts, lapses = _draw_queue(draw, judges)
        for table, rows in ((queue.JOB, jobs), (VERDICT, verdicts), (queue.LAPSE, lapses)):
            tables.connection.execute(table.delete())
            if rows:
                tables.fill(table, rows)
        for place, owner in enumerate(judges):
            found = queue.find_next(tables.connection, f"v{place}", owner, 3)
            judged = {row["submission"] for row in verdicts if row["validator"] == f"v{place}"}
            lapsed = {row["submission"] for row in lapses if row["owner"] == owner}
            ranked = sorted(
                (job["submission"] in lapsed, job["turn"], job["seq"], job["submission"])
                for job in jobs
                if job["state"] == "queued" and not job["validator"] and not job["blocked"] and job["owner"] != owner
                if job["submission"] not in judged and (job["submission"] not in lapsed or job["claims"] < 3)
            )
            assert (found and found.submission) == (ranked[0][3] if ranked else None), (seed, owner)


def _draw_queue(draw: random.Random, judges: list[str]) -> tuple[list[Any], list[Any], list[Any]]:
    jobs, verdicts, lapses = [], [], []
    for number in range(draw.randint(0, 8)):
        name = f"s{number}"
        seen = draw.sample(range(3), draw.choice([0, 0, 1, 2]))
        verdicts += [{"submission": name, "round": turn + 1, "validator": f"v{who}"} for turn, who in enumerate(seen)]
        lapses += [
            {"submission": name, "owner": judge, "round": len(seen) + 1, "validator": f"v{place}"}
            for place, judge in enumerate(judges)
            if draw.random() < 0.3
        ]
        job = {"submission": name, "owner": draw.choice([*judges, "ann", "bob"]), "round": len(seen) + 1, "seq": number}
        job |= {"state": draw.choice(["queued"] * 4 + ["done"]), "validator": draw.choice(["", "", "", "v9"])}
        job |= {"turn": draw.randint(0, 3), "blocked": int(draw.random() < 0.2), "claims": draw.randint(0, 4)}
        jobs.append(job | {"judge": judges[seen[-1]] if seen else ""})
    return jobs, verdicts, lapses
