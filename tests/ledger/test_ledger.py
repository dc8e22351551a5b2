import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import sqlalchemy as sa

from shoal.errors import ConfigError, UnavailableError
from shoal.identity.keys import Key
from shoal.ledger.db import is_sqlite, open_database, read_balances
from shoal.ledger.event import (
    GENESIS_PREV,
    Event,
    EventError,
    EventKind,
    Posting,
    PostingError,
    move_credit,
    sign_statement,
)
from shoal.ledger.ledger import HEAD_EVERY, MAX_WAITING, Ledger, LedgerTransaction, WriterBusyError, WriterStoppedError
from shoal.ledger.merkle import hash_leaf, verify_consistency, verify_inclusion
from shoal.ledger.reader import RowError, read_event, read_events

OWNER = "ab" * 32
PENDING, AVAIL = f"pending:{OWNER}", f"avail:{OWNER}"

OpenLedger = Callable[..., Ledger]


def grant(name: str, grants: int = 1) -> Callable[[LedgerTransaction], Event]:
    return lambda draft: draft.append(EventKind.LEASE_GRANT, subject=name, body={"grants": grants})


def pay(amount: int, source: str = "mint", target: str = PENDING) -> Callable[[LedgerTransaction], Event]:
    return lambda draft: draft.append(
        EventKind.CREDIT_POST, body={"why": "test"}, postings=move_credit(source, target, amount)
    )


def read_all(ledger: Ledger) -> list[Event]:
    with ledger.read() as connection:
        return list(read_events(connection, 0, 1 << 40))


def read_leases(ledger: Ledger) -> dict[str, int]:
    with ledger.read() as connection:
        return {row.name: row.grants for row in connection.execute(sa.text("SELECT name, grants FROM test_lease"))}


def test_a_ledger_begins_with_its_run_and_its_coordinator(open_ledger: OpenLedger, key: Key) -> None:
    ledger = open_ledger(genesis={"k": 2})
    (genesis,) = read_all(ledger)
    assert (genesis.seq, genesis.kind, genesis.prev_hash) == (0, "genesis", GENESIS_PREV)
    assert genesis.content == {"coordinator": key.public, "k": 2, "run": "demo"}


def test_events_form_a_chain_with_their_postings(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    returned = [ledger.submit(decide).result() for decide in (grant("a"), pay(5), grant("b"), pay(2, PENDING, AVAIL))]
    events = read_all(ledger)
    assert events[1:] == returned
    assert [event.seq for event in events] == list(range(5))
    assert all(event.prev_hash == before.hash for before, event in pairwise(events))
    assert events[2].postings == (Posting("mint", -5), Posting(PENDING, 5))
    with ledger.read() as connection:
        assert read_balances(connection, ["mint", PENDING, AVAIL, "burn"]) == {
            "mint": -5,
            PENDING: 3,
            AVAIL: 2,
            "burn": 0,
        }


def test_a_ledger_continues_after_a_restart(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    for index in range(300):
        ledger.submit(grant(f"l{index}"))
    ledger.close()
    ledger = open_ledger()
    assert ledger.size == 301
    event = ledger.submit(grant("last")).result()
    events = read_all(ledger)
    assert event.seq == 301 and event.prev_hash == events[300].hash
    assert ledger.head is not None and HEAD_EVERY <= ledger.head.head.size <= 301


def test_a_decision_is_there_whole_or_not_at_all(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()

    def half(draft: LedgerTransaction) -> None:
        draft.append(EventKind.LEASE_GRANT, subject="half", body={"grants": 1})
        draft.append(EventKind.CREDIT_POST, body={}, postings=move_credit("mint", PENDING, 5))
        raise RuntimeError("second thoughts")

    with pytest.raises(RuntimeError, match="second thoughts"):
        ledger.submit(half).result()
    assert ledger.submit(grant("whole")).result().seq == 1
    assert [event.subject for event in read_all(ledger)] == ["demo", "whole"]
    assert read_leases(ledger) == {"whole": 1}
    with ledger.read() as connection:
        assert read_balances(connection, [PENDING]) == {PENDING: 0}


def hold_writer(ledger: Ledger) -> threading.Event:
    """Keep the writer in one decision, so that what is submitted meanwhile forms one group."""
    begun, go = threading.Event(), threading.Event()

    def wait(draft: LedgerTransaction) -> None:
        begun.set()
        assert go.wait(300)

    ledger.submit(wait)
    assert begun.wait(30)
    return go


def test_a_failing_decision_does_not_hurt_the_others_of_its_group(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()

    def violate(draft: LedgerTransaction) -> None:
        draft.append(EventKind.LEASE_GRANT, subject="bad", body={"grants": 1})
        draft.connection.execute(sa.text("INSERT INTO test_lease VALUES ('bad', 1, '')"))

    def overdraw(draft: LedgerTransaction) -> None:
        draft.append(EventKind.LEASE_GRANT, subject="over", body={"grants": 1})
        pay(1, AVAIL, "burn")(draft)

    go = hold_writer(ledger)
    decisions = [grant("a"), violate, pay(3), overdraw, grant("b"), lambda draft: 1 / 0, grant("a")]
    futures = [ledger.submit(decide) for decide in decisions]
    go.set()
    errors = [future.exception() for future in futures]
    assert [type(error) for error in errors if error is not None] == [
        sa.exc.IntegrityError,
        PostingError,
        ZeroDivisionError,
    ]
    assert [error is None for error in errors] == [True, False, True, False, True, False, True]
    assert [event.subject for event in read_all(ledger)] == ["demo", "a", "", "b", "a"]
    assert [future.result().seq for future in futures if not future.exception()] == [1, 2, 3, 4]
    assert read_leases(ledger) == {"a": 2, "b": 1}


def test_a_decision_sees_what_the_ones_before_it_in_its_group_did(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()

    def spend(draft: LedgerTransaction) -> int:
        held = read_balances(draft.connection, [PENDING])[PENDING]
        if held < 5:
            raise PostingError("too low")
        pay(5, PENDING, "burn")(draft)
        return held

    go = hold_writer(ledger)
    futures = [ledger.submit(pay(12)), *(ledger.submit(spend) for _ in range(4))]
    go.set()
    assert [future.result() for future in futures[1:3]] == [12, 7]
    assert all(isinstance(future.exception(), PostingError) for future in futures[3:])


def test_a_hundred_parallel_payments_of_one_balance_pay_it_out_once(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    ledger.submit(pay(7, "mint", AVAIL)).result()

    async def redeem_all() -> list[Event | BaseException]:
        tasks = [ledger.transact(pay(7, AVAIL, "redeemed")) for _ in range(100)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(redeem_all())
    assert sum(isinstance(result, Event) for result in results) == 1
    assert sum(isinstance(result, PostingError) for result in results) == 99


def test_an_answer_comes_after_the_commit(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()

    async def append_and_look() -> list[bool]:
        async def one(index: int) -> bool:
            event = await ledger.transact(grant(f"l{index}"))
            with ledger.read() as connection:
                return read_event(connection, event.seq) == event

        return await asyncio.gather(*(one(index) for index in range(50)))

    assert all(asyncio.run(append_and_look()))


def test_a_decision_that_was_given_up_before_its_turn_is_never_run(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    go = hold_writer(ledger)
    given_up, kept = ledger.submit(grant("given-up")), ledger.submit(grant("kept"))
    assert given_up.cancel()
    go.set()
    kept.result()
    assert read_leases(ledger) == {"kept": 1}


def test_a_coroutine_is_no_decision(open_ledger: OpenLedger) -> None:
    async def decide(draft: LedgerTransaction) -> None:
        draft.append(EventKind.LEASE_GRANT, body={})

    ledger = open_ledger()
    with pytest.raises(TypeError, match="plain function"):
        ledger.submit(decide).result()
    assert ledger.size == 1


def test_more_decisions_than_may_wait_are_refused(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    go = hold_writer(ledger)
    for _ in range(MAX_WAITING):
        ledger.submit(lambda draft: None)
    with pytest.raises(WriterBusyError, match="already waiting for the ledger"):
        ledger.submit(lambda draft: None)
    go.set()
    ledger.close()


def test_closing_finishes_what_was_submitted_and_refuses_the_rest(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    futures = [ledger.submit(grant(f"l{index}")) for index in range(200)]
    ledger.close()
    assert [future.result().seq for future in futures] == list(range(1, 201))
    with pytest.raises(WriterStoppedError, match="closed"):
        ledger.submit(grant("late"))


def test_a_failed_commit_stops_the_ledger_and_all_callers_get_the_error(open_ledger: OpenLedger, url: str) -> None:
    ledger = open_ledger()

    def break_off(draft: LedgerTransaction) -> None:
        if is_sqlite(draft.connection):
            draft.connection.exec_driver_sql("ROLLBACK")
        else:
            with open_database(url).connect() as other:
                pid = draft.connection.execute(sa.text("SELECT pg_backend_pid()")).scalar()
                other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    go = hold_writer(ledger)
    futures = [ledger.submit(grant("lost")), ledger.submit(break_off), ledger.submit(grant("lost"))]
    go.set()
    for future in futures:
        with pytest.raises(WriterStoppedError, match="the database failed"):
            future.result()
    with pytest.raises(WriterStoppedError, match="the database failed"):
        ledger.submit(grant("later"))
    ledger.close()
    assert read_leases(open_ledger()) == {}


def test_a_database_locked_by_another_process_is_busy_and_the_ledger_continues(
    open_ledger: OpenLedger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.ledger.db.WAIT_S", 0)
    ledger = open_ledger()
    other = open_database(url)
    if not is_sqlite(other):
        pytest.skip("PostgreSQL has no lock on the whole database")
    with other.begin(), pytest.raises(WriterBusyError, match="not writable now"):
        ledger.submit(grant("a")).result()
    other.dispose()
    assert ledger.submit(grant("b")).result().seq == 1


def test_a_second_writer_is_refused_with_a_sentence(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    with pytest.raises(UnavailableError, match="another process is writing to this ledger"):
        open_ledger(lock_wait_s=0)
    ledger.close()
    open_ledger(lock_wait_s=0)


@pytest.mark.parametrize("changes", [{"run": "other"}, {"key": Key.generate()}])
def test_the_ledger_of_another_run_or_coordinator_is_refused(
    open_ledger: OpenLedger, changes: dict[str, object]
) -> None:
    open_ledger().close()
    with pytest.raises(ConfigError, match="a different run or coordinator"):
        open_ledger(**changes)
    open_ledger()


def test_a_genesis_that_cannot_be_written_leaves_the_lock_free(open_ledger: OpenLedger) -> None:
    with pytest.raises(EventError, match="canonical"):
        open_ledger(genesis={"rate": 0.5})
    assert open_ledger(lock_wait_s=0).size == 1


def test_times_never_go_back(open_ledger: OpenLedger) -> None:
    ticks = iter([1000, 2000, 500, 600, 3000, *[100] * 10])
    ledger = open_ledger(clock=lambda: next(ticks))
    times = [ledger.submit(grant("a")).result().time_ms for _ in range(4)]
    assert times == [2000, 2000, 2000, 3000]
    ledger.close()
    assert open_ledger(clock=lambda: 5).submit(grant("a")).result().time_ms == 3000


def test_no_event_is_earlier_than_a_head_that_was_signed_before_it(open_ledger: OpenLedger) -> None:
    ticks = iter([1000, 5000, *[100] * 10])
    ledger = open_ledger(clock=lambda: next(ticks))
    assert asyncio.run(ledger.sign_head()).head.time_ms == 5000
    ledger.close()
    assert open_ledger(clock=lambda: 5).submit(grant("a")).result().time_ms == 5000


def test_a_signed_statement_is_recorded_under_its_signer(open_ledger: OpenLedger) -> None:
    worker = Key.generate()
    ledger = open_ledger()
    statement = sign_statement(worker, "demo", EventKind.SUB_COMMIT, "lease:1", {"root": "ab"})
    event = ledger.submit(lambda draft: draft.record(statement)).result()
    assert (event.actor, event.signature) == (worker.public, statement.signature)
    other = sign_statement(worker, "other", EventKind.SUB_COMMIT, "lease:1", {"root": "ab"})
    with pytest.raises(EventError, match="different run: other"):
        ledger.submit(lambda draft: draft.record(other)).result()


@pytest.mark.parametrize(
    ("decide", "error"),
    [
        (lambda draft: draft.append(EventKind.LEASE_GRANT, subject="A", body={"grants": 1}), EventError),
        (lambda draft: draft.append(EventKind.LEASE_GRANT, body={"grants": 1.5}), EventError),
        (
            lambda draft: draft.append(
                EventKind.LEASE_GRANT, body={"grants": 1}, postings=move_credit("mint", AVAIL, 1)
            ),
            EventError,
        ),
        (lambda draft: draft.append(EventKind.CREDIT_POST, body={}, postings=[Posting("mint", -1)]), PostingError),
        (pay((1 << 63) - 1, "treasury", AVAIL), PostingError),
    ],
)
def test_what_verification_would_refuse_is_never_appended(
    open_ledger: OpenLedger, decide: Callable[[LedgerTransaction], Event], error: type[Exception]
) -> None:
    ledger = open_ledger()
    with pytest.raises(error):
        ledger.submit(decide).result()
    assert ledger.size == 1


def test_a_balance_never_leaves_the_range_of_integers(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    ledger.submit(pay((1 << 63) - 1)).result()
    with pytest.raises(PostingError, match="2\\*\\*63"):
        ledger.submit(pay(1)).result()


def test_a_head_is_signed_every_so_many_events_and_when_asked(open_ledger: OpenLedger, key: Key) -> None:
    ledger = open_ledger()
    assert ledger.head is None
    first = asyncio.run(ledger.sign_head())
    assert first.head.size == 1 and asyncio.run(ledger.sign_head()) == first
    for _ in range(HEAD_EVERY):
        last = ledger.submit(grant("a"))
    last.result()
    assert ledger.head is not None and ledger.head.head.size >= HEAD_EVERY
    head = asyncio.run(ledger.sign_head())
    head.check_signed("demo", key.public)
    assert head == ledger.head and head.head.last_hash == last.result().hash.hex()
    proof = ledger.prove_extension(first.head.size, head.head.size)
    roots = bytes.fromhex(first.head.root), bytes.fromhex(head.head.root)
    assert verify_consistency(first.head.size, roots[0], head.head.size, roots[1], proof)


def test_every_event_can_be_proved_in_every_later_ledger(open_ledger: OpenLedger) -> None:
    """Over 600 events, so that stored nodes, full tiles and a part of one are all used."""
    ledger = open_ledger()
    heads = {}
    for size in (255, 256, 257, 511, 513, 600):
        futures = [ledger.submit(grant(f"l{index}")) for index in range(ledger.size, size)]
        futures[-1].result()
        heads[size] = asyncio.run(ledger.sign_head()).head
    events = read_all(ledger)
    for size, head in heads.items():
        root = bytes.fromhex(head.root)
        for seq in {0, 1, 254, 255, 256, 510, 512, size - 1} & set(range(size)):
            leaf = hash_leaf(events[seq].hash)
            assert verify_inclusion(leaf, seq, size, ledger.prove_event(seq, size), root)
        for old, before in heads.items():
            if old <= size:
                proof = ledger.prove_extension(old, size)
                assert verify_consistency(old, bytes.fromhex(before.root), size, root, proof)


def test_proofs_about_what_is_not_there_are_refused(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    for seq, size in ((1, 1), (0, 2), (-1, 1)):
        with pytest.raises(EventError):
            ledger.prove_event(seq, size)
    for old, new in ((2, 1), (0, 2), (-1, 1)):
        with pytest.raises(EventError):
            ledger.prove_extension(old, new)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE event SET body = '{}' WHERE seq = 3",
        "DELETE FROM event WHERE seq = 0",
        "UPDATE head SET time_ms = 5",
        "UPDATE event SET hash = signature WHERE seq = 1",
        "DELETE FROM event WHERE seq = 2",
    ],
)
def test_a_ledger_that_was_damaged_is_not_opened(open_ledger: OpenLedger, url: str, damage: str) -> None:
    ledger = open_ledger()
    for _ in range(3):
        ledger.submit(grant("a")).result()
    asyncio.run(ledger.sign_head())
    ledger.close()
    damage_database(url, damage)
    with pytest.raises(ConfigError, match="the ledger is corrupt"):
        open_ledger()


def damage_database(url: str, command: str) -> None:
    """Change a database behind its guards."""
    engine = open_database(url)
    with engine.begin() as connection:
        if is_sqlite(engine):
            for name in connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")).scalars():
                connection.exec_driver_sql(f"DROP TRIGGER {name}")
            command = command.replace("'{}'", "X'7b7d'")
        else:
            connection.exec_driver_sql("SET session_replication_role = replica")
        connection.exec_driver_sql(command)
    engine.dispose()


def test_a_gap_in_the_events_is_named_when_it_is_read(open_ledger: OpenLedger, url: str) -> None:
    ledger = open_ledger()
    for _ in range(5):
        ledger.submit(grant("a")).result()
    damage_database(url, "DELETE FROM event WHERE seq = 2")
    with pytest.raises(RowError, match="number 2 is missing"):
        ledger.prove_event(4, 6)
