"""How much of a batch one owner gets: no more than its share while others are active, and no step waits for it."""

import pytest

BOUNDED = {"owner_share": 500_000, "groups_per_batch": 8, "probation_leases": 64, "async_level": 0, "good_after": 100}


@pytest.fixture
def shared(make_world):
    """Half of a batch for each owner; bob has accepted work, and both are active."""
    world = make_world(**BOUNDED)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    world.work("w2")
    for _ in range(4):
        world.work("w1")
    return world


def test_an_owner_gets_no_more_than_its_share_while_others_want_work(shared):
    answer = shared.ask("w1")
    assert (answer.lease, answer.code) == (None, "share")
    assert 0 < answer.retry_after_s <= shared.params.share_wait_s
    assert shared.lease("w2").step == 1, "the rest is for others"


def test_what_brings_no_signal_is_no_part_of_a_batch(make_world):
    world = make_world(**BOUNDED)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    world.lease("w2")
    for _ in range(6):
        world.work("w1", signal=False)
    assert world.ask("w1").lease is not None


def test_the_bound_is_lifted_when_nobody_else_takes_the_missing_groups(shared):
    shared.wait(shared.params.share_wait_s - 1)
    assert shared.ask("w1").code == "share"
    shared.wait(1)
    assert shared.ask("w1").lease is not None


def test_an_owner_with_accepted_work_that_takes_more_keeps_its_part(shared):
    shared.wait(shared.params.share_wait_s - 1)
    shared.lease("w2")
    shared.wait(1)
    assert shared.ask("w1").code == "share"


def test_newcomers_that_take_leases_and_do_nothing_do_not_hold_up_a_step(shared):
    """An identity costs seconds: if each caused another wait, one machine could stop a run."""
    for number in range(2):
        shared.join(f"idle-{number}", f"idler {number}")
        shared.wait(shared.params.share_wait_s / 2)
        shared.lease(f"idle-{number}")
    assert shared.ask("w1").lease is not None


def test_without_a_bound_one_owner_may_write_all_of_it(make_world):
    world = make_world(**BOUNDED | {"owner_share": 1_000_000})
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    world.work("w2")
    for _ in range(7):
        world.work("w1")
    assert world.ask("w1").code == "no_need"
