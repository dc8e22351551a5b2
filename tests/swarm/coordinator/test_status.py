"""What everybody can see: status, waits, explanations, leaders."""

import pytest

from shoal.errors import ConfigError
from shoal.swarm.coordinator import Coordinator
from shoal.swarm.messages import Heartbeat, NodeWait, Verdict


def texts(world):
    return [wait.text for wait in world.coordinator.read_status().waits]


def test_a_run_waits_for_v0_first(make_world):
    (text,) = texts(make_world())
    assert text.startswith("the run waits for its trainer to publish v0")


def test_status_says_who_holds_what_and_who_is_silent(world):
    lease = world.lease("w1")
    world.wait(62)
    status = world.coordinator.read_status()
    assert (status.trained, status.newest_version, status.queue) == (0, 0, 0)
    assert [(step.step, step.accepted, step.leased) for step in status.open_steps] == [(1, 0, 1), (2, 0, 0)]
    assert f"step 1 waits for 2 of 2 groups for 62 s: node {world.id('w1')[:8]} has {lease.lease}" in texts(world)[0]
    assert "silent 62 s" in texts(world)[0]
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert "silent" not in texts(world)[0]


def test_liveness_follows_the_last_sign(world):
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (7, 0, 0)
    world.wait(46)
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (1, 6, 0)
    world.wait(75)
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (0, 1, 6)


def test_status_names_the_queue_the_cut_and_the_training(world):
    world.submit("w1", world.lease("w1"))
    assert any("the queue waits for validators to judge 1 submission for" in text for text in texts(world))
    world.judge("judge-a")
    world.work("w1")
    assert any("step 1 waits for its trainer to cut the batch" in text for text in texts(world))
    world.cut(1)
    assert any("step 1 waits for its trainer to publish v1" in text for text in texts(world))


def test_what_nodes_wait_for_is_told_and_who_of_them_fell_silent(world):
    wait = NodeWait(name="weights", for_whom="the relays", since_ms=world.now_ms)
    world.coordinator.heartbeat(world.id("w1"), Heartbeat(role="worker", wait=wait))
    world.coordinator.heartbeat(world.id("judge-a"), Heartbeat(role="validator"))
    world.wait(20)
    name = world.id("w1")[:8]
    assert f"worker {name} waits for the relays: weights for 20 s" in texts(world)
    assert not any("sign of life" in text for text in texts(world))
    world.wait(30)
    assert f"validator {world.id('judge-a')[:8]} waits for a sign of life for 50 s" in texts(world)
    assert f"worker {name} waits for a sign of life for 50 s" in texts(world)
    world.run(world.coordinator.leave(world.id("w1")))
    assert not any(name in text for text in texts(world))


def test_what_nobody_judges_becomes_an_alarm(world):
    world.submit("w1", world.lease("w1"))
    world.wait(world.params.opinion_s + 1)
    assert any("validators" in alarm for alarm in world.coordinator.read_status().alarms)


def test_offers_that_nobody_takes_are_named(world):
    world.work("w1", Verdict.SOFT)
    assert any("a worker to take 1 offered groups" in text for text in texts(world))


def test_a_finished_run_waits_for_nothing(make_world):
    world = make_world(steps=1, groups_per_batch=1)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    world.train(1)
    status = world.coordinator.read_status()
    assert status.finished and status.waits == ()
    assert world.coordinator.heartbeat(world.id("w1"), Heartbeat()).finished


def test_a_submission_is_explained_with_numbers_and_postings(world):
    submission = world.convict("w1")
    text = world.coordinator.explain(submission)
    for part in (
        "rejected_hard",
        "toploc: 0.5, threshold 0.25 at rollout 1: FAILED",
        world.id("judge-b"),
        "failed: toploc",
        "Two validators found it faked, so its owner was banned.",
        f"Its owner may appeal until 2023-11-21 22:13 UTC: shoal appeal URL {submission} --owner KEY",
    ):
        assert part in text
    world.work("w2")
    accepted = world.work("w2")
    text = world.coordinator.explain(accepted)
    assert f"pending:{world.owner_id('bob')}: +2000 micro-credits (+0.002000), pay that is held until" in text
    assert "appeal" not in text
    with pytest.raises(ConfigError, match="no such submission"):
        world.coordinator.explain("s999")


def test_leaders_are_those_with_the_most_accepted_tokens(world):
    world.work("w2")
    world.work("w2")
    world.work("w1")
    first, second = world.coordinator.read_leaders(2)
    assert (first.owner, first.tokens, second.owner) == (world.owner_id("bob"), 400, world.owner_id("ann"))


def test_another_secret_than_that_of_the_genesis_is_refused(world):
    with pytest.raises(ConfigError, match="beacon secret"):
        Coordinator(world.coordinator.ledger, run="demo", key=world.key, secret=bytes(32), blobs=world.blobs)
