"""Holds, bonds, convictions, bans, appeals, planted submissions, and the operator."""

import pytest

from shoal.keys import Key
from shoal.swarm.delegation import Scope
from shoal.swarm.messages import Action, CanaryPlan, RolloutEntry, Standing, SubmissionState, Verdict
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.credit import find_appeal, find_canary
from shoal.swarm.state.leases import find_lease
from shoal.swarm.state.nodes import find_owner
from shoal.swarm.state.spans import find_span
from shoal.swarm.state.submissions import find_submission


@pytest.fixture
def rich(make_world):
    """Ann has a bond of 2000 and pay of 2000 pending."""
    world = make_world(groups_per_batch=50, async_level=0)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    world.work("w1")
    world.work("w1")
    return world


def purses(world, owner):
    return {purse: world.balance(purse, owner) for purse in ("stake", "pending", "avail", "unbond")}


def state_of(world, submission):
    return world.query(find_submission, submission).state


def test_pay_is_free_after_its_window_and_once(rich):
    rich.wait(rich.params.challenge_s - 0.001)
    assert purses(rich, "ann") == {"stake": 2000, "pending": 2000, "avail": 0, "unbond": 0}
    rich.wait(0.001)
    rich.wait(1000)
    assert purses(rich, "ann") == {"stake": 2000, "pending": 0, "avail": 2000, "unbond": 0}


def test_pay_is_held_until_more_is_accepted_or_a_longer_time_has_passed(make_world):
    world = make_world(groups_per_batch=50, hold_submissions=2, stake_submissions=0)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    world.wait(world.params.challenge_s)
    world.work("w1")
    world.wait(0)
    assert world.balance("avail", "ann") == 0
    world.work("w1")
    world.wait(0)
    assert world.balance("avail", "ann") == 2000
    world.wait(world.params.hold_max_s)
    assert world.balance("avail", "ann") == 6000


def test_a_conviction_burns_and_bans(rich):
    rich.convict("w1")
    assert purses(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}
    assert (rich.balance("burn", ""), rich.balance("mint", "")) == (4000, -4000)
    for call in (lambda: rich.ask("w1"), lambda: rich.join("w9", "ann")):
        with pytest.raises(AuthError, match="banned"):
            call()
    rich.wait(10**6)
    assert purses(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}


def test_a_bond_on_its_way_back_is_still_taken(rich):
    submission = rich.submit("w1", rich.lease("w1"))
    free_ms = rich.run(rich.coordinator.unbond(rich.id("w1")))
    assert free_ms == rich.now_ms + 1000 * rich.params.unbond_s
    assert purses(rich, "ann")["unbond"] == 2000
    for judge in ("judge-a", "judge-b"):
        rich.judge(judge, Verdict.HARD)
    assert state_of(rich, submission) == SubmissionState.HARD
    assert purses(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}


def test_a_share_of_the_bond_is_taken_where_the_run_says_so(rich):
    rich.change(slash_share=250_000)
    rich.run(rich.coordinator.unbond(rich.id("w1")))
    rich.convict("w1")
    assert purses(rich, "ann")["unbond"] == 1500
    rich.order(Action.UNBAN, target=rich.owner_id("ann"))
    rich.wait(rich.params.unbond_s)
    assert purses(rich, "ann")["avail"] == 1500


def test_a_bond_comes_back_after_its_time_and_must_be_earned_again(rich):
    rich.run(rich.coordinator.unbond(rich.id("w1")))
    with pytest.raises(AuthError, match="no bond"):
        rich.run(rich.coordinator.unbond(rich.id("w1")))
    rich.wait(rich.params.unbond_s)
    assert purses(rich, "ann") == {"stake": 0, "pending": 0, "avail": 4000, "unbond": 0}
    rich.work("w1")
    assert purses(rich, "ann")["stake"] == 2000


def test_a_ban_ends_all_that_an_owner_has_begun(rich):
    rich.change(raise_after=1)
    rich.work("w1")
    first, second = rich.lease("w1"), rich.lease("w1")
    sent = rich.submit("w1", first)
    unsent = rich.commit("w1", rich.make_manifest(second)).submission
    leased = rich.lease("w1")
    rich.order(Action.BAN, target=rich.owner_id("ann"), reason="sells rollouts")
    assert [state_of(rich, name) for name in (sent, unsent)] == [SubmissionState.VOID] * 2
    assert rich.query(find_lease, leased.lease).state == "cancelled"
    assert rich.claim("judge-a").job is None
    for lease in (first, second, leased):
        assert rich.query(find_span, lease.step, lease.first).state == "offered"
    assert rich.lease("w2").first == first.first
    assert rich.query(find_owner, rich.owner_id("ann")).standing == Standing.BANNED


def test_work_that_a_ban_voids_leaves_the_record_as_it_was(rich):
    rich.work("w1", Verdict.SOFT)
    rich.submit("w1", rich.lease("w1"))
    before = rich.query(find_owner, rich.owner_id("ann"))
    rich.order(Action.BAN, target=rich.owner_id("ann"))
    after = rich.query(find_owner, rich.owner_id("ann"))
    assert before.soft_row == 1
    assert after._replace(standing=before.standing, since_ms=before.since_ms) == before


def test_banned_pay_is_frozen_until_the_ban_is_lifted(rich):
    rich.order(Action.BAN, target=rich.owner_id("ann"))
    rich.wait(10**5)
    assert purses(rich, "ann")["avail"] == 0
    rich.order(Action.UNBAN, target=rich.owner_id("ann"))
    rich.wait(0)
    assert purses(rich, "ann")["avail"] == 2000
    assert rich.query(find_owner, rich.owner_id("ann")).standing == Standing.PROBATION


def test_a_ban_of_a_node_leaves_the_owners_others(world):
    mine, other = world.lease("w2"), world.lease("w3")
    world.order(Action.BAN, target=world.id("w2"))
    with pytest.raises(AuthError, match="banned"):
        world.ask("w2")
    states = [world.query(find_lease, lease.lease).state for lease in (mine, other)]
    assert states == ["cancelled", "active"]


def test_who_is_banned_before_it_joins_does_not_join(world):
    world._make_owner("mallory")
    world.order(Action.BAN, target=world.owner_id("mallory"))
    with pytest.raises(AuthError, match="banned"):
        world.join("m", "mallory")


def test_a_command_is_done_once(world):
    target = world.owner_id("ann")
    first = world.order(Action.BAN, nonce="a" * 32, target=target)
    world.order(Action.UNBAN, target=target)
    assert world.order(Action.BAN, nonce="a" * 32, target=target) == first
    assert not world.coordinator.find_member(world.id("w1")).is_banned


def test_only_the_operator_commands(world):
    with pytest.raises(AuthError, match="not a statement"):
        world.order(Action.STOP, key=Key.generate())


def test_parameters_change_but_for_the_fixed_ones(world):
    world.change(price=99)
    assert world.coordinator.params.price == 99
    world.restart()
    assert world.coordinator.params.price == 99
    with pytest.raises(AuthError, match="fixed"):
        world.change(steps=4)
    with pytest.raises(AuthError, match="not the parameters"):
        world.order(Action.PARAMS, params={"price": 1})


def test_an_appeal_that_is_right_is_paid(rich):
    submission = rich.work("w1", Verdict.SOFT)
    assert rich.appeal("ann", submission).state == "open"
    assert rich.appeal("ann", submission).state == "open"
    assert rich.claim("judge-a").job is None  # it judged already
    rich.judge("judge-b")
    assert state_of(rich, submission) == SubmissionState.ACCEPTED
    assert purses(rich, "ann")["pending"] == 4000
    owner = rich.query(find_owner, rich.owner_id("ann"))
    assert (owner.accepted, owner.rejected) == (3, 0)
    assert rich.appeal("ann", submission).state == "reversed"
    assert rich.query(find_span, 1, 2).state == "offered"  # the groups are made anew, whoever was right


def test_a_convicted_owner_that_is_cleared_by_two_gets_all_back(make_world):
    world = make_world(groups_per_batch=50)
    for name in ("judge-d", "judge-e"):
        world._make_owner(name)
    world.change(validators=tuple(world.owner_id(f"judge-{letter}") for letter in "abcde"))
    for name in ("judge-d", "judge-e"):
        world.join(name, name, scopes={Scope.VALIDATE})
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    submission = world.convict("w1")
    assert world.balance("burn", "") == 2000
    world.appeal("ann", submission)
    world.judge("judge-c")
    assert state_of(world, submission) == SubmissionState.HARD
    world.judge("judge-d")
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert world.balance("pending", "ann") == 4000
    assert world.ask("w1").lease is not None


def test_an_appeal_that_is_wrong_or_heard_by_nobody_changes_nothing(rich):
    first = rich.work("w1", Verdict.SOFT)
    rich.appeal("ann", first)
    rich.judge("judge-b", Verdict.SOFT)
    second = rich.work("w1", Verdict.SOFT)
    rich.appeal("ann", second)
    rich.wait(rich.params.opinion_s)
    for submission in (first, second):
        assert rich.query(find_appeal, submission).state == "upheld"
        assert state_of(rich, submission) == SubmissionState.SOFT
    owner = rich.query(find_owner, rich.owner_id("ann"))
    assert (owner.rejected, owner.soft_row) == (2, 2)


def test_appeals_have_their_limits(rich):
    submission = rich.work("w1", Verdict.SOFT)
    with pytest.raises(AuthError, match="no such submission"):
        rich.appeal("bob", submission)
    accepted = rich.work("w2")
    with pytest.raises(AuthError, match="only a rejection"):
        rich.appeal("bob", accepted)
    rich.change(appeal_every_s=100, appeal_fee=500)
    with pytest.raises(AuthError, match="costs 500"):
        rich.appeal("ann", submission)
    rich.wait(rich.params.challenge_s)
    rich.appeal("ann", submission)
    assert rich.balance("avail", "ann") == 1500
    assert rich.balance("treasury", "") == 500
    rich.judge("judge-b")
    assert rich.balance("avail", "ann") == 2000
    other = rich.work("w1", Verdict.SOFT)
    with pytest.raises(AuthError, match="not long ago"):
        rich.appeal("ann", other)
    rich.wait(rich.params.appeal_s + 1)
    with pytest.raises(AuthError, match="is over"):
        rich.appeal("ann", other)


def plant(world):
    rollouts = (RolloutEntry(hash="f" * 64, tokens=100),) * 2
    plan = CanaryPlan(step=1, first=0, count=1, version=0, blob="e" * 64, size=10, rollouts=rollouts)
    return f"s{world.order(Action.CANARY, canary=plan).seq}"


def test_a_planted_submission_looks_like_any_other_and_is_never_paid(world):
    submission = plant(world)
    job = world.take("judge-a")
    assert (job.submission, job.manifest.lease[0]) == (submission, "l")
    world.post("judge-a", world.describe_verdict(job, Verdict.SOFT))
    assert world.query(find_canary, submission).state == "caught"
    assert world.coordinator.read_status().alarms == ()
    assert world.balance("mint", "") == 0


def test_who_accepts_a_planted_submission_is_found(world):
    submission = plant(world)
    world.judge("judge-a")
    assert world.query(find_canary, submission).state == "missed"
    (alarm,) = world.coordinator.read_status().alarms
    assert submission in alarm
    with pytest.raises(AuthError, match="may not judge"):
        world.claim("judge-a")
    assert world.balance("mint", "") == 0
    assert world.lease("w1").first == 0  # nothing was filled by it


def test_silence_of_the_canaries_is_an_alarm(world):
    world.change(canary_every_s=60)
    world.wait(61)
    (alarm,) = world.coordinator.read_status().alarms
    assert "no planted submission" in alarm
    plant(world)
    world.judge("judge-a", Verdict.HARD)
    world.judge("judge-b", Verdict.HARD)
    assert world.coordinator.read_status().alarms == ()
