"""Manifests, files, receipts, and duplicate rollouts."""

import pytest

from shoal.coordinator.blobs.base import WrongBlobError
from shoal.coordinator.rules.storage import limit_lease_file
from shoal.coordinator.state.leases import find_lease, find_range
from shoal.coordinator.state.members import find_node
from shoal.coordinator.state.submissions import find_submission, list_duplicates
from shoal.identity.documents import Tag, open_document
from shoal.net.api_error import ApiError
from shoal.protocol.messages import RolloutEntry, SignedManifest, SubmissionState, Verdict, sign_message


def state_of(world, submission):
    return world.query(find_submission, submission).state


def test_commit_upload_receipt(both_world):
    world = both_world
    lease = world.lease("w1")
    manifest = world.make_manifest(lease)
    answer = world.commit("w1", manifest)
    assert (answer.state, answer.size) == (SubmissionState.COMMITTED, manifest.size)
    receipt = world.upload("w1", answer.submission, lease.lease.encode())
    body = open_document(world.key.public, Tag.RECEIPT, receipt.document.encode())
    assert body == receipt.receipt.model_dump(mode="json")
    assert world.run(world.coordinator.receive(world.id("w1"), answer.submission)) == receipt
    assert world.upload("w1", answer.submission, b"") == receipt


def test_a_manifest_committed_again_gets_the_first_answer(world):
    lease = world.lease("w1")
    manifest = world.make_manifest(lease)
    first = world.commit("w1", manifest)
    world.restart()
    assert world.commit("w1", manifest) == first
    with pytest.raises(ApiError, match="a different manifest") as refusal:
        world.commit("w1", world.make_manifest(lease, salt="x"))
    assert refusal.value.status == 409


def test_a_manifest_needs_the_signature_of_its_node(world):
    manifest = world.make_manifest(world.lease("w1"))
    signed = SignedManifest(manifest=manifest, signature=sign_message(world.nodes["w2"], "demo", manifest))
    with pytest.raises(ApiError, match="invalid signature"):
        world.run(world.coordinator.commit_submission(world.id("w1"), signed))


def test_nobody_submits_under_the_lease_of_another(world):
    manifest = world.make_manifest(world.lease("w1"))
    with pytest.raises(ApiError, match="no such lease"):
        world.commit("w2", manifest)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fence": 2}, "fence"),
        ({"version": 1}, "version"),
        ({"size": 0}, "too_large"),
        ({"size": 2**40}, "too_large"),
        ({"rollouts": (RolloutEntry(hash="0" * 64, tokens=1),)}, "rollouts"),
        ({"rollouts": (RolloutEntry(hash="0" * 64, tokens=201),) * 2}, "tokens"),
        ({"rollouts": (RolloutEntry(hash="0" * 64, tokens=0),) * 2}, "tokens"),
    ],
)
def test_a_manifest_that_no_file_could_fulfil_is_refused(world, changes, code):
    lease = world.lease("w1")
    with pytest.raises(ApiError) as refusal:
        world.commit("w1", world.make_manifest(lease, **changes))
    assert refusal.value.code == code
    assert world.query(find_lease, lease.lease).state == "active"


def test_rollouts_older_than_the_bound_are_refused(make_world):
    world = make_world(groups_per_batch=1, async_level=1)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    world.work("w1")
    world.work("w1")
    world.train(1)
    world.train(2)
    for version in (0, 3):
        assert world.ask("w1", version=version).code == "version", "too old, and not published"
    lease = world.lease("w1", version=1)
    assert (lease.step, lease.version) == (3, 1)
    for version in (0, 2):
        with pytest.raises(ApiError, match="the lease is for rollouts of v1"):
            world.commit("w1", world.make_manifest(lease, version=version))
    world.commit("w1", world.make_manifest(lease))


def test_other_bytes_than_announced_leave_the_submission_waiting(world):
    lease = world.lease("w1")
    submission = world.commit("w1", world.make_manifest(lease)).submission
    with pytest.raises(WrongBlobError):
        world.upload("w1", submission, b"something else")
    assert state_of(world, submission) == SubmissionState.COMMITTED
    world.upload("w1", submission, lease.lease.encode())


def test_no_receipt_without_the_file(world):
    submission = world.commit("w1", world.make_manifest(world.lease("w1"))).submission
    with pytest.raises(ApiError, match="upload it first"):
        world.run(world.coordinator.receive(world.id("w1"), submission))


def test_a_file_that_does_not_come_costs_width_and_frees_the_groups(world):
    lease = world.lease("w1")
    answer = world.commit("w1", world.make_manifest(lease))
    world.wait((answer.deadline_ms - world.now_ms - 1) / 1000)
    assert state_of(world, answer.submission) == SubmissionState.COMMITTED
    world.wait(0.001)
    assert state_of(world, answer.submission) == SubmissionState.UNSENT
    assert world.query(find_range, 1, 0).state == "offered"
    with pytest.raises(ApiError, match="unsent"):
        world.upload("w1", answer.submission, lease.lease.encode())
    assert world.lease("w1").first == lease.first


def test_a_late_submission_counts_if_nobody_else_works_on_it(world):
    lease = world.lease("w1")
    world.wait(world.params.lease_first_s + 100)
    submission = world.submit("w1", lease)
    world.judge("judge-a")
    assert state_of(world, submission) == SubmissionState.ACCEPTED


def test_while_a_late_file_is_awaited_its_groups_are_not_given_out(world):
    lease = world.lease("w1")
    world.wait(world.params.lease_first_s)
    world.wait(world.params.reserve_s)
    answer = world.commit("w1", world.make_manifest(lease))
    assert world.query(find_range, lease.step, lease.first).holders == 1
    assert world.lease("w2").first != lease.first
    world.now_ms = answer.deadline_ms
    world.wait(0)
    assert world.query(find_range, lease.step, lease.first).state == "offered"


def test_a_late_submission_is_refused_if_somebody_else_holds_the_groups(world):
    lease = world.lease("w1")
    world.wait(world.params.lease_first_s)
    world.wait(world.params.reserve_s)
    assert world.lease("w2").first == lease.first
    with pytest.raises(ApiError, match="another node holds"):
        world.commit("w1", world.make_manifest(lease))


def test_within_the_grace_two_holders_race_and_one_delivers(make_world):
    world = make_world(reserve_s=0)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    lease = world.lease("w1")
    world.wait(world.params.lease_first_s)
    second = world.lease("w2")
    assert second.first == lease.first
    world.wait(world.params.late_s)
    world.submit("w1", lease)
    assert world.query(find_lease, second.lease).state == "cancelled"
    world.judge("judge-a")
    assert world.balance("stake", "ann") == 2000


def test_a_file_handed_in_for_other_groups_is_refused(world):
    first = world.lease("w1")
    manifest = world.make_manifest(first)
    world.commit("w1", manifest)
    with pytest.raises(ApiError, match="other groups"):
        world.commit("w2", world.make_manifest(world.lease("w2"), blob=manifest.blob))


def test_who_names_the_file_of_another_must_show_that_it_has_it(make_world):
    world = make_world(groups_per_batch=1, async_level=0)
    world.publish(0)
    world.join("a", "a")
    world.join("b", "b")
    first = world.lease("a")
    world.wait(world.params.lease_first_s // 2)
    backup = world.lease("b")
    manifest = world.make_manifest(first)
    world.commit("a", manifest)
    copied = world.commit("b", world.make_manifest(backup, blob=manifest.blob, size=manifest.size))
    world.blobs.blobs[manifest.blob] = first.lease.encode()
    with pytest.raises(ApiError, match="upload yours here"):
        world.run(world.coordinator.receive(world.id("b"), copied.submission))


def test_copied_rollouts_are_not_paid_and_the_first_is_not_punished(both_world):
    world = both_world
    first, second = world.lease("w1"), world.lease("w2")
    original = world.make_manifest(first)
    mine = world.commit("w1", original).submission
    copy = world.make_manifest(second, rollouts=(world.make_manifest(second).rollouts[0], original.rollouts[1]))
    theirs = world.commit("w2", copy).submission
    world.upload("w2", theirs, second.lease.encode())
    assert world.claim("judge-a").job is None  # the copy waits until the original is decided
    world.upload("w1", mine, first.lease.encode())
    world.judge("judge-a")
    job = world.take("judge-a")
    assert (job.submission, job.duplicates) == (theirs, (1,))
    world.post("judge-a", world.describe_verdict(job, Verdict.SOFT))
    assert (state_of(world, mine), state_of(world, theirs)) == (SubmissionState.ACCEPTED, SubmissionState.SOFT)
    assert (world.balance("stake", "ann"), world.balance("stake", "bob")) == (2000, 0)


def test_who_announces_the_rollouts_of_another_in_advance_does_not_hurt_it(world):
    thief, victim = world.lease("w2"), world.lease("w1")
    stolen = world.make_manifest(victim).rollouts
    bad = world.submit("w2", thief, rollouts=stolen)
    good = world.submit("w1", victim)
    assert [row.rival for row in world.query(list_duplicates, good)] == [bad, bad]
    world.judge("judge-a", Verdict.SOFT)
    world.judge("judge-a")
    assert (state_of(world, bad), state_of(world, good)) == (SubmissionState.SOFT, SubmissionState.ACCEPTED)
    # From now on the hashes belong to the victim: a third owner that copies them is found.
    third = world.submit("w3", world.lease("w3"), rollouts=stolen)
    assert {row.rival for row in world.query(list_duplicates, third)} == {good}


def test_the_same_rollouts_at_the_same_place_are_no_duplicates(world):
    first = world.work("w1", Verdict.SOFT)
    again = world.submit("w2", world.lease("w2"))
    assert world.query(find_submission, first).first == world.query(find_submission, again).first
    assert world.query(list_duplicates, again) == []


def test_short_rollouts_may_be_alike(world):
    short = (RolloutEntry(hash="0" * 64, tokens=63), RolloutEntry(hash="1" * 64, tokens=63))
    world.submit("w1", world.lease("w1"), rollouts=short)
    assert world.query(list_duplicates, world.submit("w2", world.lease("w2"), rollouts=short)) == []


def test_a_node_that_never_uploads_holds_up_nobody_for_ever(world):
    first, second = world.lease("w1"), world.lease("w2")
    world.commit("w1", world.make_manifest(first))
    world.submit("w2", second, rollouts=world.make_manifest(first).rollouts)
    assert world.claim("judge-a").job is None
    world.wait(world.params.upload_s + 1)
    assert world.claim("judge-a").job is not None


def test_width_is_kept_by_node(world):
    world.work("w1", Verdict.FORM)
    assert world.query(find_node, world.id("w2")).width == 1


def judge_as_validators_do(world):
    """Reject what the job marks as a copy."""
    job = world.take("judge-a")
    verdict = Verdict.SOFT if job.duplicates else Verdict.ACCEPTED
    return world.post("judge-a", world.describe_verdict(job, verdict)).record.state


def test_announcing_a_group_without_sending_it_spoils_it_for_nobody(make_world):
    world = make_world(groups_per_batch=3, async_level=0)
    for name in ("evil-1", "evil-2"):
        world.join(name, "mallory")
    for name in ("w1", "w2"):
        world.join(name, name)
    world.publish(0)
    spoiled, vehicle = world.lease("evil-1"), world.lease("evil-2")
    rollouts = world.make_manifest(spoiled).rollouts
    size = limit_lease_file(world.params, vehicle.count)
    world.commit("evil-2", world.make_manifest(vehicle, salt="x", rollouts=rollouts, size=size))
    world.run(world.coordinator.return_lease(world.id("evil-1"), spoiled.lease))
    world.wait(world.params.reserve_s)
    lease = world.lease("w1")
    assert (lease.step, lease.first) == (spoiled.step, spoiled.first)
    world.submit("w1", lease)
    assert world.claim("judge-a").job is None, "the rival's file may still arrive"
    world.wait(world.params.upload_s + 8)
    assert judge_as_validators_do(world) == SubmissionState.ACCEPTED
    stolen = world.lease("w2")
    world.submit("w2", stolen, salt="y", rollouts=rollouts)
    assert judge_as_validators_do(world) == SubmissionState.SOFT, "the hashes belong to the node that delivered them"


def test_a_file_with_the_same_rollout_twice_is_for_validators_to_judge(world):
    """A confident model generates the same long answer twice, whatever the seeds: recomputing the group does so too."""
    lease = world.lease("w1")
    first = world.make_manifest(lease).rollouts[0]
    twice = world.submit("w1", lease, rollouts=(first, first))
    assert world.query(list_duplicates, twice) == [] and world.take("judge-a").duplicates == ()
    world.post("judge-a", world.describe_verdict(world.take("judge-a")))
    assert state_of(world, twice) == SubmissionState.ACCEPTED
    copy = world.submit("w2", world.lease("w2"), rollouts=(first, first))
    assert [row.rival for row in world.query(list_duplicates, copy)] == [twice, twice]


def test_what_is_equal_by_chance_is_paid_and_blames_nobody(world):
    """A confident model gives the same long answer to many tasks: validators, which see its probability, decide."""
    lease = world.lease("w1")
    first = world.make_manifest(lease).rollouts[0]
    world.submit("w1", lease, rollouts=(first, first))
    world.judge("judge-a")
    again = world.submit("w2", world.lease("w2"), rollouts=(first, first))
    job = world.take("judge-a")
    assert job.duplicates == (0, 1)
    world.post("judge-a", world.describe_verdict(job))
    assert state_of(world, again) == SubmissionState.ACCEPTED
    assert world.balance("stake", "bob") == 2000
