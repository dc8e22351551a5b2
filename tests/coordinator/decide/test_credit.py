"""Holds, bonds, convictions, bans, appeals, planted submissions, and the operator."""

import asyncio

import pytest

from shoal.coordinator.decide.credit import MAX_OPEN
from shoal.coordinator.rules.standing import STRIKE
from shoal.coordinator.state.credit import find_appeal
from shoal.coordinator.state.leases import find_lease, find_range
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.coordinator.state.validators import find_validator
from shoal.identity.delegation import Scope
from shoal.identity.keys import Key
from shoal.net.api_error import ApiError
from shoal.net.retry import RETRY_STATUSES
from shoal.protocol.messages import Action, Heartbeat, RedeemAnswer, Standing, SubmissionState, Verdict

DATABASES = ("sqlite", "postgresql")


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


def read_accounts(world, owner):
    return {kind: world.balance(kind, owner) for kind in ("stake", "pending", "avail", "unbond")}


def state_of(world, submission):
    return world.query(find_submission, submission).state


def test_pay_is_free_after_its_window_and_once(rich):
    rich.wait(rich.params.challenge_s - 0.001)
    assert read_accounts(rich, "ann") == {"stake": 2000, "pending": 2000, "avail": 0, "unbond": 0}
    rich.wait(0.001)
    rich.wait(1000)
    assert read_accounts(rich, "ann") == {"stake": 2000, "pending": 0, "avail": 2000, "unbond": 0}


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
    assert read_accounts(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}
    assert (rich.balance("burn", ""), rich.balance("mint", "")) == (4000, -4000)
    for call in (lambda: rich.ask("w1"), lambda: rich.join("w9", "ann")):
        with pytest.raises(ApiError, match="banned"):
            call()
    rich.wait(10**6)
    assert read_accounts(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}


def test_a_bond_on_its_way_back_is_still_taken(rich):
    submission = rich.submit("w1", rich.lease("w1"))
    assert rich.unbond("ann").free_ms == rich.now_ms + 1000 * rich.params.unbond_s
    assert read_accounts(rich, "ann")["unbond"] == 2000
    for judge in ("judge-a", "judge-b"):
        rich.judge(judge, Verdict.HARD)
    assert state_of(rich, submission) == SubmissionState.HARD
    assert read_accounts(rich, "ann") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}


def test_a_share_of_the_bond_is_taken_where_the_run_says_so(rich):
    rich.change(slash_share=250_000)
    rich.unbond("ann")
    rich.convict("w1")
    assert read_accounts(rich, "ann")["unbond"] == 1500
    rich.order(Action.UNBAN, target=rich.owner_id("ann"))
    rich.wait(rich.params.unbond_s)
    assert read_accounts(rich, "ann")["avail"] == 1500


def test_a_bond_comes_back_after_its_time_and_must_be_earned_again(rich):
    answer = rich.unbond("ann", "a" * 32)
    rich.now_ms += 1000
    assert rich.unbond("ann", "a" * 32) == answer, "the same request gets the first answer"
    rich.wait(rich.params.unbond_s)
    with pytest.raises(ApiError, match="no bond"):
        rich.unbond("ann")
    assert read_accounts(rich, "ann") == {"stake": 0, "pending": 0, "avail": 4000, "unbond": 0}
    rich.work("w1")
    assert read_accounts(rich, "ann")["stake"] == 2000
    assert rich.unbond("ann", "a" * 32) == answer
    assert read_accounts(rich, "ann")["stake"] == 2000, "a signed request takes out only one bond"


def test_a_bond_is_returned_only_to_its_owner(rich):
    with pytest.raises(ApiError, match="invalid signature"):
        rich.unbond("ann", key=rich.nodes["w1"])
    rich.unbond("ann", "a" * 32)
    with pytest.raises(ApiError, match="used for a different request"):
        rich.unbond("bob", "a" * 32)
    with pytest.raises(ApiError, match="no bond"):
        rich.unbond("trainer")
    rich.order(Action.BAN, target=rich.owner_id("bob"))
    with pytest.raises(ApiError, match="banned"):
        rich.unbond("bob")


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
        assert rich.query(find_range, lease.step, lease.first).state == "offered"
    assert rich.lease("w2").first == first.first
    assert rich.query(find_owner, rich.owner_id("ann")).standing == Standing.BANNED


def test_work_that_a_ban_voids_leaves_the_record_as_it_was(rich):
    rich.work("w1", Verdict.SOFT)
    rich.submit("w1", rich.lease("w1"))
    before = rich.query(find_owner, rich.owner_id("ann"))
    rich.order(Action.BAN, target=rich.owner_id("ann"))
    after = rich.query(find_owner, rich.owner_id("ann"))
    assert before.strikes > 0
    assert after._replace(standing=before.standing, since_ms=before.since_ms) == before


def test_banned_pay_is_frozen_until_the_ban_is_lifted(rich):
    rich.order(Action.BAN, target=rich.owner_id("ann"))
    rich.wait(10**5)
    assert read_accounts(rich, "ann")["avail"] == 0
    rich.order(Action.UNBAN, target=rich.owner_id("ann"))
    rich.wait(0)
    assert read_accounts(rich, "ann")["avail"] == 2000
    assert rich.query(find_owner, rich.owner_id("ann")).standing == Standing.PROBATION


def test_a_ban_of_a_node_leaves_the_owners_others(world):
    mine, other = world.lease("w2"), world.lease("w3")
    world.order(Action.BAN, target=world.id("w2"))
    with pytest.raises(ApiError, match="banned"):
        world.ask("w2")
    states = [world.query(find_lease, lease.lease).state for lease in (mine, other)]
    assert states == ["cancelled", "active"]


def test_a_banned_owner_cannot_join_with_another_node(world):
    world.order(Action.BAN, target=world.owner_id("ann"))
    with pytest.raises(ApiError, match="banned"):
        world.join("m", "ann")


def test_a_command_is_done_once(world):
    target = world.owner_id("ann")
    first = world.order(Action.BAN, nonce="a" * 32, target=target)
    world.order(Action.UNBAN, target=target)
    assert world.order(Action.BAN, nonce="a" * 32, target=target) == first
    assert world.coordinator.find_member(world.id("w1")).ban is None


def test_only_the_operator_commands(world):
    with pytest.raises(ApiError, match="invalid signature"):
        world.order(Action.STOP, key=Key.generate())


def test_parameters_change_but_for_the_fixed_ones(world):
    world.change(price=99)
    assert world.coordinator.params.price == 99
    world.restart()
    assert world.coordinator.params.price == 99
    with pytest.raises(ApiError, match="cannot change"):
        world.change(steps=4)
    with pytest.raises(ApiError, match="invalid run parameters"):
        world.order(Action.PARAMS, params={"price": 1})


def test_an_appeal_that_is_right_is_paid(rich):
    submission = rich.work("w1", Verdict.SOFT)
    assert rich.appeal("ann", submission).state == "open"
    assert rich.appeal("ann", submission).state == "open"
    assert rich.claim("judge-a").job is None  # it has already judged
    rich.judge("judge-b")
    assert state_of(rich, submission) == SubmissionState.ACCEPTED
    assert read_accounts(rich, "ann")["pending"] == 4000
    owner = rich.query(find_owner, rich.owner_id("ann"))
    assert (owner.accepted, owner.rejected) == (3, 0)
    assert rich.appeal("ann", submission).state == "reversed"
    assert rich.query(find_range, 1, 2).state == "offered"  # the groups are generated again, whoever was right


def appoint(world, letters):
    """Validators a, b, c and more."""
    for letter in letters:
        world._make_owner(f"judge-{letter}")
    world.change(validators=tuple(world.owner_id(f"judge-{letter}") for letter in "abc" + letters))
    for letter in letters:
        world.join(f"judge-{letter}", f"judge-{letter}", scopes={Scope.VALIDATE})
    world.join("w1", "ann")
    world.publish(0)
    return world


def list_scores(world, letters):
    """Scores on good and on bad work of some validators."""
    rows = [world.query(find_validator, world.owner_id(f"judge-{letter}")) for letter in letters]
    return [(row.good, row.bad) for row in rows]


def test_a_convicted_owner_that_is_cleared_by_two_gets_all_back(make_world):
    world = appoint(make_world(groups_per_batch=50), "d")
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
    owner = world.query(find_owner, world.owner_id("ann"))
    assert (owner.earned, owner.tokens) == (4000, 400), "the returned amount was counted as earned before"
    assert list_scores(world, "abcd") == [(0, 0)] * 4, "two against two: it is unknown who lied"


def test_a_node_whose_rejection_was_reversed_is_told_what_it_earned_and_of_no_rejection(make_world):
    world = appoint(make_world(groups_per_batch=50), "d")
    world.work("w1")
    submission = world.convict("w1")
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.judge("judge-d")
    answer = world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert answer.earned == world.query(find_owner, world.owner_id("ann")).earned, "what was burned is no second pay"
    assert not answer.rejected
    assert "The appeal was granted." in world.coordinator.explain(submission)


def test_wrong_convictions_are_graded_when_more_owners_clear_the_work(make_world):
    world = appoint(make_world(groups_per_batch=50), "de")
    submission = world.convict("w1")
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.judge("judge-d")
    assert state_of(world, submission) == SubmissionState.HARD, "a fifth validator can decide"
    world.judge("judge-e")
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert list_scores(world, "abcde") == [(14, 1), (14, 1), (0, 0), (0, 0), (0, 0)], "its point is gone"
    names = ", ".join(world.id(f"judge-{name}") for name in "ab")
    assert f"the work was good; validators {names} were wrong about it" in world.coordinator.explain(submission)


def test_clearing_a_cheat_on_appeal_is_graded_when_more_owners_convict_it(make_world):
    world = appoint(make_world(groups_per_batch=50), "de")
    submission = world.convict("w1")
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.judge("judge-d")
    world.judge("judge-e", Verdict.HARD)
    assert state_of(world, submission) == SubmissionState.HARD and world.balance("pending", "ann") == 0
    assert list_scores(world, "abcde") == [(0, 0), (0, 0), (0, 14), (0, 14), (0, 0)]


def test_two_that_clear_are_enough_if_the_third_does_not_come(make_world):
    world = appoint(make_world(groups_per_batch=50), "de")
    submission = world.convict("w1")
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.judge("judge-d")
    world.wait(world.params.opinion_s)
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert list_scores(world, "abcde") == [(0, 0)] * 5


def test_one_that_clears_what_two_rejected_is_believed_and_grades_nobody(make_world):
    world = appoint(make_world(groups_per_batch=50, reject_share=10**6), "d")
    submission = world.work("w1", Verdict.SOFT)
    world.judge("judge-b", Verdict.SOFT)
    before = list_scores(world, "abcd")
    world.appeal("ann", submission)
    world.judge("judge-c")
    assert state_of(world, submission) == SubmissionState.ACCEPTED and list_scores(world, "abcd") == before


def test_an_appeal_that_is_right_gets_its_fee_back_even_if_the_owner_is_banned_for_something_else(rich):
    rejected = rich.work("w1", Verdict.SOFT)
    rich.change(appeal_fee=500)
    rich.wait(rich.params.challenge_s)
    rich.appeal("ann", rejected)
    assert rich.balance("treasury", "") == 500
    rich.order(Action.BAN, target=rich.owner_id("ann"), reason="spam")
    rich.judge("judge-b")
    assert state_of(rich, rejected) == SubmissionState.ACCEPTED
    assert (rich.balance("treasury", ""), rich.balance("avail", "ann")) == (0, 2000)
    assert "banned for another reason, so only the fee is given back" in rich.coordinator.explain(rejected)
    assert rich.query(find_owner, rich.owner_id("ann")).standing == Standing.BANNED


def test_an_appeal_that_fails_or_is_not_judged_changes_nothing(rich):
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
    assert (owner.rejected, owner.strikes) == (2, 2 * STRIKE)


def test_an_appeal_that_cannot_succeed_is_refused_before_it_costs_anything(rich):
    """Three owners of validators: a rejection can be appealed, a conviction by two of them cannot."""
    rejected = rich.work("w1", Verdict.SOFT)
    convicted = rich.convict("w2")
    with pytest.raises(
        ApiError, match="takes 2 validator owners that did not judge it yet, and only 1 of the run's 3 "
    ):
        rich.appeal("bob", convicted)
    assert rich.query(find_appeal, convicted) is None
    rich.change(validators=(rich.owner_id("judge-a"),))
    with pytest.raises(ApiError, match="takes 1 validator owner that did not judge it yet, and none of the run's 1 "):
        rich.appeal("ann", rejected)
    rich.change(validators=(rich.owner_id("judge-b"),))
    rich.run(rich.coordinator.leave(rich.id("judge-b")))
    with pytest.raises(ApiError, match="did not judge it yet, and the run has none now; its operator can name more"):
        rich.appeal("ann", rejected)
    rich.change(validators=(rich.owner_id("judge-c"), rich.owner_id("judge-a")))
    assert rich.appeal("ann", rejected).state == "open"


def test_an_appeal_that_runs_out_of_validators_ends_at_once(make_world):
    world = make_world(groups_per_batch=50)
    world._make_owner("judge-d")
    world.change(validators=tuple(world.owner_id(f"judge-{letter}") for letter in "abcd"))
    world.join("judge-d", "judge-d", scopes={Scope.VALIDATE})
    world.join("w1", "ann")
    world.publish(0)
    submission = world.convict("w1")
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.judge("judge-d", Verdict.INCONCLUSIVE)
    assert world.query(find_appeal, submission).state == "upheld"
    assert state_of(world, submission) == SubmissionState.HARD


def test_appeals_have_their_limits(rich):
    submission = rich.work("w1", Verdict.SOFT)
    with pytest.raises(ApiError, match="no such submission"):
        rich.appeal("bob", submission)
    accepted = rich.work("w2")
    with pytest.raises(ApiError, match="only a rejection"):
        rich.appeal("bob", accepted)
    rich.change(appeal_every_s=100, appeal_fee=500)
    with pytest.raises(ApiError, match="costs 500"):
        rich.appeal("ann", submission)
    rich.wait(rich.params.challenge_s)
    rich.appeal("ann", submission)
    assert rich.balance("avail", "ann") == 1500
    assert rich.balance("treasury", "") == 500
    rich.judge("judge-b")
    assert rich.balance("avail", "ann") == 2000
    other = rich.work("w1", Verdict.SOFT)
    with pytest.raises(ApiError, match="appealed recently; it may appeal again from ") as caught:
        rich.appeal("ann", other)
    assert caught.value.status not in RETRY_STATUSES, "a client that retries would say that there is no answer"
    assert f"but not now: {caught.value.text}" in rich.coordinator.explain(other)
    rich.wait(rich.params.appeal_s + 1)
    with pytest.raises(ApiError, match="has expired"):
        rich.appeal("ann", other)


def test_credit_is_redeemed_in_two_phases(rich):
    rich.wait(rich.params.challenge_s)
    with pytest.raises(ApiError, match=r"0\.002 credits free"):
        rich.redeem("ann", 2001)
    answer = rich.redeem("ann", 1500, "a" * 32, goal="account 7")
    assert (answer.state, rich.balance("avail", "ann"), rich.balance("redeeming", "ann")) == ("open", 500, 1500)
    rich.order(Action.REDEEM_DONE, request="a" * 32)
    assert (rich.balance("redeeming", "ann"), rich.balance("redeemed", "")) == (0, 1500)
    second = rich.redeem("ann", 500, "b" * 32)
    rich.order(Action.REDEEM_FAILED, request="b" * 32, reason="no such account")
    assert (rich.balance("avail", "ann"), rich.balance("redeemed", "")) == (500, 1500)
    assert rich.redeem("ann", 500, "b" * 32) == second.model_copy(update={"state": "failed"})
    for request in ("a" * 32, "b" * 32, "c" * 32):
        with pytest.raises(ApiError, match="no open request"):
            rich.order(Action.REDEEM_DONE, request=request)


def test_a_request_to_redeem_counts_once_and_is_its_owners(rich):
    rich.wait(rich.params.challenge_s)
    first = rich.redeem("ann", 700, "a" * 32)
    rich.restart()
    assert rich.redeem("ann", 700, "a" * 32) == first
    for owner, amount in (("ann", 701), ("bob", 700)):
        with pytest.raises(ApiError, match="used for a different request"):
            rich.redeem(owner, amount, "a" * 32)
    forged = rich.describe_redeem("bob", 5).model_copy(update={"owner": rich.owner_id("ann")})
    with pytest.raises(ApiError, match="invalid signature"):
        rich.run(rich.coordinator.redeem(forged))
    rich.order(Action.BAN, target=rich.owner_id("ann"))
    with pytest.raises(ApiError, match="banned"):
        rich.redeem("ann", 1)
    assert rich.balance("avail", "ann") == 1300


def test_of_a_hundred_parallel_requests_to_redeem_as_many_as_there_is_credit_for_are_paid(rich):
    rich.wait(rich.params.challenge_s)
    requests = [rich.describe_redeem("ann", 700) for _ in range(100)]

    async def ask_all():
        return await asyncio.gather(*map(rich.coordinator.redeem, requests), return_exceptions=True)

    answers = rich.run(ask_all())
    taken = [answer.request for answer in answers if not isinstance(answer, ApiError)]
    assert len(taken) == 2 and all(isinstance(answer, ApiError | RedeemAnswer) for answer in answers)
    for request in taken:
        rich.order(Action.REDEEM_DONE, request=request)
    assert (rich.balance("avail", "ann"), rich.balance("redeemed", "")) == (600, 1400)


def test_credit_is_not_split_into_any_number_of_requests(rich):
    rich.wait(1000)
    assert rich.balance("avail", "ann") == 2000
    names = [f"{10**6 + number:032x}" for number in range(MAX_OPEN)]
    for name in names:
        rich.redeem("ann", 1, name)
    size = rich.coordinator.ledger.size
    with pytest.raises(ApiError, match="the operator pays those first"):
        rich.redeem("ann", 1)
    assert rich.redeem("ann", 1, names[0]).state == "open"
    assert rich.coordinator.ledger.size == size
    rich.order(Action.REDEEM_DONE, request=names[0])
    rich.redeem("ann", 1)
