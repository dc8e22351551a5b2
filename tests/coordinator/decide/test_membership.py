"""Joining, renewing, leaving, revocation, and access."""

import pytest
from tests.fixtures.world import settle_world

from shoal.coordinator.state.leases import find_lease, find_range
from shoal.coordinator.state.members import find_node, find_owner
from shoal.coordinator.state.queue import find_job
from shoal.coordinator.state.submissions import find_submission
from shoal.identity.delegation import Grant, Scope, sign_delegation, sign_revocation
from shoal.identity.keys import Key
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Heartbeat, LeaseProgress, Standing, Verdict


def test_a_stranger_joins_on_probation(world):
    info = world.join("new", "cleo")
    assert (info.standing, info.width, info.owner) == (Standing.PROBATION, 1, world.owner_id("cleo"))
    assert world.coordinator.find_member(world.id("new")).owner == world.owner_id("cleo")


def test_joining_again_with_the_same_delegation_appends_nothing(world):
    grant = Grant(world.id("w1"), "demo", world.now_ms, world.now_ms + 10**9, frozenset({Scope.WORK}), 3)
    document = sign_delegation(world.owners["ann"], grant)
    world.run(world.coordinator.join(world.id("w1"), document))
    size = world.coordinator.ledger.size
    world.run(world.coordinator.join(world.id("w1"), document))
    assert world.coordinator.ledger.size == size
    assert world.query(find_node, world.id("w1")).max_leases == 3


def test_a_node_has_one_owner(world):
    with pytest.raises(ApiError, match="another owner"):
        world.join("w1", "bob")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "other"}, "another run"),
        ({"node": "w2"}, "another node key"),
        ({"start": 1000}, "begins in"),
    ],
)
def test_a_delegation_must_fit(world, changes, text):
    node, start = world.id(changes.get("node", "w1")), world.now_ms + changes.get("start", 0)
    grant = Grant(node, changes.get("run", "demo"), start, start + 1000, frozenset({Scope.WORK}), 1)
    with pytest.raises(ApiError, match=text):
        world.run(world.coordinator.join(world.id("w1"), sign_delegation(world.owners["ann"], grant)))


def test_bytes_that_are_no_delegation_are_refused(world):
    with pytest.raises(ApiError, match="invalid delegation"):
        world.run(world.coordinator.join(world.id("w1"), b"{}"))


def test_an_unknown_node_is_asked_to_join(world):
    stranger = Key.generate().public
    assert world.coordinator.find_member(stranger) is None
    with pytest.raises(ApiError, match="join this run first"):
        world.run(world.coordinator.grant_lease(stranger, "0" * 32, 0))


def test_a_node_whose_delegation_ended_gets_nothing(world):
    world.now_ms += 10**10
    with pytest.raises(ApiError, match="ended"):
        world.ask("w1")


def test_a_node_that_leaves_returns_its_work_and_may_rejoin(world):
    lease = world.lease("w1")
    world.run(world.coordinator.leave(world.id("w1")))
    world.run(world.coordinator.leave(world.id("w1")))
    assert world.query(find_lease, lease.lease).state == "returned"
    world.wait(world.params.reserve_s)
    assert world.lease("w2").first == lease.first
    with pytest.raises(ApiError, match="join again"):
        world.ask("w1")
    world.join("w1", "ann")
    assert world.ask("w1").lease is not None


def test_a_revoked_node_is_out_for_good(world):
    lease = world.lease("w1")
    revocation = sign_revocation(world.owners["ann"], world.id("w1"), "demo")
    world.run(world.coordinator.revoke(revocation))
    world.run(world.coordinator.revoke(revocation))
    assert world.coordinator.find_member(world.id("w1")).is_revoked
    assert world.query(find_lease, lease.lease).state == "cancelled"
    with pytest.raises(ApiError, match="revoked"):
        world.ask("w1")
    with pytest.raises(ApiError, match="revoked"):
        world.join("w1", "ann")
    world.restart()
    assert world.coordinator.find_member(world.id("w1")).is_revoked


def test_nobody_revokes_the_node_of_another(world):
    with pytest.raises(ApiError, match="nothing to revoke"):
        world.run(world.coordinator.revoke(sign_revocation(world.owners["bob"], world.id("w1"), "demo")))


def test_a_heartbeat_tells_which_leases_are_gone(world):
    mine, theirs = world.lease("w1"), world.lease("w2")
    world.run(world.coordinator.return_lease(world.id("w2"), theirs.lease))
    beat = Heartbeat(
        version=0, leases=(LeaseProgress(lease=mine.lease, done=1), LeaseProgress(lease=theirs.lease, done=0))
    )
    answer = world.coordinator.heartbeat(world.id("w1"), beat)
    assert answer.cancelled == (theirs.lease,)
    assert (answer.newest_version, answer.oldest_version, answer.standing) == (0, 0, Standing.PROBATION)
    assert world.coordinator.heartbeat(world.id("w2"), beat).cancelled == (mine.lease, theirs.lease)


def test_a_heartbeat_is_not_in_the_ledger(world):
    size = world.coordinator.ledger.size
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert world.coordinator.ledger.size == size


def test_a_node_learns_why_its_lease_ended(world):
    lease = world.lease("w1")
    world.wait(world.params.lease_first_s)
    (reason,) = world.coordinator.heartbeat(world.id("w1"), Heartbeat()).reasons
    assert lease.lease in reason and "expired" in reason


def test_members_are_the_same_after_a_restart(world):
    world.order(Action.BAN, target=world.owner_id("ann"))
    before = {node: world.coordinator.find_member(world.id(node)) for node in world.nodes}
    world.restart()
    assert {node: world.coordinator.find_member(world.id(node)) for node in world.nodes} == before
    assert before["w1"].ban is not None and before["w2"].ban is None


def test_an_outage_moves_deadlines(world):
    lease = world.lease("w1")
    world.now_ms += 10**6
    world.restart()
    world.wait(1)
    row = world.query(find_lease, lease.lease)
    assert (row.state, row.deadline_ms) == ("active", lease.deadline_ms + 10**6)
    assert world.query(find_range, 1, 0).state == "leased"


def test_an_outage_moves_uploads_claims_and_opinions(world):
    unsent = world.commit("w1", world.make_manifest(world.lease("w1")))
    claimed = world.submit("w2", world.lease("w2"))
    job = world.take("judge-b")
    doubted = world.submit("w3", world.lease("w3"))
    world.judge("judge-a", Verdict.HARD)
    world.now_ms += 10**7
    world.restart()
    world.wait(1)
    row = world.query(find_submission, unsent.submission)
    assert (row.state, row.upload_ms) == ("committed", unsent.deadline_ms + 10**7)
    assert world.query(find_submission, doubted).state == "received", "the wait for the second opinion is extended too"
    assert world.query(find_job, claimed).deadline_ms == job.deadline_ms + 10**7
    world.post("judge-b", world.describe_verdict(job))
    assert world.query(find_owner, world.owner_id("judge-b")).lapses == 0


def test_a_stop_is_recorded_and_only_the_time_after_it_counts_as_away(world):
    lease = world.lease("w1")
    world.now_ms += 5000
    world.run(world.coordinator.stop())
    world.now_ms += 700
    world.restart()
    assert world.query(find_lease, lease.lease).deadline_ms == lease.deadline_ms + 700


def test_after_a_kill_the_last_signed_head_shows_when_it_was_alive(world):
    lease = world.lease("w1")
    world.now_ms += 5000
    world.run(world.coordinator.ledger.sign_head())
    world.now_ms += 300
    world.restart()
    assert world.query(find_lease, lease.lease).deadline_ms == lease.deadline_ms + 300


def test_a_stop_after_the_ledger_stopped_records_nothing(world):
    world.coordinator.ledger.close()
    world.run(world.coordinator.stop())
    world.reopen()


def test_a_heartbeat_tells_what_its_owner_has_earned(world):
    world.work("w1")
    for _ in range(2):
        answer = world.coordinator.heartbeat(world.id("w1"), Heartbeat())
        assert (answer.accepted, answer.earned) == (1, 2000)
        world.restart()


def test_lifting_a_ban_gives_the_same_standings_in_memory_and_after_a_restart(make_world):
    world = settle_world(make_world(good_after=1))
    world.work("w1")
    owner = world.owner_id("ann")
    assert world.coordinator.cache.standings[owner] is Standing.GOOD
    world.order(Action.BAN, target=owner)
    world.order(Action.UNBAN, target=owner)
    before = dict(world.coordinator.cache.standings)
    assert before[owner] is Standing.PROBATION
    world.restart()
    assert world.coordinator.cache.standings == before


def test_a_banned_node_is_told_the_event_and_the_reason(world):
    event = world.order(Action.BAN, target=world.owner_id("ann"), reason="runs int8").seq
    member = world.coordinator.find_member(world.id("w1"))
    assert member.ban == (event, "runs int8")
    with pytest.raises(ApiError, match=rf"by event {event}: runs int8"):
        world.lease("w1")
    world.restart()
    assert world.coordinator.find_member(world.id("w1")) == member


@pytest.mark.parametrize(("action", "code"), [(Action.BAN, "target"), (Action.UNBAN, "not_banned")])
def test_a_key_that_nobody_has_is_neither_banned_nor_unbanned(world, action, code):
    with pytest.raises(ApiError) as caught:
        world.order(action, target=Key.generate().public)
    assert caught.value.code == code


def test_only_a_ban_that_exists_is_lifted(world):
    world.order(Action.BAN, target=world.owner_id("ann"))
    with pytest.raises(ApiError, match="names the owner's key"):
        world.order(Action.UNBAN, target=world.id("w1"))


def test_every_event_of_membership_is_paid_for(world):
    """Leaving and joining again, or renewing, appends nothing without a proof of work of its own."""
    join = world.coordinator.join
    first, second = (sign_grant(world, start) for start in (0, 1))
    world.run(join(world.id("w1"), first))
    size = world.coordinator.ledger.size
    world.run(join(world.id("w1"), first, is_paid=False))
    with pytest.raises(ApiError, match="stamp was used before"):
        world.run(join(world.id("w1"), second, is_paid=False))
    assert world.coordinator.ledger.size == size
    world.run(world.coordinator.leave(world.id("w1")))
    with pytest.raises(ApiError, match="stamp was used before"):
        world.run(join(world.id("w1"), first, is_paid=False))
    assert world.coordinator.ledger.size == size + 1
    world.run(join(world.id("w1"), second))
    assert world.coordinator.ledger.size == size + 2


def sign_grant(world, start):
    grant = Grant(world.id("w1"), "demo", world.now_ms + start - 1, world.now_ms + 10**9, frozenset({Scope.WORK}), 3)
    return sign_delegation(world.owners["ann"], grant)
