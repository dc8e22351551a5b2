"""The queue, verdicts, second opinions, and their consequences."""

import pytest

from shoal.coordinator.state.leases import find_range
from shoal.coordinator.state.members import find_node, find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.coordinator.state.validators import list_verdicts
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag, open_document
from shoal.net.api_error import ApiError
from shoal.protocol.messages import (
    Action,
    GroupFinding,
    SignedVerdict,
    Standing,
    SubmissionState,
    Verdict,
    sign_message,
)


def state_of(world, submission):
    return world.query(find_submission, submission).state


def settle(world):
    world.join("w1", "ann")
    world.publish(0)
    return world


def test_an_accepted_submission_is_paid_once_by_its_tokens(both_world):
    world = both_world
    world.work("w1")  # the first one is the bond
    submission = world.submit("w1", world.lease("w1"))
    statement = world.describe_verdict(world.take("judge-a"))
    answer = world.post("judge-a", statement)
    assert (answer.record.state, answer.record.paid) == (SubmissionState.ACCEPTED, 10 * 200)
    assert open_document(world.key.public, Tag.VERDICT, answer.document.encode()) == answer.record.model_dump(
        mode="json"
    )
    world.restart()
    assert world.post("judge-a", statement) == answer
    assert (world.balance("stake", "ann"), world.balance("pending", "ann")) == (2000, 2000)
    assert (world.balance("mint", ""), state_of(world, submission)) == (-4000, SubmissionState.ACCEPTED)


def test_a_validator_keeps_its_claim_until_it_judges_or_is_late(world):
    world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    assert world.take("judge-a") == job
    assert world.claim("judge-b").job is None
    world.wait(world.params.claim_s)
    other = world.take("judge-b")
    assert other.submission == job.submission
    with pytest.raises(ApiError, match="no current claim"):
        world.post("judge-a", world.describe_verdict(job))
    world.post("judge-b", world.describe_verdict(other))


def test_a_late_verdict_counts_while_nobody_else_has_the_claim(world):
    submission = world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    world.wait(world.params.claim_s + 1)
    world.post("judge-a", world.describe_verdict(job))
    assert state_of(world, submission) == SubmissionState.ACCEPTED


def test_nobody_judges_the_work_of_its_own_owner(world):
    world.join("mine", "judge-a")
    world.submit("mine", world.lease("mine"))
    assert world.claim("judge-a").job is None
    assert world.claim("judge-b").job is not None


def test_only_validators_of_the_run_judge(world):
    world.join("eve", "eve", scopes={Scope.VALIDATE})
    with pytest.raises(ApiError, match="not a validator"):
        world.claim("eve")
    with pytest.raises(ApiError, match="does not include the scope"):
        world.claim("w1")


def test_owners_take_turns_in_the_queue(make_world):
    world = make_world(groups_per_batch=20, probation_leases=20)
    world.publish(0)
    for number in range(3):
        world.join(f"a{number}", "ann")
    world.join("b", "bob")
    flood = [world.submit(f"a{number}", world.lease(f"a{number}")) for number in range(3)]
    lone = world.submit("b", world.lease("b"))
    served = []
    for _ in range(4):
        served.append(world.take("judge-a").submission)
        world.judge("judge-a")
    assert served == [flood[0], lone, flood[1], flood[2]]


def test_which_rollouts_are_checked_cannot_be_known_before(world):
    world.submit("w1", world.lease("w1"))
    world.submit("w2", world.lease("w2"))
    first, second = world.take("judge-a"), world.take("judge-b")
    assert first.check_ppm == 1_000_000
    assert first.check_seed != second.check_seed
    assert first.check_seed == world.coordinator._context.chain.draw_check(first.submission, first.manifest.blob)


def test_a_verdict_must_fit_its_submission(world):
    world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    statement = world.describe_verdict(job)
    with pytest.raises(ApiError, match="describe every group"):
        world.post("judge-a", statement.model_copy(update={"groups": (GroupFinding(index=7, signal=True),)}))
    with pytest.raises(ApiError, match="more validated tokens"):
        world.post("judge-a", statement.model_copy(update={"tokens": 201}))
    forged = SignedVerdict(verdict=statement, signature=sign_message(world.nodes["judge-b"], "demo", statement))
    with pytest.raises(ApiError, match="invalid signature"):
        world.run(world.coordinator.post_verdict(world.id("judge-a"), forged))


def test_a_verdict_is_said_once(world):
    world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    world.post("judge-a", world.describe_verdict(job))
    with pytest.raises(ApiError, match="a different verdict"):
        world.post("judge-a", world.describe_verdict(job, Verdict.SOFT))


@pytest.mark.parametrize("verdict", [Verdict.FORM, Verdict.SOFT])
def test_a_rejection_is_unpaid_and_offers_the_groups_again(world, verdict):
    submission = world.work("w1", verdict)
    assert state_of(world, submission) == verdict.value
    assert world.query(find_range, 1, 0).state == "offered"
    assert (world.balance("stake", "ann"), world.balance("pending", "ann")) == (0, 0)
    assert world.query(find_owner, world.owner_id("ann")).rejected == 1


def test_one_hard_verdict_is_not_enough(both_world):
    world = both_world
    submission = world.work("w1", Verdict.HARD)
    assert state_of(world, submission) == SubmissionState.RECEIVED
    assert world.claim("judge-a").job is None  # not the same validator twice
    job = world.take("judge-b")
    assert (job.submission, job.round, job.check_ppm) == (submission, 2, 1_000_000)
    world.post("judge-b", world.describe_verdict(job, Verdict.HARD))
    assert state_of(world, submission) == SubmissionState.HARD
    assert world.coordinator.find_member(world.id("w1")).ban is not None


def test_two_against_one_clear_the_accused(world):
    submission = world.work("w1", Verdict.HARD)
    world.judge("judge-b")
    assert state_of(world, submission) == SubmissionState.RECEIVED
    world.judge("judge-c")
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert world.balance("stake", "ann") == 2000


def test_without_a_second_opinion_a_hard_verdict_is_a_soft_one(world):
    submission = world.work("w1", Verdict.HARD)
    world.wait(world.params.opinion_s)
    assert state_of(world, submission) == SubmissionState.SOFT
    assert world.coordinator.find_member(world.id("w1")).ban is None


@pytest.mark.parametrize(
    ("verdict", "state"), [(Verdict.HARD, "rejected_soft"), (Verdict.INCONCLUSIVE, "inconclusive")]
)
def test_without_another_validator_there_is_no_wait_for_a_second_opinion(make_world, verdict, state):
    """One owner of validators: its doubts delay no step for an hour."""
    world = settle(make_world())
    world.change(validators=(world.owner_id("judge-a"),))
    submission = world.work("w1", verdict)
    assert state_of(world, submission) == state
    assert world.query(find_range, 1, 0).state == "offered"
    assert world.coordinator.find_member(world.id("w1")).ban is None


@pytest.mark.parametrize("reason", ["left", "banned", "limited", "its own work"])
def test_the_run_waits_only_for_validators_that_may_judge(make_world, reason):
    world = settle(make_world(limit_lapses=1, max_claims=100))
    world.change(validators=(world.owner_id("judge-a"), world.owner_id("judge-b")))
    worker = "w1"
    match reason:
        case "left":
            world.run(world.coordinator.leave(world.id("judge-b")))
        case "banned":
            world.order(Action.BAN, target=world.owner_id("judge-b"), reason="asleep")
        case "limited":
            world.submit("w1", world.lease("w1"))
            world.take("judge-b")
            world.wait(world.params.claim_s)
            world.judge("judge-a")
        case "its own work":
            world.join("w9", "judge-b")
            worker = "w9"
    submission = world.work(worker, Verdict.HARD)
    assert state_of(world, submission) == SubmissionState.SOFT


def test_doubt_is_not_guilt(world):
    submission = world.work("w1", Verdict.INCONCLUSIVE)
    assert state_of(world, submission) == SubmissionState.RECEIVED
    world.judge("judge-b", Verdict.INCONCLUSIVE)
    world.judge("judge-c", Verdict.INCONCLUSIVE)
    assert state_of(world, submission) == SubmissionState.INCONCLUSIVE
    owner = world.query(find_owner, world.owner_id("ann"))
    assert (owner.rejected, owner.strikes, owner.accepted) == (0, 0, 0)
    assert world.query(find_range, 1, 0).state == "offered"


def test_a_file_that_crashes_two_checkers_is_bad_form_and_unpaid(world):
    submission = world.work("w1", Verdict.INCONCLUSIVE, check="crash")
    world.judge("judge-b", Verdict.INCONCLUSIVE, check="crash")
    assert state_of(world, submission) == SubmissionState.FORM
    assert world.balance("stake", "ann") == 0


def kill_validators(world, submission, *judges):
    """A file that kills each process that opens it: claims lapse, one after the other, until it is decided."""
    for number in range(world.params.max_claims):
        assert state_of(world, submission) == SubmissionState.RECEIVED
        assert world.take(judges[number % len(judges)]).submission == submission
        world.wait(world.params.claim_s)


def test_what_kills_every_validator_is_unpaid_in_the_end_and_held_against_nobody(both_world):
    world = both_world
    paid = {kind: world.balance(kind, "ann") for kind in ("stake", "pending")}
    for _ in range(3):  # many such files in a row have the same result
        submission = world.submit("w1", world.lease("w1"))
        kill_validators(world, submission, "judge-a", "judge-b")
        assert state_of(world, submission) == SubmissionState.INCONCLUSIVE
        assert world.claim("judge-a").job is None
    for judge in ("judge-a", "judge-b"):
        owner = world.query(find_owner, world.owner_id(judge))
        assert (owner.lapses, owner.standing) == (0, Standing.PROBATION)
    assert paid == {kind: world.balance(kind, "ann") for kind in ("stake", "pending")}
    assert world.query(find_node, world.id("w1")).width == 1
    world.work("w1")  # and later submissions are judged


def test_a_file_that_killed_its_validator_goes_to_another_at_once(world):
    submission = world.submit("w1", world.lease("w1"))
    assert world.take("judge-a").submission == submission
    assert world.claim("judge-b").job is None
    world.now_ms += 1000 * world.params.claim_s  # no tick since then
    assert world.take("judge-b").submission == submission
    world.post("judge-b", world.describe_verdict(world.take("judge-b")))
    assert state_of(world, submission) == SubmissionState.ACCEPTED


def test_what_kills_the_only_validator_does_so_a_few_times_and_ends_by_time(world):
    submission = world.submit("w1", world.lease("w1"))
    kill_validators(world, submission, "judge-a")
    assert state_of(world, submission) == SubmissionState.RECEIVED
    assert world.claim("judge-a").job is None, "the file would kill it again"
    owner = world.query(find_owner, world.owner_id("judge-a"))
    assert (owner.lapses, owner.standing) == (1, Standing.PROBATION)
    world.wait(world.params.opinion_s)
    assert state_of(world, submission) == SubmissionState.INCONCLUSIVE


def test_a_job_that_one_owner_let_lapse_too_often_waits_for_the_others(world):
    submission = world.submit("w1", world.lease("w1"))
    kill_validators(world, submission, "judge-a")
    assert world.take("judge-b").submission == submission


def test_a_validator_that_claims_and_never_judges_sinks_nothing_and_loses_its_standing(make_world):
    world = settle(make_world(limit_lapses=3))
    for node in ("w2", "w3"):
        world.join(node, "bob")
    submission, *others = [world.submit(node, world.lease(node)) for node in ("w1", "w2", "w3")]
    for claimed in (submission, *others):
        assert world.take("judge-a").submission == claimed
        world.wait(world.params.claim_s)
    with pytest.raises(ApiError, match="lapsed claims"):
        world.claim("judge-a")
    assert world.query(find_owner, world.owner_id("judge-a")).standing == Standing.LIMITED
    assert state_of(world, submission) == SubmissionState.RECEIVED
    world.judge("judge-b")
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert world.balance("stake", "ann") == 2000
    world.wait(world.params.limited_s)
    assert world.claim("judge-a").job is not None, "it may judge again"


def test_who_let_a_claim_lapse_is_given_other_work_first(make_world):
    world = settle(make_world())
    world.join("w4", "ann")
    first, second = world.submit("w1", world.lease("w1")), world.submit("w4", world.lease("w4"))
    assert world.take("judge-a").submission == first
    world.now_ms += 1000 * world.params.claim_s  # no tick since then
    assert world.take("judge-a").submission == second
    assert world.take("judge-b").submission == first


def test_a_verdict_ends_the_row_of_lapses(make_world):
    world = settle(make_world(limit_lapses=2))
    for _ in range(3):
        submission = world.submit("w1", world.lease("w1"))
        job = world.take("judge-a")
        world.wait(world.params.claim_s)
        world.post("judge-a", world.describe_verdict(job))
        assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert world.query(find_owner, world.owner_id("judge-a")).lapses == 0


def test_soft_rejections_in_a_row_limit_an_owner_and_time_lifts_it(make_world):
    world = make_world(limit_after=2, groups_per_batch=20)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1", Verdict.SOFT)
    world.wait(1)
    world.work("w1", Verdict.SOFT)
    assert world.coordinator.cache.standings[world.owner_id("ann")] is Standing.LIMITED
    world.wait(world.params.limited_s)
    assert world.coordinator.cache.standings[world.owner_id("ann")] is Standing.PROBATION


def test_accepted_work_makes_an_owner_good_and_its_checks_fewer(make_world):
    world = make_world(groups_per_batch=20, good_after=2, group_size=8)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    world.work("w1")
    assert world.query(find_owner, world.owner_id("ann")).standing == Standing.GOOD
    world.submit("w1", world.lease("w1"))
    assert world.take("judge-a").check_ppm == world.params.check_share(Standing.GOOD, 8) == 250_000


def test_validators_are_paid_for_clear_verdicts(make_world):
    world = make_world(verdict_price=7)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1", Verdict.INCONCLUSIVE)
    world.judge("judge-b")
    assert (world.balance("stake", "judge-a"), world.balance("stake", "judge-b")) == (0, 7)
    world.submit("w1", world.lease("w1"))
    world.judge("judge-b")
    assert (world.balance("stake", "judge-b"), world.balance("pending", "judge-b")) == (7, 7)


def test_a_file_is_read_by_its_validator_and_the_trainer_alone(world):
    submission = world.submit("w1", world.lease("w1"))
    with pytest.raises(ApiError, match="may not read it"):
        world.run(world.coordinator.open_blob(world.id("judge-a"), submission))
    world.take("judge-a")
    assert world.run(world.coordinator.open_blob(world.id("judge-a"), submission))
    assert world.run(world.coordinator.open_blob(world.id("trainer"), submission))
    for reader in ("w2", "judge-b"):
        with pytest.raises(ApiError, match="may not read it"):
            world.run(world.coordinator.open_blob(world.id(reader), submission))


def test_verdicts_are_kept_with_their_rounds(world):
    submission = world.convict("w1")
    votes = world.query(list_verdicts, submission)
    assert [(vote.round, vote.verdict) for vote in votes] == [(1, "rejected_hard"), (2, "rejected_hard")]
    assert world.query(find_node, world.id("w1")).width == 1


def test_a_verdict_that_the_others_contradict_is_not_paid(make_world):
    world = make_world(verdict_price=7)
    world.join("w1", "ann")
    world.publish(0)
    world.submit("w1", world.lease("w1"))
    world.judge("judge-a", Verdict.HARD)
    world.judge("judge-b")
    world.judge("judge-c")
    paid = [world.balance("stake", f"judge-{name}") for name in "abc"]
    assert paid == [0, 7, 7]
