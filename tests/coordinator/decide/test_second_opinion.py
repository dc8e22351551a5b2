"""Second opinions, and what happens to validators whose verdicts others contradict."""

import pytest
from tests.fixtures.world import SECRET

from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.coordinator.state.validators import find_grade, find_opinion_need, find_validator
from shoal.identity.delegation import Scope
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import BeaconChain
from shoal.protocol.messages import Action, Standing, SubmissionState, Verdict

ALL = {"second_share": 1_000_000, "reject_share": 1_000_000, "groups_per_batch": 200, "probation_leases": 64}
DATABASES = ("sqlite", "postgresql")


@pytest.fixture
def doubting(make_world):
    """A run in which everything is judged by two owners of three."""
    return begin(make_world(**ALL))


def begin(world):
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    return world


def hand_in(world, node="w1"):
    return world.submit(node, world.lease(node))


def state_of(world, submission):
    return world.query(find_submission, submission).state


def judge_of(world, owner):
    return world.query(find_validator, world.owner_id(owner))


def standing_of(world, owner):
    return world.query(find_owner, world.owner_id(owner)).standing


def contradict(world, verdict=Verdict.SOFT, node="w1"):
    """judge-a gives a verdict on good work that two others contradict."""
    submission = hand_in(world, node)
    world.judge("judge-a", verdict)
    for judge in ("judge-b", "judge-c"):
        world.judge(judge)
    return submission


def test_an_acceptance_waits_for_a_second_one_and_is_paid_when_two_agree(doubting):
    submission = hand_in(doubting)
    answer = doubting.judge("judge-a")
    assert (answer.record.state, answer.record.paid) == (SubmissionState.RECEIVED, 0)
    assert doubting.query(find_opinion_need, submission).because == "drawn"
    assert doubting.claim("judge-a").job is None
    answer = doubting.judge("judge-b")
    assert (answer.record.state, answer.record.paid) == (SubmissionState.ACCEPTED, 2000)
    assert "a second opinion was drawn" in doubting.coordinator.explain(submission)
    assert "all validators that judged it were right" in doubting.coordinator.explain(submission)


def test_a_rejection_needs_another_but_for_suspects_except_the_one_that_bans(make_world):
    world = begin(make_world(**{**ALL, "second_share": 0, "limit_after": 2}))
    for number in range(4):
        submission = hand_in(world)
        world.judge("judge-a", Verdict.FORM)
        need = world.query(find_opinion_need, submission)
        assert (need is not None and need.because == "rejected") is (number in (0, 3)), "confirmed: judged once"
        if number in (0, 3):
            world.judge("judge-b", Verdict.FORM)
        assert state_of(world, submission) == SubmissionState.FORM
        world.wait(100)
        if number in (1, 2):
            world.join("w1", "ann")
    assert standing_of(world, "ann") == Standing.BANNED
    submission = hand_in(world, "w2")
    world.judge("judge-a")
    assert state_of(world, submission) == SubmissionState.ACCEPTED


def test_which_accepted_work_gets_a_second_opinion_is_drawn_by_the_secret(make_world):
    world = begin(make_world(**{**ALL, "second_share": 500_000}))
    chain, asked = BeaconChain(SECRET, world.params.steps), []
    for _ in range(12):
        submission = hand_in(world)
        is_drawn = world.judge("judge-a").record.state == SubmissionState.RECEIVED
        row = world.query(find_submission, submission)
        assert is_drawn is (chain.draw_second(submission, row.blob) < 500_000)
        if is_drawn:
            world.judge("judge-b")
        asked.append(is_drawn)
    assert 0 < sum(asked) < 12


def test_with_one_owner_of_validators_nothing_is_asked(make_world):
    world = begin(make_world(**ALL))
    world.change(validators=(world.owner_id("judge-a"),))
    for verdict in (Verdict.ACCEPTED, Verdict.SOFT):
        submission = hand_in(world)
        world.judge("judge-a", verdict)
        assert state_of(world, submission) == verdict.value
    assert judge_of(world, "judge-a").graded == 0


def test_if_nobody_gives_a_second_opinion_the_first_one_stands(doubting):
    accepted = hand_in(doubting)
    doubting.judge("judge-a")
    rejected = hand_in(doubting, "w2")
    doubting.judge("judge-a", Verdict.SOFT)
    doubting.wait(doubting.params.claim_s)
    assert [state_of(doubting, name) for name in (accepted, rejected)] == ["accepted", "rejected_soft"]
    assert "nobody was there to give another opinion" in doubting.coordinator.explain(accepted)
    assert doubting.balance("stake", "ann") == 2000, "with the numbers of the acceptance"
    assert judge_of(doubting, "judge-a").graded == 0


def test_the_run_waits_for_a_busy_validator(doubting):
    submission = hand_in(doubting)
    doubting.judge("judge-a")
    other = hand_in(doubting, "w2")
    doubting.wait(doubting.params.claim_s - 1)
    job = next(job for job in (doubting.take("judge-b"),) if job.submission in (submission, other))
    doubting.post("judge-b", doubting.describe_verdict(job))
    left = submission if job.submission == other else other
    doubting.wait(1)
    assert state_of(doubting, left) == SubmissionState.RECEIVED, "judge-b has given a verdict since it is waiting"


def test_a_single_conviction_is_unpaid_and_bans_nobody_without_another_validator(doubting):
    submission = hand_in(doubting)
    doubting.judge("judge-a", Verdict.HARD)
    doubting.wait(doubting.params.claim_s)
    assert state_of(doubting, submission) == SubmissionState.SOFT
    assert standing_of(doubting, "ann") == Standing.PROBATION


def test_a_second_opinion_checks_the_same_rollouts_as_the_first(make_world):
    world = begin(make_world(**ALL, group_size=8, good_after=1, check_power=999_999, guarantee_fraction=900_000))
    world.submit("w1", world.lease("w1"))
    for judge in ("judge-a", "judge-b"):
        world.judge(judge)
    assert standing_of(world, "ann") == Standing.GOOD
    hand_in(world)
    first = world.take("judge-a")
    assert first.check_ppm < 1_000_000
    world.judge("judge-a")
    assert world.take("judge-b").check_ppm == first.check_ppm
    world.judge("judge-b", Verdict.HARD)
    assert world.take("judge-c").check_ppm == first.check_ppm


def test_a_rejection_is_confirmed_by_a_check_of_all_rollouts(make_world):
    world = begin(make_world(**ALL, group_size=8, good_after=1, check_power=999_999, guarantee_fraction=900_000))
    hand_in(world)
    for judge in ("judge-a", "judge-b"):
        world.judge(judge)
    hand_in(world)
    world.judge("judge-a", Verdict.SOFT)
    assert world.take("judge-b").check_ppm == 1_000_000


@pytest.mark.parametrize("verdict", [Verdict.FORM, Verdict.SOFT, Verdict.HARD])
def test_a_lone_liar_harms_nobody_but_itself(make_world, verdict):
    world = begin(make_world(**ALL, verdict_price=7))
    submission = contradict(world, verdict)
    assert state_of(world, submission) == SubmissionState.ACCEPTED
    assert world.balance("stake", "ann") == 2000
    ann = world.query(find_owner, world.owner_id("ann"))
    assert (ann.rejected, ann.strikes) == (0, 0)
    assert [world.balance("stake", judge) for judge in ("judge-a", "judge-b", "judge-c")] == [0, 7, 7]
    assert (judge_of(world, "judge-a").good, judge_of(world, "judge-a").wrong) == (14, 1)
    assert judge_of(world, "judge-b").wrong == 0
    assert f"validator {world.id('judge-a')} was wrong about it" in world.coordinator.explain(submission)


def test_a_contradicted_validator_is_limited_then_loses_its_bond_and_its_standing(make_world):
    world = begin(make_world(**ALL, verdict_price=7, stake_submissions=9, limited_s=50))
    hand_in(world)
    world.judge("judge-a")
    world.judge("judge-b")
    assert world.balance("stake", "judge-a") == 7
    contradict(world)
    assert standing_of(world, "judge-a") == Standing.PROBATION
    contradict(world)
    assert standing_of(world, "judge-a") == Standing.LIMITED
    with pytest.raises(ApiError, match="may not judge"):
        world.claim("judge-a")
    assert world.balance("stake", "judge-a") == 7
    world.wait(50)
    contradict(world)
    assert standing_of(world, "judge-a") == Standing.BANNED
    assert (world.balance("stake", "judge-a"), world.balance("burn", "")) == (0, 7)
    with pytest.raises(ApiError, match="banned"):
        world.claim("judge-a")
    assert [judge_of(world, judge).wrong for judge in ("judge-a", "judge-b", "judge-c")] == [3, 0, 0]


def test_accepting_bad_work_scores_points_that_good_work_does_not_remove(doubting):
    hand_in(doubting)
    doubting.judge("judge-a")
    doubting.judge("judge-b", Verdict.SOFT)
    doubting.judge("judge-c", Verdict.SOFT)
    for _ in range(5):
        hand_in(doubting, "w2")
        doubting.judge("judge-a")
        doubting.judge("judge-b")
    judge = judge_of(doubting, "judge-a")
    assert (judge.bad, judge.good, judge.graded, judge.wrong) == (14, 0, 6, 1)


def test_to_accept_with_other_numbers_is_a_contradiction(doubting):
    submission = hand_in(doubting)
    doubting.judge("judge-a", signal=False)
    doubting.judge("judge-b")
    assert state_of(doubting, submission) == SubmissionState.RECEIVED
    doubting.judge("judge-c")
    assert state_of(doubting, submission) == SubmissionState.ACCEPTED
    assert (judge_of(doubting, "judge-a").good, judge_of(doubting, "judge-b").good) == (14, 0)


def test_honest_doubt_is_not_graded(doubting):
    """Numbers near a threshold, and validators that were not sure."""
    for verdicts, statistic in (
        ((Verdict.HARD, Verdict.ACCEPTED, Verdict.ACCEPTED), "0.2"),
        ((Verdict.ACCEPTED, Verdict.SOFT, Verdict.SOFT), "0.3"),
        ((Verdict.INCONCLUSIVE, Verdict.ACCEPTED, Verdict.ACCEPTED), "0.1"),
    ):
        submission = hand_in(doubting)
        for judge, verdict in zip(("judge-a", "judge-b", "judge-c"), verdicts, strict=True):
            doubting.judge(judge, verdict, statistic=statistic)
        assert state_of(doubting, submission) in ("accepted", "rejected_soft")
    assert judge_of(doubting, "judge-a").graded == 0
    assert judge_of(doubting, "judge-b").wrong == 0


def test_two_that_contradict_each_other_blame_nobody(make_world):
    world = begin(make_world(**ALL))
    world.change(validators=tuple(world.owner_id(judge) for judge in ("judge-a", "judge-b")))
    submission = hand_in(world)
    world.judge("judge-a", Verdict.SOFT)
    world.judge("judge-b")
    assert state_of(world, submission) == SubmissionState.INCONCLUSIVE
    assert judge_of(world, "judge-a").graded == judge_of(world, "judge-b").graded == 0
    assert world.query(find_owner, world.owner_id("ann")).rejected == 0


def test_verdicts_of_a_validator_banned_since_do_not_count(doubting):
    submission = hand_in(doubting)
    doubting.judge("judge-a", Verdict.SOFT)
    doubting.order(Action.BAN, target=doubting.owner_id("judge-a"))
    doubting.judge("judge-b")
    doubting.judge("judge-c")
    assert state_of(doubting, submission) == SubmissionState.ACCEPTED
    assert doubting.query(find_grade, submission, doubting.owner_id("judge-a")) is None


def test_an_unban_resets_the_scores(doubting):
    for _ in range(3):
        contradict(doubting)
        doubting.wait(doubting.params.limited_s)
    assert standing_of(doubting, "judge-a") == Standing.BANNED
    doubting.order(Action.UNBAN, target=doubting.owner_id("judge-a"))
    assert (judge_of(doubting, "judge-a").good, judge_of(doubting, "judge-a").wrong) == (0, 3)


def test_an_appeal_is_not_decided_by_waiting(make_world):
    """One clears what two convicted, and nobody else answers: that is not enough."""
    world = begin(make_world(**ALL))
    judges = [f"judge-{letter}" for letter in "abcde"]
    for judge in judges[3:]:
        world.join(judge, judge, scopes={Scope.VALIDATE})
    world.change(validators=tuple(world.owner_id(judge) for judge in judges))
    submission = hand_in(world)
    for judge in judges[:2]:
        world.judge(judge, Verdict.HARD)
    assert state_of(world, submission) == SubmissionState.HARD
    world.appeal("ann", submission)
    world.judge("judge-c")
    world.wait(world.params.opinion_s)
    assert state_of(world, submission) == SubmissionState.HARD
