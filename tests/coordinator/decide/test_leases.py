"""Which node gets which work, and what happens to work that is not done."""

import pytest

from shoal.coordinator.decide.leases import RESCUE_S
from shoal.coordinator.rules.leases import MAX_OWN_TIMES, MAX_TIMES
from shoal.coordinator.state.leases import find_lease, find_range, list_group_times
from shoal.coordinator.state.members import find_node
from shoal.identity.documents import Tag, open_document
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Heartbeat, LeaseProgress, Verdict


def test_a_lease_is_signed_and_complete(world):
    answer = world.ask("w1")
    body = open_document(world.key.public, Tag.LEASE, answer.document.encode())
    assert body == answer.lease.model_dump(mode="json")
    assert (answer.lease.step, answer.lease.first, answer.lease.count, answer.lease.fence) == (1, 0, 1, 1)


def test_the_same_request_gets_the_same_lease(both_world):
    first = both_world.ask("w1", "a" * 32)
    both_world.now_ms += 5000
    both_world.restart()
    assert both_world.ask("w1", "a" * 32) == first
    assert both_world.ask("w1", "b" * 32).code == "busy"


def test_indices_are_given_out_once_and_the_smallest_step_first(make_world):
    world = make_world(groups_per_batch=2, async_level=1, probation_leases=10)
    world.publish(0)
    places = []
    for number in range(4):
        world.join(f"n{number}", f"o{number}")
        lease = world.lease(f"n{number}")
        places.append((lease.step, lease.first))
    assert places == [(1, 0), (1, 1), (2, 0), (2, 1)]
    world.join("late", "late")
    assert world.ask("late").code == "no_need"


def test_several_groups_in_a_lease_never_exceed_the_batch(make_world):
    world = make_world(groups_per_batch=5, groups_per_lease=3, async_level=0)
    world.publish(0)
    world.join("a", "a")
    world.join("b", "b")
    assert [(lease.first, lease.count) for lease in (world.lease("a"), world.lease("b"))] == [(0, 3), (3, 2)]


def test_what_was_returned_meets_the_same_owner_again(world):
    lease = world.lease("w2")
    world.run(world.coordinator.return_lease(world.id("w2"), lease.lease))
    assert world.lease("w1").first != lease.first
    again = world.lease("w3")  # another node of the same owner
    assert (again.first, again.fence) == (lease.first, 2)


def test_what_its_owner_does_not_take_goes_to_others(world):
    lease = world.lease("w2")
    world.run(world.coordinator.return_lease(world.id("w2"), lease.lease))
    world.wait(world.params.reserve_s)
    again = world.lease("w1")
    assert (again.step, again.first, again.fence) == (lease.step, lease.first, 2)


def test_returning_twice_is_the_same(world):
    lease = world.lease("w1")
    for _ in range(2):
        assert world.run(world.coordinator.return_lease(world.id("w1"), lease.lease)).state == "returned"
    with pytest.raises(ApiError, match="no such lease"):
        world.run(world.coordinator.return_lease(world.id("w2"), lease.lease))


def test_a_lease_ends_at_its_deadline_and_not_before(world):
    lease = world.lease("w1")
    world.wait((lease.deadline_ms - world.now_ms - 1) / 1000)
    assert world.query(find_lease, lease.lease).state == "active"
    world.wait(0.001)
    assert world.query(find_lease, lease.lease).state == "expired"
    assert world.query(find_range, 1, 0).state == "offered"


def test_width_grows_by_accepted_work_and_halves_by_failure(make_world):
    world = make_world(raise_after=1, groups_per_batch=20, max_width=3)
    world.join("w1", "ann")
    world.publish(0)
    for width in (2, 3, 3):
        world.work("w1")
        assert world.query(find_node, world.id("w1")).width == width
    leases = [world.lease("w1") for _ in range(3)]
    assert world.ask("w1").code == "busy"
    world.run(world.coordinator.return_lease(world.id("w1"), leases[0].lease))
    assert world.query(find_node, world.id("w1")).width == 1


def test_an_owner_on_probation_holds_few_leases_with_however_many_nodes(make_world):
    world = make_world(groups_per_batch=20, probation_leases=2)
    world.publish(0)
    for number in range(3):
        world.join(f"n{number}", "ann")
    assert [world.ask(f"n{number}").code for number in range(3)] == ["", "", "busy"]


def test_an_owner_may_allow_its_node_fewer_leases(world):
    world.join("w1", "ann", max_leases=0)
    assert world.ask("w1").code == "busy"


def test_no_leases_while_the_queue_is_full(make_world):
    world = make_world(max_queue=1)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    world.submit("w1", world.lease("w1"))
    assert world.ask("w2").code == "queue_full"
    world.judge("judge-a")
    assert world.ask("w2").lease is not None


def test_no_leases_for_an_owner_with_too_much_in_the_queue(make_world):
    world = make_world(max_pending_per_owner=1)
    world.join("w1", "ann")
    world.publish(0)
    world.submit("w1", world.lease("w1"))
    assert world.ask("w1").code == "too_many"


def test_no_leases_while_the_run_is_stopped(world):
    world.order(Action.STOP)
    assert world.ask("w1").code == "stopped"
    world.order(Action.RESUME)
    assert world.ask("w1").lease is not None


def test_a_backup_is_given_when_nothing_else_is_to_do_and_a_lease_is_slow(make_world):
    world = make_world(groups_per_batch=1, async_level=0)
    world.publish(0)
    for name in ("a", "b", "c"):
        world.join(name, name)
    slow = world.lease("a")
    assert world.ask("b").code == "no_need"
    world.wait(world.params.lease_first_s // 2)
    backup = world.lease("b")
    assert (backup.first, backup.fence) == (slow.first, 2)
    assert world.ask("c").code == "no_need"  # one backup is enough


def test_of_two_holders_exactly_one_is_paid(make_world):
    world = make_world(groups_per_batch=1, async_level=0)
    world.publish(0)
    for name in ("a", "b"):
        world.join(name, name)
    slow = world.lease("a")
    world.wait(world.params.lease_first_s // 2)
    backup = world.lease("b")
    late = world.commit("a", world.make_manifest(slow))
    world.submit("b", backup)
    with pytest.raises(ApiError, match="superseded"):
        world.upload("a", late.submission, slow.lease.encode())
    world.judge("judge-a")
    assert (world.balance("stake", "a"), world.balance("stake", "b")) == (0, 2000)
    assert world.query(find_node, world.id("a")).width == 1
    world.train(1)


def test_a_holder_whose_groups_were_delivered_is_informed_and_not_blamed(make_world):
    world = make_world(groups_per_batch=1, async_level=0, raise_after=1)
    world.publish(0)
    for name in ("a", "b"):
        world.join(name, name)
    slow = world.lease("a")
    world.wait(world.params.lease_first_s // 2)
    world.submit("b", world.lease("b"))
    assert world.query(find_lease, slow.lease).state == "cancelled"
    with pytest.raises(ApiError, match="delivered these groups first"):
        world.commit("a", world.make_manifest(slow))


def test_the_backup_continues_when_the_first_holder_expires(make_world):
    world = make_world(groups_per_batch=1, async_level=0)
    world.publish(0)
    for name in ("a", "b"):
        world.join(name, name)
    world.lease("a")
    world.wait(world.params.lease_first_s // 2)
    backup = world.lease("b")
    world.wait(world.params.lease_first_s // 2)
    assert world.query(find_range, 1, 0).state == "leased"
    world.submit("b", backup)
    world.judge("judge-a")
    world.train(1)


def test_a_rejected_span_is_offered_to_anybody(world):
    world.work("w1", Verdict.SOFT)
    lease = world.lease("w2")
    assert (lease.step, lease.first, lease.fence) == (1, 0, 2)


def test_deadlines_follow_what_leases_took(make_world):
    world = make_world(groups_per_batch=20)
    world.join("w1", "ann")
    world.publish(0)
    for _ in range(6):
        lease = world.lease("w1")
        world.wait(100)
        world.submit("w1", lease)
        world.judge("judge-a")
    lease = world.lease("w1")
    assert lease.deadline_ms - lease.granted_ms == 300_000
    assert world.query(list_group_times) == [100_000] * 5, "the first lease of a new owner is no measurement"
    assert world.verify().holds


def test_what_one_owner_does_often_sets_nobodys_deadline(make_world):
    world = make_world(groups_per_batch=60, async_level=0, probation_leases=8)
    world.publish(0)
    for name in ("slow-1", "slow-2", "fast"):
        world.join(name, name)
    for _ in range(8):
        leases = [(name, world.lease(name)) for name in ("slow-1", "slow-2")]
        for _ in range(3):
            world.work("fast")
        world.wait(100)
        for name, lease in leases:
            world.submit(name, lease)
            world.judge("judge-a")
    lease = world.lease("slow-1")
    assert lease.deadline_ms - lease.granted_ms == 300_000
    assert sorted(world.query(list_group_times)) == [1] * MAX_OWN_TIMES + [100_000] * 2 * MAX_OWN_TIMES


def test_an_owner_keeps_its_own_times_however_many_leases_of_others_are_measured(make_world):
    world = make_world(groups_per_batch=100, async_level=0)
    world.publish(0)
    world.join("slow", "slow")
    for _ in range(MAX_OWN_TIMES):
        lease = world.lease("slow")
        world.wait(100)
        world.submit("slow", lease)
        world.judge("judge-a")
    for number in range(MAX_TIMES // MAX_OWN_TIMES + 1):
        world.join(f"fast-{number}", f"fast-{number}")
        for _ in range(MAX_OWN_TIMES + 1):
            world.work(f"fast-{number}", signal=False)
    assert world.query(list_group_times) == [1] * MAX_TIMES
    lease = world.lease("slow")
    assert lease.deadline_ms - lease.granted_ms == 300_000


def test_neither_own_times_nor_reported_progress_delay_a_backup(make_world):
    world = make_world(groups_per_batch=2, async_level=0, lease_first_s=60)
    world.publish(0)
    names = [f"fast-{number}" for number in range(3)]
    for name in ("slow", *names):
        world.join(name, name)
        world.work(name, signal=False)
    lease = world.lease("slow")
    for name in names:
        for _ in range(MAX_OWN_TIMES):
            world.work(name, signal=False)
    world.wait(29)
    world.submit("slow", lease)
    world.judge("judge-a", signal=False)
    lease = world.lease("slow")
    assert lease.deadline_ms - lease.granted_ms == 87_000, "its own time gives it more"
    other = world.lease("fast-0")
    assert other.deadline_ms - other.granted_ms == 60_000
    world.wait(29)
    assert world.ask("fast-1").code == "no_need"
    world.wait(1)
    assert world.lease("fast-1").first == lease.first, "half of the time that others get"
    world.coordinator.heartbeat(world.id("fast-0"), Heartbeat(leases=(LeaseProgress(lease=other.lease, done=1),)))
    world.wait(30)
    assert world.query(find_lease, other.lease).deadline_ms > world.now_ms + 20_000, "extended"
    assert world.lease("fast-2").first == other.first


def test_a_lease_is_paid_at_the_price_it_was_granted_at(world):
    lease = world.lease("w1")
    world.change(price=1)
    world.submit("w1", lease)
    world.judge("judge-a")
    assert world.balance("mint", "") == -lease.price * 200


def test_an_idle_owner_takes_groups_reserved_for_an_absent_one(make_world):
    world = make_world(groups_per_batch=2, groups_per_lease=1, async_level=0)
    world.publish(0)
    for node in ("a", "b"):
        world.join(node, node)
    world.work("a", signal=False)
    world.work("b", signal=False)
    gone = world.lease("a")
    world.work("b")
    assert world.ask("b").code == "no_need", "the node that disappeared holds the other half"
    world.wait((gone.deadline_ms - world.now_ms) / 1000)
    assert world.ask("b").code == "no_need", "it is reserved for a moment"
    world.wait(RESCUE_S)
    again = world.lease("b")
    assert (again.step, again.first, again.fence) == (gone.step, gone.first, 2)


def test_what_is_kept_stays_kept_while_there_is_other_work(make_world):
    world = make_world(groups_per_batch=3, groups_per_lease=1, async_level=0)
    world.publish(0)
    for node in ("a", "b"):
        world.join(node, node)
    returned = world.lease("a")
    world.run(world.coordinator.return_lease(world.id("a"), returned.lease))
    world.wait(RESCUE_S)
    assert world.lease("b").first != returned.first
    assert world.lease("a").first == returned.first
