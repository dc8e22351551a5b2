"""What an owner sees of how its submission was judged: all that the validator had, afterwards, and only its own."""

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.identity.delegation import sign_revocation
from shoal.net.api_error import ApiError
from shoal.node.owner_client import check_evidence, load_evidence, save_evidence
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import EvidenceAnswer, Job, SubmissionState, Verdict


def show(world: Any, key: str, submission: str) -> EvidenceAnswer:
    answer = world.run(world.coordinator.show_evidence(key, submission))
    check_evidence(answer, submission, run="demo", coordinator=world.key.public)
    return answer


def open_file(world: Any, key: str, submission: str) -> bytes:
    return world.run(world.coordinator.open_evidence(key, submission))


def forget_deadline(job: Job) -> Job:
    return job.model_copy(update={"deadline_ms": 0})


def test_the_owner_sees_each_job_as_its_validator_had_it(world) -> None:
    lease = world.lease("w1")
    name = world.submit("w1", lease)
    first = world.take("judge-a")
    world.post("judge-a", world.describe_verdict(first, Verdict.HARD))
    second = world.take("judge-b")
    world.post("judge-b", world.describe_verdict(second, Verdict.HARD))
    for key in (world.owner_id("ann"), world.id("w1")):  # both are banned by now
        answer = show(world, key, name)
        assert answer.evidence.state is SubmissionState.HARD
        assert answer.evidence.list_jobs() == [forget_deadline(first), forget_deadline(second)]
        assert [signed.verdict.verdict for signed in answer.verdicts] == [Verdict.HARD, Verdict.HARD]
        assert [own.validator for own in answer.evidence.sittings] == [world.id("judge-a"), world.id("judge-b")]
        assert open_file(world, key, name) == lease.lease.encode()


def test_what_a_claim_fixed_is_shown_whatever_came_later(make_world) -> None:
    world = make_world(good_after=1, check_probation=900_000)
    world.join("w1", "ann")
    world.publish(0)
    name = world.submit("w1", world.lease("w1"))
    job = world.take("judge-a")
    world.change(check_probation=800_000)
    assert world.take("judge-a") == job, "the same job when it is requested again"
    world.post("judge-a", world.describe_verdict(job))
    assert show(world, world.owner_id("ann"), name).evidence.list_jobs() == [forget_deadline(job)]


def test_nothing_is_shown_before_the_decision(world) -> None:
    lease = world.lease("w1")
    name = world.commit("w1", world.make_manifest(lease)).submission
    for step in (lambda: None, lambda: world.upload("w1", name, lease.lease.encode()), lambda: world.take("judge-a")):
        step()
        for look in (show, open_file):
            with pytest.raises(ApiError, match="not decided"):
                look(world, world.owner_id("ann"), name)
    world.post("judge-a", world.describe_verdict(world.take("judge-a"), Verdict.HARD))
    with pytest.raises(ApiError, match="not decided"):  # a second opinion is pending
        show(world, world.owner_id("ann"), name)


@pytest.mark.parametrize("look", [show, open_file])
def test_nothing_is_shown_to_others(world, look) -> None:
    name = world.work("w1")
    look(world, world.owner_id("ann"), name)
    strangers = [world.owner_id("bob"), world.id("w2"), world.id("judge-a"), world.operator.public, "0" * 64]
    for key in strangers:
        with pytest.raises(ApiError, match="no such submission"):
            look(world, key, name)
    world.run(world.coordinator.revoke(sign_revocation(world.owners["ann"], world.id("w1"), "demo")))
    with pytest.raises(ApiError, match="no such submission"):
        look(world, world.id("w1"), name)
    look(world, world.owner_id("ann"), name)


def test_what_was_not_judged_or_is_not_kept_is_said(world) -> None:
    lease = world.lease("w1")
    unsent = world.commit("w1", world.make_manifest(lease)).submission
    world.wait(world.params.upload_s + 1)
    with pytest.raises(ApiError, match="unsent and was not judged"):
        show(world, world.owner_id("ann"), unsent)
    with pytest.raises(ApiError, match="its file did not arrive"):
        open_file(world, world.owner_id("ann"), unsent)
    rejected = world.work("w2", Verdict.SOFT)
    world.wait(world.params.appeal_s + world.params.challenge_s + 1)
    world.wait(3600)
    assert show(world, world.owner_id("bob"), rejected).evidence.state is SubmissionState.SOFT
    with pytest.raises(ApiError, match="the file was deleted"):
        open_file(world, world.owner_id("bob"), rejected)


def test_an_appeal_adds_its_sittings(world) -> None:
    name = world.work("w1", Verdict.SOFT)
    world.appeal("ann", name)
    world.judge("judge-b")
    evidence = show(world, world.owner_id("ann"), name).evidence
    assert evidence.state is SubmissionState.ACCEPTED
    assert [own.round for own in evidence.sittings] == [1, 2]
    assert len({job.check_seed for job in evidence.list_jobs()}) == 1


def test_tampered_evidence_is_refused(world, tmp_path: Path) -> None:
    name = world.work("w1", Verdict.SOFT)
    answer, path = show(world, world.owner_id("ann"), name), tmp_path / "case.json"
    names = {"run": "demo", "coordinator": world.key.public}
    save_evidence(path, answer)
    assert load_evidence(path, name, **names) == answer
    (signed,) = answer.verdicts
    milder = signed.model_copy(update={"verdict": signed.verdict.model_copy(update={"tokens": 5})})
    job = answer.evidence.job.model_copy(update={"check_seed": "0" * 64})
    for bad in (
        answer.model_copy(update={"verdicts": (milder,)}),
        answer.model_copy(update={"verdicts": ()}),
        answer.model_copy(update={"evidence": answer.evidence.model_copy(update={"job": job})}),
        answer.model_copy(update={"document": answer.document[:-1]}),
    ):
        with pytest.raises(InvalidDocumentError):
            check_evidence(bad, name, **names)
        save_evidence(path, bad)
        with pytest.raises(ConfigError, match=str(path)):
            load_evidence(path, name, **names)
    for changed in ({"coordinator": world.operator.public}, {"run": "other"}):
        with pytest.raises(InvalidDocumentError):
            check_evidence(answer, name, **{**names, **changed})
    with pytest.raises(InvalidDocumentError):
        check_evidence(answer, "s1", **names)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not evidence"):
        load_evidence(path, name, **names)
