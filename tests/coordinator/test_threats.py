"""Attacks on leases, submissions, the queue and credit: what they gain, in credit and in work."""

from shoal.coordinator.state.members import find_node, find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.protocol.messages import SubmissionState, Verdict


def state_of(world, submission):
    return world.query(find_submission, submission).state


def start(world, *names):
    for name in names:
        world.join(name, f"owner of {name}")
    world.publish(0)
    return world


def test_a_thousand_identities_with_one_machine_earn_no_more_than_one(make_world):
    settings = {"groups_per_batch": 2000, "async_level": 0, "stake_submissions": 2}
    honest = start(make_world(**settings), "w1")
    for _ in range(12):
        honest.work("w1")
    sybil = make_world(**settings)
    names = [f"w{number}" for number in range(1000)]
    start(sybil, *names)
    for name in names[:12]:  # as much as the machine can do
        sybil.work(name)
    paid = [-world.balance("mint", "") for world in (honest, sybil)]
    assert paid[0] == paid[1] == 12 * 2000
    for world in (honest, sybil):
        world.wait(world.params.challenge_s)
    assert honest.balance("avail", "owner of w1") == 10 * 2000
    assert all(sybil.balance("avail", f"owner of {name}") == 0 for name in names[:12]), "all of it is bonds"


def test_one_copied_sample_in_another_file_is_found(world):
    lease = world.lease("w1")
    world.submit("w1", lease)
    world.judge("judge-a")
    stolen = world.make_manifest(lease).rollouts[1]
    mine = world.lease("w2")
    rollouts = (world.make_manifest(mine, salt="own").rollouts[0], stolen)
    copied = world.submit("w2", mine, salt="own", rollouts=rollouts)
    job = world.take("judge-a")
    assert job.duplicates == (1,)
    world.post("judge-a", world.describe_verdict(job, Verdict.SOFT))
    assert state_of(world, copied) == SubmissionState.SOFT
    assert (world.balance("stake", "ann"), world.balance("stake", "bob")) == (2000, 0)


def test_own_old_work_with_other_metadata_is_not_paid_again(world):
    lease = world.lease("w1")
    world.submit("w1", lease)
    world.judge("judge-a")
    again = world.submit("w1", world.lease("w1"), salt="other bytes", rollouts=world.make_manifest(lease).rollouts)
    job = world.take("judge-a")
    assert job.duplicates == (0, 1), "all of it is checked"
    world.post("judge-a", world.describe_verdict(job, Verdict.SOFT))
    assert state_of(world, again) == SubmissionState.SOFT
    assert world.balance("mint", "") == -2000


def test_who_returns_what_it_does_not_like_meets_it_again_and_gets_less(make_world):
    world = start(make_world(groups_per_batch=8, async_level=0, raise_after=1, probation_leases=8), "w1", "w2")
    for _ in range(3):
        world.work("w1")
    assert world.query(find_node, world.id("w1")).width == 4
    disliked = [world.lease("w1") for _ in range(4)]
    for lease in disliked:
        world.run(world.coordinator.return_lease(world.id("w1"), lease.lease))
    assert world.query(find_node, world.id("w1")).width == 1
    world.wait(1)
    again = world.lease("w1")
    assert again.first == disliked[0].first, "the same task"
    world.run(world.coordinator.return_lease(world.id("w1"), again.lease))
    world.wait(1)
    again = world.lease("w1")
    assert again.first == disliked[0].first, "and again"
    assert world.ask("w1").code == "busy"
    world.run(world.coordinator.return_lease(world.id("w1"), again.lease))
    assert world.ask("w1").code == "resting", "three consecutive failures"


def test_endless_taking_and_returning_stops_nobody(make_world):
    world = start(make_world(groups_per_batch=2, async_level=0), "evil", "w1", "w2")
    waited_s, held = 0, world.lease("evil")
    world.work("w1")
    while (answer := world.ask("w2")).lease is None:
        world.wait(world.params.lease_first_s // 2 - 1)
        waited_s += world.params.lease_first_s // 2 - 1
        assert waited_s < 2 * world.params.lease_first_s
        world.run(world.coordinator.return_lease(world.id("evil"), held.lease))
        held = world.ask("evil").lease or held
    world.submit("w2", answer.lease)
    world.judge("judge-a")
    assert world.train(1).version == 1


def test_committing_and_never_uploading_stops_nobody(make_world):
    world = start(make_world(groups_per_batch=2, async_level=0, upload_s=3000), "evil", "w1", "w2")
    held = world.lease("evil")
    world.work("w1")
    world.commit("evil", world.make_manifest(held, size=2**16))
    world.wait(world.params.lease_first_s // 2)
    backup = world.lease("w2")
    assert backup.first == held.first
    world.submit("w2", backup)
    world.judge("judge-a")
    assert world.train(1).version == 1


def test_leaving_with_open_work_gets_the_same_tasks_and_a_lower_limit(make_world):
    world = start(make_world(groups_per_batch=8, async_level=0, raise_after=1, probation_leases=8), "w1", "w2")
    for _ in range(3):
        world.work("w1")
    disliked = world.lease("w1")
    world.run(world.coordinator.leave(world.id("w1")))
    assert world.query(find_node, world.id("w1")).width == 2
    assert world.lease("w2").first != disliked.first
    world.join("w1", "owner of w1")
    assert world.lease("w1").first == disliked.first


def test_leases_that_fail_together_are_one_failure_and_accepted_work_forgives_all(make_world):
    world = start(make_world(groups_per_batch=9, async_level=0, raise_after=1, probation_leases=8), "w1")
    for _ in range(3):
        world.work("w1")
    for _ in range(4):
        world.lease("w1")
    world.wait(world.params.lease_first_s)
    owner = world.owner_id("owner of w1")
    assert world.query(find_owner, owner).failures == 1
    world.work("w1")
    assert world.query(find_owner, owner).failures == 0


def test_who_never_answers_holds_less_each_time_and_stops_nobody(make_world):
    world = start(make_world(groups_per_batch=3, async_level=0, raise_after=1, probation_leases=8), "w1", "w2", "w3")
    world.work("w1")
    for node in ("w1", "w1"):
        world.lease(node)
    assert world.ask("w2").code == "no_need", "the hoarder holds all of it"
    world.wait(world.params.lease_first_s + world.params.reserve_s)
    world.wait(world.params.reserve_s)
    assert world.query(find_node, world.id("w1")).width == 1
    for node in ("w2", "w3"):
        world.work(node)
    assert world.train(1).version == 1
    assert world.query(find_owner, world.owner_id("owner of w1")).accepted == 1


def test_ten_times_more_work_than_can_be_judged_is_judged_all_the_same(make_world):
    settings = {"groups_per_batch": 200, "async_level": 0, "max_queue": 10, "max_pending_per_owner": 100}
    names = [f"w{number}" for number in range(30)]
    world = start(make_world(**settings, opinion_s=10**6), *names, "honest")
    sent, refused = [], 0
    for name in (*names, "honest"):
        answer = world.ask(name)
        if answer.lease is None:
            refused += answer.code == "queue_full"
        else:
            sent.append(world.submit(name, answer.lease))
    assert (len(sent), refused) == (10, 21), "no leases are granted while the queue is full"
    world.wait(10**5)
    assert all(state_of(world, name) == SubmissionState.RECEIVED for name in sent), "nothing lapses unjudged"
    for number in range(10):
        world.judge("judge-a", Verdict.ACCEPTED if number % 2 else Verdict.SOFT)
    assert sorted(state_of(world, name) for name in sent) == 5 * ["accepted"] + 5 * ["rejected_soft"]
    assert world.ask("honest").lease is not None
