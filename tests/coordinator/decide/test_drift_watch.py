"""Owners whose work differs from that of others: they are watched, get the reason, and lose nothing by it."""

from types import SimpleNamespace

import pytest

from shoal.coordinator.state.drift import BAG, NUMBERS, find_history, is_watched
from shoal.coordinator.state.members import find_owner
from shoal.ledger.event import EventKind
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Heartbeat, Standing, Verdict

DRIFT = [(0, 100_000, 60, 60)]
"""all of 60 chunks beyond a level that one honest chunk in ten exceeds"""
WATCHING = {"watch_submissions": 2, "second_share": 0, "good_after": 1}
LOOSE = {"guarantee_fraction": 1_000_000, "guarantee_probability": 500_000}
"""a power at which one rollout of two is enough for owners of good standing"""


@pytest.fixture
def watched(make_world):
    """A run in which ann's work drifts and bob's does not, after the first cut."""
    world = start_world(make_world(**WATCHING, **LOOSE))
    world.work("w1", drift=DRIFT, numbers=(500_000, 700_000))
    world.work("w2", numbers=(500_000, 700_000))
    world.train(1)
    return world


def start_world(world):
    for node, owner in (("w1", "ann"), ("w2", "bob"), ("w3", "bob")):
        world.join(node, owner)
    world.publish(0)
    return world


def list_watches(world):
    events = world.query(lambda connection: list(read_events(connection, 0, 10**6)))
    return [event for event in events if event.kind == EventKind.NODE_WATCH]


def count_rows(world, table):
    return world.query(lambda connection: len(connection.execute(table.select()).all()))


def list_reasons(world, node):
    return " ".join(world.coordinator.heartbeat(world.id(node), Heartbeat()).reasons)


def work_doubted(world, node):
    """A submission that two validators judge."""
    submission = world.submit(node, world.lease(node))
    job = world.take("judge-a")
    world.post("judge-a", world.describe_verdict(job))
    world.judge("judge-b")
    return SimpleNamespace(submission=submission, job=job)


def test_an_owner_whose_work_drifts_is_watched_from_the_cut_on_and_nobody_else_is(watched):
    (event,) = list_watches(watched)
    assert event.subject == watched.owner_id("ann")
    assert event.content["stream"] == "drift"
    assert event.content["evidence"] >= event.content["line"] == 10**9
    assert event.content["submissions"] == 2
    assert watched.query(is_watched, watched.owner_id("ann"))
    assert not watched.query(is_watched, watched.owner_id("bob"))


def test_the_reason_of_a_watch_is_shown_everywhere_also_after_a_restart(watched):
    words = "further from replayed ones than honest ones are"
    submission = watched.submit("w1", watched.lease("w1"))
    for _ in range(2):
        assert words in list_reasons(watched, "w1")
        assert words not in list_reasons(watched, "w2")
        (text,) = watched.coordinator.read_status().watched
        assert f"owner {watched.owner_id('ann')[:8]}" in text
        assert "no blame" in text
        assert f"watched since event {list_watches(watched)[0].seq}" in watched.coordinator.explain(submission)
        watched.restart()


def test_a_watch_costs_neither_pay_nor_standing_nor_leases(watched):
    before = watched.query(find_owner, watched.owner_id("ann"))
    assert before.standing == Standing.GOOD
    lease = watched.lease("w1")
    assert lease.price == watched.params.price
    watched.submit("w1", lease)
    watched.judge("judge-a")
    watched.judge("judge-b")
    after = watched.query(find_owner, watched.owner_id("ann"))
    assert after.earned - before.earned == lease.price * 200
    assert (after.standing, after.rejected) == (Standing.GOOD, 0)


def test_a_watched_owner_is_checked_in_full_and_by_two_until_it_has_enough_clean_submissions(watched):
    ordinary = watched.submit("w2", watched.lease("w2"))
    job = watched.take("judge-a")
    assert (job.submission, job.check_ppm) == (ordinary, 500_000)
    watched.post("judge-a", watched.describe_verdict(job))
    for left in (1, 0):
        assert work_doubted(watched, "w1").job.check_ppm == 1_000_000
        assert watched.query(find_history, watched.owner_id("ann")).remaining == left
    over = list_watches(watched)[-1]
    assert over.content["state"] == "over"
    row = watched.query(find_history, watched.owner_id("ann"))
    assert (row.watch_seq, row.peak, row.num_groups, row.because) == (0, 0, 0, "")
    assert list_reasons(watched, "w1") == ""
    assert watched.coordinator.read_status().watched == ()


def test_what_was_handed_in_before_a_watch_does_not_count_towards_its_end(make_world):
    world = start_world(make_world(**WATCHING))
    world.work("w1", drift=DRIFT)
    world.work("w2")
    world.submit("w1", world.lease("w1"))
    world.cut(1)
    world.judge("judge-a")
    world.judge("judge-b")
    assert world.query(find_owner, world.owner_id("ann")).accepted == 2
    assert world.query(find_history, world.owner_id("ann")).remaining == 2


def test_a_group_counts_for_its_first_lessee_and_its_drift_for_its_author(world):
    world.run(world.coordinator.return_lease(world.id("w1"), world.lease("w1").lease))
    world.wait(world.params.reserve_s)
    world.work("w2", numbers=(1, 2), drift=DRIFT)
    (row,) = world.query(lambda connection: connection.execute(NUMBERS.select()).all())
    assert (row.owner, row.author) == (world.owner_id("ann"), world.owner_id("bob"))
    assert (row.numbers, row.version) == ("[200,1,2]", 0)
    world.work("w3")
    world.cut(1)
    assert [event.subject for event in list_watches(world)] == [world.owner_id("bob")]


def test_numbers_wait_for_the_cut_and_bags_for_the_last_step_that_may_use_their_version(world):
    for step in (1, 2, 3):
        for _ in range(2):
            world.work("w1", numbers=(1, 2))
        assert count_rows(world, NUMBERS) == 2
        world.train(step)
        assert count_rows(world, NUMBERS) == 0
        assert count_rows(world, BAG) <= world.params.async_level + 1
    assert world.query(find_history, world.owner_id("ann")) is None, "bags of two are too small to bet on"


def test_without_a_rate_nobody_is_watched(make_world):
    world = start_world(make_world(watch_rate=0))
    world.work("w1", drift=DRIFT)
    world.work("w2")
    world.cut(1)
    assert list_watches(world) == []


def test_a_rejected_submission_adds_no_evidence_about_its_owner(world):
    world.work("w1", Verdict.SOFT)
    assert count_rows(world, NUMBERS) == 0


def test_numbers_that_do_not_fit_together_are_refused(world):
    world.submit("w1", world.lease("w1"))
    statement = world.describe_verdict(world.take("judge-a"), numbers=(1, 2))
    with pytest.raises(ApiError, match="numbers must cover all groups"):
        world.post("judge-a", statement.model_copy(update={"tokens": 100}))
    world.post("judge-a", statement)


def test_the_numbers_of_a_canary_whose_work_is_taken_back_are_not_weighed(world):
    world.seal("canary")
    world.join("c1", "canary")
    bad = world.work("c1", numbers=(1, 2), drift=DRIFT)
    assert count_rows(world, NUMBERS) == 1
    world.reveal("canary", bad)
    assert count_rows(world, NUMBERS) == 0


def test_the_evidence_is_the_same_on_both_databases(both_world):
    both_world.work("w1", drift=[(1, 200_000, 10, 3), (1, 250_000, 4, 1)], numbers=(1, 2))
    both_world.work("w2", numbers=(3, 4))
    both_world.restart()
    both_world.cut(1)
    row = both_world.query(find_history, both_world.owner_id("ann"))
    bets = [(1 + 4 * f) ** 3 * (1 - f) ** 7 * (1 + 3 * f) * (1 - f) ** 3 for f in (0.05, 0.2, 0.5, 0.9)]
    assert (row.num_submissions, row.leader) == (1, "drift")
    assert row.peak == pytest.approx(1e6 * 0.5 * (12 + sum(bets)) / 16 / 4, abs=2), "half a unit was staked on each"
