"""Files of submissions: kept as long as they may be needed, and no longer."""

from contextlib import ExitStack
from dataclasses import fields
from functools import partial

import pytest

from shoal.coordinator.decide.submissions import APPEAL_SLACK_S, CLEANUP_EVERY_S, BlobGate
from shoal.coordinator.state.submissions import SubmissionRow, find_submission
from shoal.ledger.event import EventKind
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.messages import SubmissionState, Verdict


@pytest.fixture
def small(make_world):
    """One group in a batch, windows of 100 s for challenges and 300 s for appeals."""
    world = make_world(groups_per_batch=1, async_level=0, challenge_s=100, appeal_s=300, opinion_s=50)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    return world


def has_file(world, submission):
    return world.query(find_submission, submission).blob in world.blobs.blobs


def test_the_file_of_a_batch_is_there_until_it_was_trained_on_and_the_window_is_over(small):
    submission = small.work("w1")
    small.wait(10_000)
    assert has_file(small, submission), "in no batch yet"
    small.cut(1)
    small.wait(10_000)
    assert has_file(small, submission), "not trained on yet"
    small.train(1)
    small.wait(99)
    assert has_file(small, submission)
    small.wait(CLEANUP_EVERY_S)
    assert not has_file(small, submission)
    row = small.query(find_submission, submission)
    assert row.dropped == 1
    events = [
        event for event in small.query(lambda c: list(read_events(c, 0, 1000))) if event.kind == EventKind.BLOB_DROP
    ]
    assert [event.content for event in events] == [{"blobs": [row.blob]}]


def test_the_file_of_a_rejection_is_there_while_it_can_be_appealed_and_judged_again(small):
    submission = small.work("w1", Verdict.SOFT)
    small.wait(250)
    assert has_file(small, submission)
    small.appeal("ann", submission)
    small.wait(45)
    small.take("judge-b")
    small.wait(100)
    assert has_file(small, submission), "a validator may be reading it"
    small.wait(1000)
    assert small.query(find_submission, submission).state == SubmissionState.SOFT
    small.wait(301 + APPEAL_SLACK_S)
    assert not has_file(small, submission)


def test_the_file_of_an_open_appeal_is_there_however_long_it_takes(small):
    submission = small.work("w1", Verdict.SOFT)
    small.change(opinion_s=10**7)
    small.appeal("ann", submission)
    small.wait(10**6)
    assert has_file(small, submission)
    small.judge("judge-b")
    small.wait(10**4)
    assert has_file(small, submission), "accepted now, and its step not trained"


def test_the_file_of_what_is_awaited_or_judged_is_there(make_world):
    world = make_world(challenge_s=1, appeal_s=1, claim_s=10**7, opinion_s=10**7, lease_max_s=3600)
    world.join("w1", "ann")
    world.publish(0)
    submission = world.submit("w1", world.lease("w1"))
    world.wait(10**6)
    assert has_file(world, submission), "in the queue"
    world.take("judge-a")
    world.wait(10**6)
    assert has_file(world, submission), "claimed"


def test_an_outage_gives_more_time_to_appeal_and_keeps_the_file_as_long(small):
    submission = small.work("w1", Verdict.SOFT)
    small.wait(200)
    small.now_ms += 10**6
    small.restart()
    small.wait(90)
    assert has_file(small, submission)
    assert small.appeal("ann", submission).state == "open"


def test_a_file_that_came_too_late_is_not_kept_for_ever(make_world):
    world = make_world(challenge_s=100, groups_per_batch=1, async_level=0)
    world.join("w1", "ann")
    world.publish(0)
    lease = world.lease("w1")
    submission = world.commit("w1", world.make_manifest(lease)).submission
    world.blobs.blobs[world.query(find_submission, submission).blob] = lease.lease.encode()  # stored, then killed
    world.wait(world.params.upload_s + 1)
    assert world.query(find_submission, submission).state == SubmissionState.UNSENT
    assert not has_file(world, submission)


def test_a_file_handed_in_again_is_kept_for_the_one_that_needs_it(small):
    first = small.work("w1", Verdict.SOFT)
    name = small.query(find_submission, first).lease
    small.wait(1)
    lease = small.lease("w1")
    small.wait(249)
    second = small.commit(
        "w1", small.make_manifest(lease, blob=small.query(find_submission, first).blob, size=len(name))
    )
    small.upload("w1", second.submission, name.encode())
    small.wait(400)
    assert has_file(small, first), "the second submission has the same file"
    small.judge("judge-a")
    small.train(1)
    small.wait(1000)
    assert not has_file(small, second.submission)


def test_a_kill_between_the_removal_and_its_record_costs_nothing(small, monkeypatch):
    submission = small.work("w1", Verdict.SOFT)
    small.wait(1)

    async def break_off(name):
        small.blobs.blobs.pop(name)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(small.blobs, "remove", break_off)
        with pytest.raises(RuntimeError):
            small.wait(1000)
    assert small.query(find_submission, submission).dropped == 0
    small.restart()
    small.wait(1000)
    assert small.query(find_submission, submission).dropped == 1


def test_no_file_is_uploaded_while_it_is_removed_and_none_removed_while_it_is_uploaded():
    gate = BlobGate()
    upload = partial(gate.upload, has_record=True)
    with upload(make_row("s1", blob="a")), upload(make_row("s2", blob="a")), gate.removal(["a", "b"]) as taken:
        assert taken == ["b"]
        with pytest.raises(ApiError, match="busy"), upload(make_row("s3", blob="b")):
            pass
        with gate.removal(["b"]) as again:
            assert again == []
    with upload(make_row("s3", blob="b")), gate.removal(["a"]) as taken:
        assert taken == ["a"]


def make_row(name, owner="ann", blob="a"):
    values = {field.name: 0 if field.type is int else "" for field in fields(SubmissionRow)}
    return SubmissionRow(**{**values, "submission": name, "owner": owner, "blob": blob})


def test_a_submission_is_uploaded_once_at_a_time():
    upload = partial(BlobGate().upload, make_row("s1"), has_record=True)
    with upload(), pytest.raises(ApiError, match="already being uploaded"), upload():
        pass
    with upload():
        pass


def test_an_owner_has_a_quarter_of_the_uploads_and_newcomers_together_half():
    gate = BlobGate(max_uploads=8)
    with ExitStack() as stack:
        for name in ("s1", "s2"):
            stack.enter_context(gate.upload(make_row(name), has_record=False))
        with pytest.raises(ApiError, match="too many concurrent"), gate.upload(make_row("s3"), has_record=False):
            pass
        for name, owner in (("s3", "bob"), ("s4", "cleo")):
            stack.enter_context(gate.upload(make_row(name, owner), has_record=False))
        with pytest.raises(ApiError, match="too many"), gate.upload(make_row("s5", "dan"), has_record=False):
            pass
        stack.enter_context(gate.upload(make_row("s5", "dan"), has_record=True))
