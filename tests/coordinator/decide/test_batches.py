"""Steps, batches and versions: start, tiny runs, the last step, resume."""

import pytest

from shoal.coordinator.state.leases import list_batch
from shoal.coordinator.state.run import find_step, list_steps, read_run
from shoal.identity.delegation import Scope
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import check_beacon


def fill_step(world, step, node="w1"):
    """Work until the batch of a step can be cut."""
    while world.cut(step).batch is None:
        world.work(node)


def test_a_run_goes_from_start_to_end_and_its_ledger_holds(both_world):
    world = both_world
    for step in (1, 2, 3):
        fill_step(world, step, "w1" if step % 2 else "w2")
        answer = world.publish(step, world.cut(step).batch.hash)
    assert answer.finished
    assert world.ask("w1").code == "finished"


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("async_level", [0, 1, 2, 5])
def test_tiny_runs_end(make_world, steps, async_level):
    world = make_world(steps=steps, async_level=async_level, groups_per_batch=1)
    world.join("w1", "ann")
    world.publish(0)
    for step in range(1, steps + 1):
        assert [row.step for row in world.query(list_steps, "open")] == list(
            range(step, min(step + async_level, steps) + 1)
        )
        fill_step(world, step)
        world.train(step)
    assert world.ask("w1").code == "finished"
    assert world.coordinator.cache.finished
    assert world.query(list_steps, "open") == []


def test_nothing_is_leased_before_v0(make_world):
    world = make_world()
    world.join("w1", "ann")
    assert world.ask("w1").code == "no_version"


def test_beacons_are_those_of_the_chain_in_the_genesis(world):
    tip = world.query(read_run).beacon
    assert [world.query(find_step, step).beacon for step in (1, 2)] == ["", ""], "hidden while groups are leased"
    assert world.query(find_step, 3) is None
    for step in (1, 2):
        world.work("w1")
        world.work("w1")
        world.train(step)
    first, second = (world.query(find_step, step).beacon for step in (1, 2))
    assert check_beacon(first, tip) and check_beacon(second, first)


def test_a_batch_is_cut_once_and_stays(world):
    fill_step(world, 1)
    first = world.cut(1)
    assert world.cut(1) == first
    assert world.run(world.coordinator.get_batch(world.id("trainer"), 1)) == first
    world.publish(1, first.batch.hash)
    assert world.cut(1) == first


def test_an_incomplete_batch_reports_what_it_lacks(world):
    world.work("w1")
    answer = world.cut(1)
    assert answer.batch is None and "1 of 2" in answer.reason
    assert "not open" in world.cut(3).reason
    with pytest.raises(ApiError, match="steps 1 to 3"):
        world.cut(4)


def test_groups_without_a_signal_are_paid_and_replaced(world):
    dull = world.work("w1", signal=False)
    while world.cut(1).batch is None:
        world.work("w2")
    batch = world.cut(1).batch
    assert [entry.index for entry in batch.groups] == [1, 2]
    assert dull not in {entry.submission for entry in batch.groups}
    assert world.balance("stake", "ann") == 10 * 200


def test_a_version_follows_its_batch_and_the_one_before(world):
    with pytest.raises(ApiError, match="next version is v1"):
        world.publish(2)
    with pytest.raises(ApiError, match="not cut"):
        world.publish(1)
    fill_step(world, 1)
    world.cut(1)
    with pytest.raises(ApiError, match="different batch"):
        world.publish(1, "0" * 64)
    world.train(1)


def test_a_version_published_again_is_answered_and_another_one_refused(world):
    fill_step(world, 1)
    first = world.train(1)
    assert world.publish(1, world.cut(1).batch.hash) == first
    with pytest.raises(ApiError, match="different hashes"):
        world.publish(1, world.cut(1).batch.hash, salt="x")


def test_only_a_trainer_cuts_and_publishes(world):
    world.join("eve", "eve", scopes={Scope.TRAIN})
    with pytest.raises(ApiError, match="not a trainer"):
        world.run(world.coordinator.cut_batch(world.id("eve"), 1))


def test_a_trainers_owner_does_not_make_a_trainer_of_its_other_nodes(world):
    """The key of a worker is on a stranger's machine; if it is stolen, it must permit nothing but working."""
    world.join("w9", "trainer", scopes={Scope.WORK, Scope.RELAY})
    submission = world.submit("w1", world.lease("w1"))
    for ask in (world.coordinator.cut_batch, world.coordinator.get_batch):
        with pytest.raises(ApiError, match="does not include the scope train"):
            world.run(ask(world.id("w9"), 1))
    with pytest.raises(ApiError, match="may not read it"):
        world.run(world.coordinator.open_blob(world.id("w9"), submission))
    world.nodes["trainer"] = world.nodes["w9"]
    with pytest.raises(ApiError, match="does not include the scope train"):
        world.publish(1)


def test_v0_has_no_batch(make_world):
    world = make_world()
    with pytest.raises(ApiError, match="must not name a batch"):
        world.publish(0, "0" * 64)


def test_a_run_continues_after_a_restart_at_each_edge(world):
    for step in (1, 2, 3):
        world.restart()
        lease = world.lease("w1")
        world.restart()
        submission = world.commit("w1", world.make_manifest(lease)).submission
        world.restart()
        world.upload("w1", submission, lease.lease.encode())
        world.restart()
        job = world.take("judge-a")
        world.restart()
        assert world.take("judge-a") == job
        world.post("judge-a", world.describe_verdict(job))
        fill_step(world, step)
        batch = world.cut(step)
        world.restart()
        assert world.cut(step) == batch
        world.publish(step, batch.batch.hash)
    assert world.ask("w1").code == "finished"


def test_the_batch_does_not_depend_on_who_was_fast(make_world):
    batches = []
    for turn in (0, 1):
        world = make_world(async_level=0, groups_per_batch=3)
        world.join("w1", "ann")
        world.join("w2", "bob")
        world.publish(0)
        leases = {node: world.lease(node) for node in ("w1", "w2")}
        order = ("w1", "w2") if turn else ("w2", "w1")
        for node in order:
            submission = world.submit(node, leases[node])
            job = world.take("judge-a")
            assert job.submission == submission
            world.post("judge-a", world.describe_verdict(job, signal=job.first != 0))
        while world.cut(1).batch is None:
            world.work("w1")
        batches.append([entry.index for entry in world.query(list_batch, 1)])
    assert batches[0] == batches[1] == [1, 2, 3]


@pytest.mark.parametrize("num_signals", [0, 1, 2])
def test_a_step_whose_groups_are_all_given_out_trains_on_those_with_a_signal(make_world, num_signals):
    world = make_world(steps=2, async_level=0, groups_per_batch=3, max_groups=5)
    world.join("w1", "ann")
    world.publish(0)
    for index in range(5):
        assert world.cut(1).batch is None
        world.work("w1", signal=index < num_signals)
    assert world.ask("w1").code == "no_need", "there is no sixth group"
    batch = world.cut(1).batch
    assert [entry.index for entry in batch.groups] == list(range(num_signals))
    assert world.cut(1).batch == batch
    world.publish(1, batch.hash)
    assert world.lease("w1").step == 2
    world.restart()
    assert world.cut(1).batch == batch
    assert world.verify().findings == []
