"""Several claims at once: of one version, not all available jobs, and no worse for a job than a single claim."""

import pytest

from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.submissions import find_submission
from shoal.protocol.messages import MAX_JOBS, Job, Standing, SubmissionState, Verdict

PEOPLE = {f"w{number}": f"owner-{number}" for number in range(6)}


@pytest.fixture
def world(make_world):
    """Six workers of six owners, and work for more than that."""
    world = make_world(groups_per_batch=40, max_pending_per_owner=40, probation_leases=40)
    for node, owner in PEOPLE.items():
        world.join(node, owner)
    world.publish(0)
    return world


def submit_all(world, nodes=tuple(PEOPLE), **changes) -> list[str]:
    return [world.submit(node, world.lease(node), **changes) for node in nodes]


def claim(world, judge: str, most: int = MAX_JOBS) -> list[Job]:
    return list(world.run(world.coordinator.claim_jobs(world.id(judge), most)).jobs)


def names(jobs: list[Job]) -> list[str]:
    return [job.submission for job in jobs]


def state_of(world, submission: str) -> str:
    return world.query(find_submission, submission).state


def test_half_of_what_waits_is_claimed_at_once_in_the_order_of_turns(world) -> None:
    sent = submit_all(world)
    assert names(claim(world, "judge-a")) == sent[:3]
    assert names(claim(world, "judge-b")) == sent[3:5]
    assert names(claim(world, "judge-c")) == sent[5:]
    for judge, jobs in (("judge-a", sent[:3]), ("judge-b", sent[3:5]), ("judge-c", sent[5:])):
        held = claim(world, judge)
        assert names(held) == jobs, "the same claims, and no more, until they are judged"
        for job in held:
            world.post(judge, world.describe_verdict(job))
    assert all(state_of(world, name) == SubmissionState.ACCEPTED for name in sent)
    assert world.verify().holds


@pytest.mark.parametrize("most", [1, 2])
def test_nobody_gets_more_than_it_asked_for(world, most: int) -> None:
    sent = submit_all(world)
    assert names(claim(world, "judge-a", most)) == sent[:most]


def test_never_more_than_the_bound_whatever_is_there(world) -> None:
    for _ in range(4):
        submit_all(world)
    assert len(claim(world, "judge-a", MAX_JOBS)) == MAX_JOBS
    assert len(claim(world, "judge-b", 1000)) == MAX_JOBS


def test_claims_at_once_are_of_one_version(world) -> None:
    old = submit_all(world, ("w0", "w1"))
    world.change(groups_per_lease=20)
    for node in ("w2", "w3"):
        world.submit(node, world.lease(node))
    while (job := world.claim("judge-a").job) is not None:
        world.post("judge-a", world.describe_verdict(job))
    assert all(state_of(world, name) == SubmissionState.ACCEPTED for name in old)
    world.train(1)
    world.change(groups_per_lease=1)
    sent = [
        world.submit(node, world.lease(node, version)) for node, version in zip(PEOPLE, (0, 1, 1, 0, 0, 1), strict=True)
    ]
    assert names(claim(world, "judge-a", 3)) == [sent[0], sent[3]], "those with accepted work first"
    assert names(claim(world, "judge-b", 3)) == [sent[1], sent[2]], "half of what is left"
    assert names(claim(world, "judge-c", 3)) == [sent[4]], "then those without"
    assert world.verify().holds


def test_own_work_is_never_among_the_claims(world) -> None:
    world.join("mine", "judge-a")
    sent = submit_all(world, ("w0", "mine", "w1", "w2", "w3", "w4"))
    assert names(claim(world, "judge-a")) == [sent[0], sent[2], sent[3]]


def test_claims_that_lapse_together_count_as_one(world) -> None:
    sent = submit_all(world)
    assert len(claim(world, "judge-a")) == 3
    world.wait(world.params.claim_s)
    owner = world.query(find_owner, world.owner_id("judge-a"))
    assert (owner.lapses, owner.standing) == (1, Standing.PROBATION)
    assert [state_of(world, name) for name in sent[:3]] == [SubmissionState.RECEIVED] * 3
    assert world.verify().holds


def test_what_was_judged_in_time_does_not_lapse_with_the_rest(world) -> None:
    sent = submit_all(world)
    first, *_ = claim(world, "judge-a")
    world.post("judge-a", world.describe_verdict(first))
    world.wait(world.params.claim_s)
    assert state_of(world, sent[0]) == SubmissionState.ACCEPTED
    assert world.query(find_owner, world.owner_id("judge-a")).lapses == 1


def test_a_file_that_ends_its_validator_takes_others_along_only_once(world) -> None:
    sent = submit_all(world)
    assert names(claim(world, "judge-a")) == sent[:3]
    world.wait(world.params.claim_s)
    assert names(claim(world, "judge-b")) == sent[3:6], "untried jobs first and together"
    for judge, name in (("judge-c", sent[0]), ("judge-a", sent[1])):
        # judge-a gets a job that it let lapse when there is nothing else
        assert names(claim(world, judge)) == [name], "alone"
        world.post(judge, world.describe_verdict(claim(world, judge)[0]))
        assert state_of(world, name) == SubmissionState.ACCEPTED


def test_second_opinions_are_claimed_one_by_one(world) -> None:
    submit_all(world)
    for job in claim(world, "judge-a", 2):
        world.post("judge-a", world.describe_verdict(job, Verdict.HARD))
    jobs = claim(world, "judge-b")
    assert {job.round for job in jobs} == {1} or len(jobs) == 1
