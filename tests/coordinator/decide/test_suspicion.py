"""Owners that use other weights, with evidence too weak for any one submission: convicted by two validators' odds."""

import re

import pytest

from shoal.coordinator.rules.suspicion import LINE
from shoal.coordinator.state.credit import find_appeal
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.coordinator.state.suspicion import SuspicionRow, list_proven
from shoal.coordinator.state.validators import find_validator
from shoal.identity.delegation import Scope
from shoal.ledger import db
from shoal.ledger.event import EventKind
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Standing, SubmissionState, Verdict

MILLION = 1_000_000
WEAK = {"int8": (30 * MILLION, 100 * MILLION, 300 * MILLION)}
"""one false alarm in 300: nobody is convicted by that alone"""
CLEAN = {"int8": (900_000, 500_000, 1000)}
MUTE = {"int8": (0, 0, 0)}
DATABASES = ("sqlite", "postgresql")
CALM = {"second_share": 0, "watch_rate": 0, "good_after": 100, "max_pending_per_owner": 64, "groups_per_batch": 64}


@pytest.fixture
def world(make_world):
    world = make_world(**CALM)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    return world


def appoint(world, *names: str) -> None:
    """Further owners of validators."""
    for name in names:
        world._make_owner(name)
    world.change(validators=(*world.params.validators, *(world.owner_id(name) for name in names)))
    for name in names:
        world.join(name, name, scopes={Scope.VALIDATE})


def convict(world) -> str:
    """Let odds convict ann; returns the last submission."""
    for number in range(1, 20):
        submission = hand_in(world, "w1", "judge-a" if number % 2 else "judge-b", WEAK)
        if find_standing(world, "ann") == Standing.BANNED:
            return submission
    raise AssertionError("not convicted")


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
    submission = convict(world)
    (ban,) = list_bans(world)
    assert 4 < int(re.search(r"(\d+) submissions", ban.content["reason"])[1]) <= 12
    assert ban.content["reason"].startswith(f"hard verdict on {submission}: ")
    assert world.query(find_submission, submission).state == SubmissionState.HARD
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
    convict(world)
    world.order(Action.UNBAN, target=world.owner_id("ann"), reason="its machine was repaired")
    hand_in(world, "w1", "judge-a", CLEAN)
    assert find_standing(world, "ann") == Standing.PROBATION


def test_a_conviction_by_odds_is_appealed_like_any_other_and_lifted_if_two_others_find_no_odds(world):
    appoint(world, "judge-d", "judge-e")
    for _ in range(3):
        hand_in(world, "w1", "judge-a", CLEAN)
    staked = world.balance("stake", "ann")
    submission = convict(world)
    lost = world.balance("stake", "ann")
    assert staked > 0 == lost
    assert "for the odds of several submissions" in world.coordinator.explain(submission)
    assert f"shoal owner appeal URL {submission}" in world.coordinator.explain(submission)
    assert world.appeal("ann", submission).state == "open"
    world.judge("judge-c", odds=CLEAN)
    assert find_standing(world, "ann") == Standing.BANNED
    world.judge("judge-d", odds=CLEAN)
    assert world.query(find_submission, submission).state == SubmissionState.ACCEPTED
    assert find_standing(world, "ann") == Standing.PROBATION
    assert world.balance("pending", "ann") > staked  # what was burned, and the pay of the submission
    assert list_suspicion(world, "ann") == []
    assert not any(find_scores(world))


def test_an_appeal_of_work_that_still_leans_to_other_weights_changes_nothing(world):
    """Every validator accepts it by itself, so an appeal that ignored the odds would free each cheat."""
    appoint(world, "judge-d", "judge-e")
    submission = convict(world)
    world.appeal("ann", submission)
    for judge in ("judge-c", "judge-d"):
        world.judge(judge, odds=WEAK)
    assert world.query(find_appeal, submission).state == "upheld"
    assert world.query(find_submission, submission).state == SubmissionState.HARD
    assert find_standing(world, "ann") == Standing.BANNED and not any(find_scores(world))
    world.order(Action.UNBAN, target=world.owner_id("ann"), reason="another machine")
    hand_in(world, "w1", "judge-c", CLEAN)
    assert find_standing(world, "ann") == Standing.PROBATION


def test_where_one_other_finds_odds_and_one_does_not_more_are_asked(world):
    appoint(world, "judge-d", "judge-e")
    submission = convict(world)
    world.appeal("ann", submission)
    world.judge("judge-c", odds=WEAK)
    world.judge("judge-d", odds=CLEAN)
    assert world.query(find_appeal, submission).state == "open"
    world.judge("judge-e", odds=CLEAN)
    assert world.query(find_appeal, submission).state == "open"  # two against two, and one is left to ask
    last = next(name for name in ("judge-a", "judge-b") if world.claim(name).job is not None)
    world.judge(last, odds=CLEAN)
    assert world.query(find_appeal, submission).state == "reversed"
    assert find_standing(world, "ann") == Standing.PROBATION


def test_with_two_validators_the_refusal_of_an_appeal_says_what_is_needed(world):
    world.change(validators=(world.owner_id("judge-a"), world.owner_id("judge-b")))
    submission = convict(world)
    needed = (
        "takes 2 validator owners that did not judge it yet, and (none|only 1) of the run's 2 validator owners is "
        "available; its operator"
    )
    with pytest.raises(ApiError, match=needed):
        world.appeal("ann", submission)


def find_scores(world) -> list[int]:
    """What grades have added to the scores of all owners of validators."""
    rows = [world.query(find_validator, owner) for owner in world.params.validators]
    return [row.good + row.bad for row in rows]
