"""Room for files: nobody occupies more of the store than its work allows, and others deliver all the while."""

import pytest

from shoal.coordinator.decide.submissions import APPEAL_SLACK_S, CLEANUP_EVERY_S
from shoal.coordinator.rules.storage import LEAST_FILES, MIN_FILES, POOL_PART, find_patience, limit_lease_file
from shoal.coordinator.state.storage import find_owner_room, find_total_room
from shoal.coordinator.state.submissions import find_submission
from shoal.net.api_error import ApiError
from shoal.protocol.messages import AppealStatement, SignedAppeal, SubmissionState, Verdict, sign_message
from shoal.protocol.params import RunParams

FILE = 75_330
"""largest file of a lease in these runs"""
POOL = MIN_FILES // POOL_PART
"""files in the pool of the smallest store"""


@pytest.fixture
def tight(make_world):
    """The smallest store; ann and bob have accepted work, and there is always a lease to have."""
    world = make_world(
        store_bytes=MIN_FILES * FILE,
        groups_per_batch=200,
        steps=1,
        async_level=0,
        limited_s=1,
        challenge_s=10**6,
        hold_max_s=10**6,
        unbond_s=10**7,
        probation_leases=64,
        raise_after=1,
        limit_after=1000,
    )
    assert limit_lease_file(world.params, 1) == FILE
    for name in ("ann", "bob"):
        world.join(name, name)
    world.publish(0)
    for name in ("ann", "bob"):
        world.work(name)
    return world


def count_files(world, owner):
    return world.query(find_owner_room, world.owner_id(owner)).held / FILE


def deliver(world, *nodes):
    """Submit without a verdict until there is no lease; returns the submissions, and why there is none.

    Who waits for verdicts gets no further: rejected work leads to rests, and to fewer trials."""
    names, code = [], ""
    for node in nodes:
        while (answer := world.ask(node)).lease is not None or answer.code == "trial":
            if answer.lease is None:
                world.wait(answer.retry_after_s)
            else:
                names.append(world.submit(node, answer.lease))
        code = answer.code
    return names, code


def fill(world, *nodes):
    """Occupy as much as the nodes can with rejected files; returns the submissions, and why there are no more."""
    names, code = deliver(world, *nodes)
    for _ in names:
        world.judge("judge-a", Verdict.SOFT)
    return names, code


def test_a_file_is_no_larger_than_its_lease_can_hold(world):
    lease = world.lease("w1")
    most = limit_lease_file(world.params, lease.count)
    assert most < 10**5
    with pytest.raises(ApiError, match=f"at most {most} bytes"):
        world.commit("w1", world.make_manifest(lease, size=most + 1))
    assert world.commit("w1", world.make_manifest(lease, size=most)).size == most


def test_the_largest_file_follows_from_groups_tokens_and_prompts():
    params = RunParams(group_size=2, max_tokens=200)
    sizes = [limit_lease_file(params, groups) for groups in (1, 2, 64)]
    assert sizes[0] < sizes[1] < 2 * sizes[0] and sizes[2] < 64 * sizes[0]
    assert limit_lease_file(params.model_copy(update={"max_prompt_tokens": 64}), 1) < sizes[0]
    assert limit_lease_file(params.model_copy(update={"max_tokens": 2000}), 1) > sizes[0]
    assert limit_lease_file(params.model_copy(update={"blob_max_bytes": 1000}), 64) == 1000


def test_files_of_new_owners_are_deleted_early_however_large_a_lease_of_others_may_be():
    fixed, free = (RunParams(groups_per_batch=64, groups_per_lease=groups) for groups in (1, 0))
    assert free.most_per_lease == 32 and find_patience(free, 0) == find_patience(fixed, 0)


def test_an_owner_without_accepted_work_occupies_little_and_others_deliver_all_the_while(tight):
    tight.join("evil", "mallory")
    names, code = fill(tight, "evil")
    assert (len(names), code) == (LEAST_FILES, "room")
    assert count_files(tight, "mallory") == LEAST_FILES
    for name in ("ann", "bob"):
        tight.work(name)


def test_a_second_node_of_the_same_owner_gets_no_more(tight):
    tight.join("evil-1", "mallory")
    tight.join("evil-2", "mallory")
    deliver(tight, "evil-1")
    assert tight.ask("evil-2").code == "room"


def test_many_owners_without_accepted_work_share_one_pool(tight):
    names = [f"evil-{number}" for number in range(3 * POOL // LEAST_FILES)]
    for name in names:
        tight.join(name, name)
    fill(tight, *names)
    assert sum(count_files(tight, name) for name in names) == POOL
    assert tight.query(find_total_room).over == POOL * FILE
    assert "new owners get no leases" in " ".join(tight.coordinator.read_status().alarms)
    for name in ("ann", "bob"):
        for _ in range(3):
            tight.work(name)


def test_the_pool_is_free_again_after_a_while_though_it_was_filled_with_rejected_files(tight):
    names = [f"evil-{number}" for number in range(POOL // LEAST_FILES)]
    for name in names:
        tight.join(name, name)
    files, _ = fill(tight, *names)
    tight.join("new", "newcomer")
    answers = []
    for _ in range(len(names) + 1):  # the most trials that a newcomer waits for its turn
        answers.append(tight.ask("new").code)
        tight.wait(tight.coordinator.params.trial_max_s)
    assert set(answers) == {"trial", "room"}
    tight.wait(tight.params.form_keep_s + APPEAL_SLACK_S + CLEANUP_EVERY_S)
    assert tight.ask("new").lease is not None
    row = tight.query(find_submission, files[0])
    assert (row.dropped, row.state) == (1, SubmissionState.SOFT), "the verdict stays"
    with pytest.raises(ApiError, match="file was deleted"):
        tight.appeal(names[0], files[0])
    assert "can no longer be appealed" in tight.coordinator.explain(files[0])


def test_the_rejected_file_of_an_owner_with_accepted_work_can_be_appealed_however_short_room_is(tight):
    rejected = tight.work("ann", Verdict.SOFT)
    names = [f"evil-{number}" for number in range(POOL // LEAST_FILES)]
    for name in names:
        tight.join(name, name)
    fill(tight, *names)
    tight.wait(tight.params.form_keep_s + APPEAL_SLACK_S + CLEANUP_EVERY_S)
    assert tight.query(find_submission, rejected).dropped == 0
    assert tight.appeal("ann", rejected).state == "open"


def test_no_appeal_is_opened_while_its_file_is_being_deleted(tight, monkeypatch):
    tight.join("evil", "mallory")
    names, _ = fill(tight, "evil")
    found = []

    async def remove(name):
        tight.blobs.blobs.pop(name, None)
        if not found:
            found.append(name)
            with pytest.raises(ApiError, match="file was deleted"):
                await tight.coordinator.appeal(describe_appeal(tight, "mallory", names[0]))

    monkeypatch.setattr(tight.blobs, "remove", remove)
    tight.wait(tight.params.form_keep_s + APPEAL_SLACK_S + CLEANUP_EVERY_S)
    assert found == [tight.query(find_submission, names[0]).blob]


def describe_appeal(world, owner, submission):
    statement = AppealStatement(submission=submission)
    signature = sign_message(world.owners[owner], "demo", statement)
    return SignedAppeal(appeal=statement, owner=world.owner_id(owner), signature=signature)


def test_accepted_work_earns_room_of_its_own(tight):
    tight.join("w", "wim")
    accepted = 3
    for _ in range(accepted):
        tight.work("w")
    names, code = fill(tight, "w")
    assert (len(names), code) == (accepted + LEAST_FILES, "room")


def test_what_is_not_accepted_of_one_owner_is_a_part_of_the_store_whatever_it_earned(make_world):
    world = make_world(
        store_bytes=MIN_FILES * FILE, groups_per_batch=500, steps=1, async_level=0, max_leases_per_owner=1000
    )
    world.publish(0)
    for number in range(MIN_FILES // 8 + 1):
        world.join(f"n{number}", "ann")
    for _ in range(MIN_FILES // 8 + 4):
        world.work("n0")
    held = [world.ask(f"n{number}").code for number in range(MIN_FILES // 8 + 1)]
    assert held == [""] * (MIN_FILES // 8) + ["room"]


def test_tiny_files_count_as_the_largest_their_lease_can_have(tight):
    tight.join("evil", "mallory")
    names, _ = fill(tight, "evil")
    assert sum(tight.query(find_submission, name).size for name in names) < 100
    assert count_files(tight, "mallory") == len(names)


def test_leases_count_before_anything_is_sent_and_no_longer_when_they_end(tight):
    for number in range(LEAST_FILES + 1):
        tight.join(f"evil-{number}", "mallory")
    leases = [tight.ask(f"evil-{number}").lease for number in range(LEAST_FILES + 1)]
    assert [lease is not None for lease in leases] == [True] * LEAST_FILES + [False]
    tight.run(tight.coordinator.return_lease(tight.id("evil-0"), leases[0].lease))
    tight.run(tight.coordinator.leave(tight.id("evil-1")))
    assert count_files(tight, "mallory") == LEAST_FILES - 2
    tight.wait(10**4)
    assert count_files(tight, "mallory") == 0


def test_a_file_that_never_came_gives_its_room_back_within_minutes(tight):
    tight.join("evil", "mallory")
    lease = tight.lease("evil")
    tight.commit("evil", tight.make_manifest(lease, size=FILE))
    assert count_files(tight, "mallory") == 1
    tight.wait(tight.params.upload_s + 2)
    tight.wait(CLEANUP_EVERY_S)
    assert count_files(tight, "mallory") == 0


def test_a_late_submission_needs_room_again(tight):
    tight.change(late_s=10**5, lease_first_s=60)
    tight.join("evil", "mallory")
    lease = tight.lease("evil")
    tight.wait(61)
    assert count_files(tight, "mallory") == 0
    names = [f"evil-{number}" for number in range(2 * POOL // LEAST_FILES)]
    for name in names:
        tight.join(name, name)
    fill(tight, *names)
    with pytest.raises(ApiError, match="used up"):
        tight.commit("evil", tight.make_manifest(lease))


def test_a_form_rejection_is_kept_and_can_be_appealed_for_a_short_time(tight):
    late = tight.work("ann", Verdict.FORM)
    tight.wait(tight.params.form_keep_s - 1)
    assert tight.query(find_submission, late).blob in tight.blobs.blobs
    assert "may appeal until" in tight.coordinator.explain(late)
    tight.wait(2)
    with pytest.raises(ApiError, match="expired"):
        tight.appeal("ann", late)
    tight.wait(APPEAL_SLACK_S + CLEANUP_EVERY_S)
    row = tight.query(find_submission, late)
    assert (row.dropped, row.state) == (1, SubmissionState.FORM)
    assert row.blob not in tight.blobs.blobs


def test_a_file_that_arrives_after_it_was_given_up_is_not_left_behind(tight, monkeypatch):
    tight.join("evil", "mallory")
    lease = tight.lease("evil")
    submission = tight.commit("evil", tight.make_manifest(lease)).submission
    put = tight.blobs.put

    async def put_late(name, size, chunks):
        await put(name, size, chunks)
        tight.now_ms += 1000 * (tight.params.upload_s + 2)
        await tight.coordinator.tick()

    monkeypatch.setattr(tight.blobs, "put", put_late)
    with pytest.raises(ApiError, match="no longer expected"):
        tight.upload("evil", submission, lease.lease.encode())
    assert not [data for data in tight.blobs.blobs.values() if data == lease.lease.encode()]
    tight.wait(CLEANUP_EVERY_S)
    assert count_files(tight, "mallory") == 0


def test_a_full_store_is_an_alarm_and_gives_no_leases(tight):
    tight.change(store_bytes=4 * FILE)
    tight.wait(1)
    assert tight.ask("ann").lease is not None
    tight.change(store_bytes=FILE)
    assert tight.ask("bob").code == "room"
    assert "no room for a further file" in " ".join(tight.coordinator.read_status().alarms)
