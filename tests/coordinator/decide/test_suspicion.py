"""Owners that use other weights, with evidence too weak for any one submission: convicted by two validators' odds."""

import pytest

from shoal.coordinator.rules.suspicion import LINE
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.suspicion import SuspicionRow, list_proven
from shoal.ledger import db
from shoal.ledger.event import EventKind
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Standing, Verdict

MILLION = 1_000_000
WEAK = {"int8": (30 * MILLION, 100 * MILLION, 300 * MILLION)}
"""one false alarm in 300: nobody is convicted by that alone"""
CLEAN = {"int8": (900_000, 500_000, 1000)}
MUTE = {"int8": (0, 0, 0)}
CALM = {"second_share": 0, "watch_rate": 0, "good_after": 100, "max_pending_per_owner": 64, "groups_per_batch": 64}


@pytest.fixture
def world(make_world):
    world = make_world(**CALM)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    return world


def hand_in(world, node: str, judge: str, odds) -> str:
    submission = world.submit(node, world.lease(node))
    world.judge(judge, odds=odds)
    return submission


def find_standing(world, owner: str) -> str:
    return world.query(lambda connection: find_owner(connection, world.owner_id(owner))).standing


def list_suspicion(world, owner: str) -> list[SuspicionRow]:
    public = world.owner_id(owner)
    return world.query(lambda connection: db.list_rows(connection, SuspicionRow, "WHERE owner = :owner", owner=public))


def list_bans(world) -> list:
    events = world.query(lambda connection: list(read_events(connection, 0, 10**6)))
    return [event for event in events if event.kind == EventKind.BAN]


def test_weak_odds_of_two_validators_convict_within_a_few_submissions_and_the_ledger_verifies(world):
    for number in range(1, 20):
        hand_in(world, "w1", "judge-a" if number % 2 else "judge-b", WEAK)
        if find_standing(world, "ann") == Standing.BANNED:
            break
    assert 4 < number <= 12
    (ban,) = list_bans(world)
    assert ban.content["target"] == world.owner_id("ann")
    assert "closer to int8 weights than to the stated ones" in ban.content["reason"]
    assert world.balance("stake", "ann") == 0
    assert list_suspicion(world, "ann") == []
    assert world.verify().holds


def test_one_validator_alone_convicts_nobody_however_sure_it_is(world):
    for _ in range(8):
        hand_in(world, "w1", "judge-a", {"int8": (10**15,) * 3})
    assert find_standing(world, "ann") != Standing.BANNED
    (row,) = world.query(lambda connection: list_proven(connection, world.owner_id("ann")))
    assert row.evidence >= LINE and row.submissions == 8


def test_a_validator_that_states_no_odds_protects_nobody_from_the_others(world):
    """With three owners of validators, one of which helps the cheat."""
    for number in range(30):
        hand_in(world, "w1", ("judge-a", "judge-b", "judge-c")[number % 3], MUTE if number % 3 == 2 else WEAK)
        if find_standing(world, "ann") == Standing.BANNED:
            break
    assert number < 20


def test_honest_odds_never_add_up(world):
    for number in range(30):
        hand_in(world, "w2", "judge-a" if number % 2 else "judge-b", CLEAN)
    rows = list_suspicion(world, "bob")
    assert len(rows) == 2 and all(row.evidence < 1000 for row in rows)
    assert find_standing(world, "bob") != Standing.BANNED and list_bans(world) == []


def test_odds_belong_to_accepted_work_and_name_a_rival_once(world):
    world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    for statement in (
        world.describe_verdict(job, Verdict.SOFT, odds=WEAK),
        world.describe_verdict(job, odds=WEAK).model_copy(
            update={"odds": world.describe_verdict(job, odds=WEAK).odds * 2}
        ),
    ):
        with pytest.raises(ApiError, match="odds"):
            world.post("judge-a", statement)


def test_an_owner_that_the_operator_unbans_starts_from_zero(world):
    for number in range(20):
        hand_in(world, "w1", "judge-a" if number % 2 else "judge-b", WEAK)
        if find_standing(world, "ann") == Standing.BANNED:
            break
    world.order(Action.UNBAN, target=world.owner_id("ann"), reason="its machine was repaired")
    hand_in(world, "w1", "judge-a", CLEAN)
    assert find_standing(world, "ann") == Standing.PROBATION
