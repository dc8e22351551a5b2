"""Owners of rubbish: they are shut out, cost others little, and cannot hold up a step."""

import pytest

from shoal.coordinator.rules.leases import CHARGE
from shoal.coordinator.rules.standing import FAULT, STRIKE
from shoal.coordinator.state.leases import find_range, list_group_times, read_trials
from shoal.coordinator.state.members import find_ban, find_owner
from shoal.coordinator.state.run import find_step
from shoal.ledger.event import EventKind
from shoal.ledger.reader import count_events, read_events
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import derive_group, show_seeds
from shoal.protocol.messages import Heartbeat, LeaseProgress, SubmissionState, Verdict

HOUR = 3600


@pytest.fixture
def run(make_world):
    """A run in which ann has a record and bob has none."""
    world = make_world(groups_per_batch=40, groups_per_lease=1)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    world.work("w1")
    return world


def _read_events(connection):
    return list(read_events(connection, 0, count_events(connection)))


def owner_of(world, name):
    return world.query(find_owner, world.owner_id(name))


def insist(world, node, owner):
    """A lease, after a new proof of work if that is needed."""
    answer = world.ask(node)
    if answer.code == "work":
        world.join(node, owner)
        answer = world.ask(node)
    return answer.lease


def give_back(world, node, lease):
    return world.run(world.coordinator.return_lease(world.id(node), lease.lease))


def spacing_of(world):
    return world.query(read_trials).spacing_ms


def test_rubbish_pauses_longer_each_time_needs_a_new_proof_of_work_and_is_banned(run):
    rests = []
    for number in range(1, 7):
        run.wait(64)
        if number > 3:
            assert run.ask("w2").code == "work", "resting is over, but a proof of work is needed"
            run.join("w2", "bob")
        run.work("w2", Verdict.FORM)
        if number < 6:
            answer = run.ask("w2")
            rests.append(answer.retry_after_s if answer.code == "resting" else 0)
            assert not rests[-1] or f"paused for {rests[-1]} s" in answer.reason
            run.wait(rests[-1])
    assert rests == [0, 0, 40, 80, 160]
    ban = run.query(find_ban, run.id("w2"), run.owner_id("bob"))
    assert ban is not None and "too much rejected work" in ban.reason
    with pytest.raises(ApiError, match="banned"):
        run.ask("w2")
    assert run.verify().holds


@pytest.mark.parametrize("period", [2, 3, 4])
def test_an_honest_submission_now_and_then_does_not_help(run, period):
    """The first of every `period` submissions is accepted; four in five would have to be."""
    for number in range(40):
        run.wait(HOUR)
        if run.query(find_ban, run.id("w2"), run.owner_id("bob")) is not None:
            break
        run.submit("w2", insist(run, "w2", "bob"))
        run.judge("judge-a", Verdict.ACCEPTED if number % period == 0 else Verdict.SOFT)
    assert run.query(find_ban, run.id("w2"), run.owner_id("bob")) is not None
    assert owner_of(run, "bob").accepted < 14


def test_a_rejection_that_an_appeal_reverses_is_forgotten(run):
    for _ in range(2):
        submission = run.work("w1", Verdict.SOFT)
        assert owner_of(run, "ann").strikes == STRIKE
        run.appeal("ann", submission)
        run.judge("judge-b")
        assert owner_of(run, "ann").strikes == 0
    assert run.verify().holds


def test_the_ban_of_rejected_work_ends_with_a_right_appeal(run):
    submissions = []
    for _ in range(6):
        run.wait(HOUR)
        submissions.append(run.submit("w2", insist(run, "w2", "bob")))
        run.judge("judge-a", Verdict.SOFT)
    assert run.query(find_ban, run.id("w2"), run.owner_id("bob")) is not None
    assert "too much rejected work" in run.coordinator.find_member(run.id("w2")).ban.reason
    assert "A right appeal lifts the ban" in run.coordinator.explain(submissions[-1])
    run.appeal("bob", submissions[-1])
    run.judge("judge-b")
    assert run.query(find_ban, run.id("w2"), run.owner_id("bob")) is None
    assert run.verify().holds


def test_a_proof_of_work_that_was_done_before_does_not_count(run):
    for _ in range(3):
        run.wait(64)
        run.work("w2", Verdict.FORM)
        run.join("w3", "bob")  # another node of the same owner, before it is asked for
    run.wait(64)
    assert owner_of(run, "bob").renewed == 1
    run.work("w2", Verdict.FORM)
    run.wait(100)
    assert run.ask("w2").code == "work", "each further rejection takes another one"


@pytest.mark.parametrize("trial_max_s", [0, 64])
def test_leases_without_any_delivery_are_paid_for(make_world, trial_max_s):
    """Three are paid by the proof of work of joining, each further one takes another, at any spacing."""
    world = make_world(groups_per_batch=50, trial_max_s=trial_max_s)
    world.join("w2", "bob")
    world.publish(0)
    for number in range(6):
        world.wait(2 * trial_max_s + 100)
        if number >= 3:
            assert world.ask("w2").code == "work"
            with pytest.raises(ApiError, match="used before"):
                world.join("w2", "bob", is_paid=False)
            world.join("w2", "bob")
        give_back(world, "w2", world.lease("w2"))
    joins = [event for event in world.query(_read_events) if event.kind == EventKind.NODE_JOIN]
    assert sum(event.content["owner"] == world.owner_id("bob") for event in joins) == 4


def test_accepted_work_ends_the_payments_for_failed_leases(run):
    for _ in range(4):
        run.wait(HOUR)
        give_back(run, "w2", insist(run, "w2", "bob"))
    for _ in range(8):
        run.wait(HOUR)
        lease = insist(run, "w2", "bob")
        run.submit("w2", lease)
        run.judge("judge-a")
    assert owner_of(run, "bob").has_record and run.ask("w2").code != "work"


def test_a_stamp_that_was_used_does_not_pay_for_further_leases(run):
    for _ in range(3):
        run.wait(64)
        run.work("w2", Verdict.FORM)
    run.wait(64)
    with pytest.raises(ApiError, match="used before"):
        run.join("w2", "bob", is_paid=False)
    assert run.ask("w2").code == "work"
    run.join("w2", "bob")
    assert run.lease("w2")
    run.join("w2", "bob", is_paid=False)
    assert run.verify().holds


def test_whoever_is_not_of_record_is_a_stranger_when_it_joins_and_uploads(run):
    assert run.coordinator.find_payer(run.id("w1")) == run.owner_id("ann")
    submission = run.work("w1", Verdict.SOFT)
    assert run.coordinator.find_payer(run.id("w1")) == ""
    run.restart()
    assert run.coordinator.find_payer(run.id("w1")) == ""
    run.appeal("ann", submission)
    run.judge("judge-b")
    assert run.coordinator.find_payer(run.id("w1")) == run.owner_id("ann")


def test_cpu_time_of_validators_is_charged(run):
    submission = run.submit("w2", run.lease("w2"))
    job = run.take("judge-a")
    assert job.bounded
    run.post("judge-a", run.describe_verdict(job, Verdict.FORM).model_copy(update={"cpu_ms": 500}))
    assert run.query(find_range, job.step, job.first).submission != submission
    answer = run.ask("w2")
    assert (answer.code, answer.retry_after_s) == ("resting", CHARGE * 500 // 1000)
    run.submit("w1", run.lease("w1"))
    job = run.take("judge-a")
    run.post("judge-a", run.describe_verdict(job).model_copy(update={"cpu_ms": 500}))
    assert run.ask("w1").lease is not None, "accepted work is paid for"
    assert run.verify().holds


def test_one_accepted_submission_does_not_buy_cpu_time_of_validators(run):
    for _ in range(run.params.good_after - 1):
        run.submit("w1", run.lease("w1"))
        job = run.take("judge-a")
        assert job.bounded
        run.post("judge-a", run.describe_verdict(job))
    run.submit("w1", run.lease("w1"))
    job = run.take("judge-a")
    assert not job.bounded, "ann is in good standing"
    run.post("judge-a", run.describe_verdict(job, Verdict.SOFT))
    run.submit("w1", run.lease("w1"))
    assert run.take("judge-a").bounded, "and of record no more"


def test_an_appeal_is_read_under_the_same_limit_and_charged(run):
    submission = run.submit("w2", run.lease("w2"))
    run.post("judge-a", run.describe_verdict(run.take("judge-a"), Verdict.FORM).model_copy(update={"cpu_ms": 200}))
    run.appeal("bob", submission)
    job = run.take("judge-b")
    assert job.bounded
    run.post("judge-b", run.describe_verdict(job, Verdict.FORM).model_copy(update={"cpu_ms": 300}))
    answer = run.ask("w2")
    assert (answer.code, answer.retry_after_s) == ("resting", CHARGE * 500 // 1000)
    assert run.verify().holds


def test_work_that_is_rejected_together_is_charged_together(run):
    run.join("w3", "bob")
    for node in ("w2", "w3"):
        run.submit(node, run.lease(node))
    for _ in range(2):
        run.post("judge-a", run.describe_verdict(run.take("judge-a"), Verdict.FORM).model_copy(update={"cpu_ms": 500}))
    assert run.ask("w2").retry_after_s == CHARGE * 1000 // 1000


def test_leases_that_a_backup_makes_up_for_cost_an_owner_its_record(make_world):
    """It need not fail: it holds what a step needs until others have done it, after one honest submission."""
    world = make_world(groups_per_batch=2, async_level=0, steps=3, lease_first_s=60)
    world.publish(0)
    for name in ("honest", "holder"):
        world.join(name, name)
        world.work(name, signal=False)
    world.join("holder-2", "holder")
    held = [world.lease(name) for name in ("holder", "holder-2")]
    assert world.ask("honest").code == "no_need"
    world.wait(30)
    for lease in held:
        again = world.lease("honest")
        assert (again.first, again.fence) == (lease.first, 2)
        world.submit("honest", again)
        world.judge("judge-a")
    holder = owner_of(world, "holder")
    assert (holder.strikes, holder.failures) == (2 * FAULT, 0) and not holder.has_record
    assert world.ask("holder").code != "resting", "it may only be slow"
    assert owner_of(world, "honest").strikes == 0
    assert world.verify().holds


def test_owners_of_record_that_hold_whatever_there_is_delay_few_steps(make_world):
    """One accepted submission each; then they take every lease first and deliver nothing."""
    world = make_world(groups_per_batch=4, async_level=0, steps=10, lease_first_s=60)
    world.publish(0)
    holders = [(f"holder-{number}", f"owner-{number // 2}") for number in range(6)]
    for node, owner in (("honest", "honest"), *holders):
        world.join(node, owner)
    for node in ("honest", *(node for node, _ in holders[::2])):
        world.work(node, signal=False)
    seconds = 0
    for step in range(1, 11):
        while world.cut(step).batch is None:
            for node, _ in holders:
                world.ask(node)
            if (lease := world.ask("honest").lease) is None:
                seconds += 1
                world.wait(1)
            else:
                world.submit("honest", lease)
                world.judge("judge-a")
            assert seconds < 120, f"{step - 1} steps"
        world.train(step)
    assert not any(owner_of(world, owner).has_record for _, owner in holders)
    assert world.verify().holds


def test_a_backup_that_comes_too_late_is_no_fault(make_world):
    world = make_world(groups_per_batch=1, async_level=0, lease_first_s=60)
    world.publish(0)
    for name in ("first", "backup"):
        world.join(name, name)
        world.work(name, signal=False)
    lease = world.lease("first")
    world.wait(30)
    again = world.lease("backup")
    assert again.first == lease.first
    world.submit("first", lease)
    world.judge("judge-a")
    assert owner_of(world, "backup").strikes == 0


def test_leases_that_fail_together_are_one_failure_but_each_is_a_fault(run):
    run.join("w3", "ann")
    leases = [(node, run.lease(node)) for node in ("w1", "w3")]
    run.wait(1)
    for node, lease in leases:
        give_back(run, node, lease)
    ann = owner_of(run, "ann")
    assert (ann.failures, ann.strikes) == (1, 2 * FAULT) and not ann.has_record


def test_what_nobody_can_judge_is_no_fault_but_costs_a_new_owner_its_time(run):
    run.submit("w2", run.lease("w2"))
    for judge in ("judge-a", "judge-b", "judge-c"):
        job = run.take(judge)
        statement = run.describe_verdict(job, Verdict.INCONCLUSIVE, check="limit")
        run.post(judge, statement.model_copy(update={"cpu_ms": 100}))
    bob = owner_of(run, "bob")
    assert (bob.rejected, bob.strikes, bob.failures) == (0, 0, 0)
    assert bob.charge_ms == CHARGE * 300 and spacing_of(run) == 1000
    assert run.verify().holds


def test_trials_of_all_owners_without_a_record_together_are_rare_while_they_fail(run):
    names = [f"r{number}" for number in range(10)]
    for name in names:
        run.join(name, name)
    granted = 0
    for second in range(300):
        run.wait(1)
        for name in names:
            lease = run.ask(name).lease
            if lease is not None:
                granted += 1
                run.submit(name, lease)
                run.judge("judge-a", Verdict.FORM)
        if second % 10 == 0:
            run.work("w1", signal=False)
    assert granted <= 10 + 12, "each once before the first failed, then 1, 2, 4, ... 64 s apart"
    assert spacing_of(run) == 64_000
    assert run.verify().holds


def test_a_newcomer_gets_a_trial_although_others_ask_before_it_each_time(run):
    names = [f"rubbish-{number}" for number in range(4)]
    for name in ("newcomer", *names):
        run.join(name, name)
    run.work("w2", Verdict.FORM)
    lost = 0
    while run.ask("newcomer").lease is None:
        run.wait(4)
        for name in names:
            if (lease := run.ask(name).lease) is not None:
                lost += 1
                run.submit(name, lease)
                run.judge("judge-a", Verdict.FORM)
        run.work("w1", signal=False)
        assert lost <= len(names), "it waits for none of them twice"


def test_a_trial_gets_a_group_of_the_highest_step_and_never_one_that_a_trial_lost(run):
    run.work("w2", Verdict.FORM)
    run.wait(1)
    run.join("w3", "eve")
    trial = run.lease("w3")
    assert (trial.step, trial.first, trial.count) == (2, 0, 1)
    run.submit("w3", trial)
    run.judge("judge-a", Verdict.FORM)
    run.wait(2)
    run.join("w4", "dan")
    assert run.lease("w4").first == 1
    again = run.lease("w1")
    assert (again.step, again.fence) == (1, 2), "owners of record make up for it"


def test_accepted_trials_lift_the_restriction(run):
    run.work("w2", Verdict.FORM)
    assert spacing_of(run) == 1000
    run.join("w3", "eve")
    assert run.ask("w3").code == "trial"
    run.wait(1)
    run.work("w3")
    assert spacing_of(run) == 0 and owner_of(run, "eve").has_record


def test_a_lone_owner_whose_work_was_rejected_may_try_again(make_world):
    world = make_world(groups_per_batch=1, async_level=0)
    world.publish(0)
    world.join("w1", "ann")
    world.work("w1", Verdict.FORM)
    world.wait(1)
    world.work("w1")
    world.train(1)


def test_without_owners_of_record_new_ones_are_not_restricted(make_world):
    world = make_world(groups_per_batch=40)
    world.publish(0)
    for name in ("rubbish", "new"):
        world.join(name, name)
    world.work("rubbish", Verdict.FORM)
    assert world.ask("rubbish").code == "trial"
    assert world.ask("new").lease is not None


def test_new_owners_take_over_if_those_of_record_are_gone(run):
    run.work("w2", Verdict.FORM)
    run.join("w3", "eve")
    assert run.ask("w3").code == "trial"
    run.wait(run.params.lease_first_s + 1)
    for _ in range(3):
        run.work("w3")


def test_silent_owners_without_a_record_do_not_hold_up_a_step(make_world):
    """Twelve take everything before anyone has a record; one honest worker still trains the run."""
    world = make_world(groups_per_batch=4, async_level=0, steps=5)
    world.publish(0)
    world.join("honest", "honest")
    for number in range(12):
        world.join(f"r{number}", f"r{number}")
    waited = []
    for step in range(1, 6):
        seconds = 0
        while world.cut(step).batch is None:
            for number in range(12):
                world.ask(f"r{number}")
            lease = world.ask("honest").lease
            if lease is None:
                seconds += 5
                world.wait(5)
            else:
                world.submit("honest", lease)
                world.judge("judge-a")
            assert seconds < 1000
        world.train(step)
        waited.append(seconds)
    assert waited[0] <= 300 and sum(waited[1:]) <= 60, waited
    assert world.verify().holds


def test_work_of_owners_of_record_is_judged_first_and_that_of_suspects_last(run):
    run.join("w3", "eve")
    run.work("w2", Verdict.FORM)
    run.wait(1)
    suspect = run.submit("w2", run.lease("w2"))
    run.wait(1)
    new = run.submit("w3", run.lease("w3"))
    known = [run.submit("w1", run.lease("w1"))]
    assert [run.take("judge-a").submission] == known
    assert run.take("judge-b").submission == new
    assert run.take("judge-c").submission == suspect


def test_a_job_of_a_suspect_is_not_put_off_forever(run):
    run.work("w2", Verdict.FORM)
    run.wait(1)
    suspect = run.submit("w2", run.lease("w2"))
    run.work("w1")
    run.wait(run.params.claim_s)
    run.submit("w1", run.lease("w1"))
    assert run.take("judge-a").submission == suspect, "its owner was served longer ago"


def test_a_lease_reveals_its_own_groups_and_the_cut_all_of_a_step(run):
    leases = [run.lease("w1"), run.lease("w2")]
    events = [event.content for event in run.query(_read_events)]
    assert all(seed not in str(events) for lease in leases for seed in lease.seeds)
    for lease in leases:
        run.submit("w1" if lease.node == run.id("w1") else "w2", lease)
    while (job := run.claim("judge-a").job) is not None:
        run.post("judge-a", run.describe_verdict(job))
    while run.cut(1).batch is None:
        run.work("w1")
    beacon = run.query(find_step, 1).beacon
    for lease in leases:
        assert lease.seeds == (show_seeds(derive_group(beacon, lease.first, lease.group_size)),)
    assert run.query(find_step, 2).beacon == ""
    assert run.verify().holds


def test_steps_are_cut_in_order_because_a_beacon_gives_those_before_it(make_world):
    world = make_world(groups_per_batch=1, async_level=2)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    held = world.lease("w1")
    world.work("w2")
    assert held.step == 1
    assert "cut in order" in world.cut(2).reason
    world.submit("w1", held)
    world.judge("judge-a")
    assert world.cut(1).batch is not None and world.cut(2).batch is not None


def test_the_version_of_a_lease_is_fixed_when_it_is_granted(make_world):
    world = make_world(groups_per_batch=1, async_level=2)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    lease = world.lease("w1")
    world.train(1)
    with pytest.raises(ApiError, match="for rollouts of v0, not of v1"):
        world.commit("w1", world.make_manifest(lease, version=1))
    submission = world.submit("w1", lease)
    assert world.judge("judge-a").record.submission == submission


def test_precomputed_groups_of_new_owners_shorten_nobodys_deadline(run):
    for number in range(12):
        run.join(f"fast-{number}", f"fast-{number}")
        run.work(f"fast-{number}", signal=False)
    assert run.query(list_group_times) == []
    lease = run.lease("w1")
    assert lease.deadline_ms - lease.granted_ms == 1000 * run.params.lease_first_s


def test_groups_that_an_owner_held_before_are_no_measurement(run):
    for _ in range(3):
        run.wait(100)
        lease = run.lease("w1")
        run.run(run.coordinator.return_lease(run.id("w1"), lease.lease))
        again = run.lease("w1")
        assert (again.step, again.first, again.fence) == (lease.step, lease.first, 2)
        run.submit("w1", again)
        run.judge("judge-a")
    assert run.query(list_group_times) == []


def test_progress_extends_a_lease_up_to_the_most(run):
    lease = run.lease("w1")
    rollouts = lease.count * lease.group_size

    def report(done):
        beat = Heartbeat(leases=(LeaseProgress(lease=lease.lease, done=done),))
        return run.coordinator.heartbeat(run.id("w1"), beat).cancelled

    run.wait(run.params.lease_first_s - 1)
    assert report(1) == ()
    run.wait(1)
    assert report(1) == (), f"1 of {rollouts} is done after 600 s: extended to 1800 s"
    run.wait(2 * run.params.lease_first_s - 1)
    assert report(1) == ()
    run.wait(1)
    assert report(1) == (lease.lease,), "no more progress"
    assert run.verify().holds


def test_reports_without_progress_extend_nothing(run):
    lease = run.lease("w2")
    for done in (0, lease.count * lease.group_size + 1):
        beat = Heartbeat(leases=(LeaseProgress(lease=lease.lease, done=done),))
        run.coordinator.heartbeat(run.id("w2"), beat)
        run.wait(run.params.lease_first_s / 2)
    assert run.coordinator.heartbeat(run.id("w2"), beat).cancelled == (lease.lease,)


def test_lease_sizes_follow_measured_durations_and_give_the_same_batches(make_world):
    """The default: one group until durations are known, then about ten seconds' worth, shared by the nodes."""
    world = make_world(groups_per_batch=32, groups_per_lease=0, async_level=0, steps=2)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    counts = []
    for step in (1, 2):
        while world.cut(step).batch is None:
            for node in ("w1", "w2"):
                lease = world.ask(node).lease
                if lease is not None:
                    counts.append(lease.count)
                    world.wait(lease.count)
                    world.submit(node, lease)
                    world.judge("judge-a")
        assert [entry.index for entry in world.cut(step).batch.groups] == list(range(32))
        world.train(step)
    assert counts[:7] == [1] * 7 and max(counts) == 10
    assert len(counts) < 20
    assert world.verify().holds


def test_rubbish_changes_no_batch(make_world):
    """k = 0: the batch is the same with and without rubbish owners."""
    hashes = []
    for rubbish in (0, 10):
        world = make_world(groups_per_batch=4, async_level=0, steps=3)
        world.publish(0)
        world.join("w1", "ann")
        names = [f"r{number}" for number in range(rubbish)]
        for name in names:
            world.join(name, name)
        for step in (1, 2, 3):
            while world.cut(step).batch is None:
                for name in names:
                    lease = world.ask(name).lease
                    if lease is not None:
                        world.submit(name, lease)
                        world.judge("judge-a", Verdict.SOFT)
                lease = world.ask("w1").lease
                if lease is None:
                    world.wait(1)
                else:
                    world.submit("w1", lease)
                    world.judge("judge-a", signal=lease.first % 3 != 1)
            world.train(step)
        hashes.append([[entry.index for entry in world.cut(step).batch.groups] for step in (1, 2, 3)])
    assert hashes[0] == hashes[1] == [[0, 2, 3, 5]] * 3


def test_a_rejected_submission_of_a_trial_is_offered_again(run):
    submission = run.work("w2", Verdict.FORM)
    assert run.coordinator.read_state(submission) == SubmissionState.FORM
    assert run.query(find_range, 1, 1).state == "offered"
