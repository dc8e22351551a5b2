"""Validators that always tell the same lie lose their standing within the stated number of jobs.

They use the verdicts of `shoal.redteam.validators`; the two others report what the work is.
"""

import math
import random

import pytest

from shoal.coordinator.rules.validator_trust import (
    BANNED_AT,
    LIMITED_AT,
    SILENT_AT,
    WRONG,
    halve_silence,
    next_score,
    next_silence,
)
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.validators import find_validator
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Standing, Verdict
from shoal.redteam.validators import abstain_job, accept_job, reject_job

BANNED_BY, LIMITED_BY = -(-BANNED_AT // WRONG), -(-LIMITED_AT // WRONG)
"""wrong grades of one side, without a right one, that lead to a ban"""
LIMITS = {"sampling": 1e-5, "logprob": 1e-3}
MILLION = 1_000_000
SURE = 0.99
ROOM = {
    "groups_per_batch": 4000,
    "probation_leases": 64,
    "max_pending_per_owner": 64,
    "limit_after": 10_000,
    "limited_s": 10,
    "max_queue": 4000,
    "lease_max_s": 10**6,
}


def expose_accepting(*, canaries: float, bad: float, second_share: float) -> float:
    """Lower bound of h for a validator that accepts everything."""
    return canaries + bad * second_share


def expose_rejecting(*, good: float, reject_share: float, canaries: float = 0.0) -> float:
    """h for a validator that rejects everything; `canaries` are those whose work is good."""
    return canaries + good * reject_share


def find_liar(chance: float, jobs: int, wrongs: int = BANNED_BY) -> float:
    """The probability of at least so many wrong grades within so many jobs."""
    odds = [math.comb(jobs, number) * chance**number * (1.0 - chance) ** (jobs - number) for number in range(wrongs)]
    return max(0.0, 1.0 - sum(odds))


def count_jobs(chance: float, probability: float, wrongs: int = BANNED_BY) -> int:
    """The smallest number of jobs within which a liar gets so many wrong grades with this probability."""
    assert 0.0 < chance <= 1.0 and 0.0 < probability < 1.0, "a liar that is never graded is never found"
    low, high = wrongs, wrongs
    while find_liar(chance, high, wrongs) < probability:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if find_liar(chance, middle, wrongs) >= probability else (middle + 1, high)
    return low


def begin(make_world, **changes):
    world = make_world(**{**ROOM, **changes})
    for node, owner in (("w1", "ann"), ("cheat", "eve")):
        world.join(node, owner)
    world.publish(0)
    return world


def standing_of(world, owner):
    return world.query(find_owner, world.owner_id(owner)).standing


def pass_on(world, liar, opinion, *, bad):
    """The liar's verdict on one submission, and the verdicts of others until it is decided."""
    node = "cheat" if bad else "w1"
    world.submit(node, world.lease(node))
    job = world.take("judge-a")
    world.post(liar, opinion(job).state(job))
    truth = Verdict.SOFT if bad else Verdict.ACCEPTED
    for judge in ("judge-b", "judge-c"):
        if (job := world.claim(judge).job) is not None:
            world.post(judge, world.describe_verdict(job, truth))


def count_until(world, opinion, *, bad_share, most):
    """Jobs of a liar until it is limited, and until it is banned; time passes whenever it may not judge."""
    rng, limited = random.Random(3), 0
    for number in range(1, most + 1):
        pass_on(world, "judge-a", opinion, bad=rng.random() < bad_share)
        if standing_of(world, "judge-a") == Standing.BANNED:
            return limited, number
        if standing_of(world, "judge-a") == Standing.LIMITED:
            limited = limited or number
            world.wait(world.params.limited_s)
    return limited, most + 1


def test_a_validator_that_rejects_everything_is_banned_by_its_third_job(make_world):
    world = begin(make_world, reject_share=MILLION)
    found = count_until(world, lambda job: reject_job(job, LIMITS), bad_share=0.0, most=9)
    chance = expose_rejecting(good=1.0, reject_share=1.0)
    assert found == (LIMITED_BY, BANNED_BY) == (2, 3)
    assert count_jobs(chance, SURE) == BANNED_BY
    with pytest.raises(ApiError, match="banned"):
        world.claim("judge-a")
    ann = world.query(find_owner, world.owner_id("ann"))
    assert (ann.accepted, ann.rejected, ann.standing) == (3, 0, Standing.GOOD), "and nobody else is harmed"


def test_a_validator_that_accepts_everything_is_banned_within_the_stated_number_of_jobs(make_world):
    share, bad = 500_000, 0.5
    world = begin(make_world, second_share=share, reject_share=MILLION)
    most = count_jobs(expose_accepting(canaries=0.0, bad=bad, second_share=share / MILLION), SURE)
    limited, banned = count_until(world, lambda job: accept_job(job, None, LIMITS), bad_share=bad, most=most)
    assert LIMITED_BY <= limited < banned <= most == 31
    assert world.query(find_validator, world.owner_id("judge-a")).bad >= BANNED_AT


def test_canaries_alone_find_a_validator_that_accepts_everything(make_world):
    """There are no second opinions; one of four jobs is a canary that is revealed some jobs later."""
    world = begin(make_world, second_share=0, good_after=1000)
    rng, share, banned, planted = random.Random(5), 0.25, 0, []
    most = count_jobs(expose_accepting(canaries=share, bad=0.0, second_share=0.0), SURE)
    names = [f"canary-{number}" for number in range(most)]
    world.seal(*names)
    for number in range(1, most + 1):
        node = "w1"
        if rng.random() < share:
            node = names[len(planted)]
            world.join(node, node)
        submission = world.submit(node, world.lease(node))
        job = world.take("judge-a")
        world.post("judge-a", accept_job(job, None, LIMITS).state(job))
        if node != "w1":
            planted.append(submission)
            world.reveal(node, submission)
            assert standing_of(world, "judge-a") in (Standing.LIMITED, Standing.BANNED), "after the first one"
            if standing_of(world, "judge-a") == Standing.BANNED:
                banned = number
                break
            world.wait(world.params.limited_s)
    assert len(planted) == BANNED_BY and 0 < banned <= most == 31


def test_as_a_second_opinion_it_is_found_each_time(make_world):
    """It is asked about work that others reject, and contradicts them."""
    world = begin(make_world, second_share=0, reject_share=MILLION)
    for number in range(BANNED_BY):
        world.join(f"cheat-{number}", f"cheat-{number}")
        world.submit(f"cheat-{number}", world.lease(f"cheat-{number}"))
        world.judge("judge-b", Verdict.SOFT)
        job = world.take("judge-a")
        assert job.round == 2
        world.post("judge-a", accept_job(job, None, LIMITS).state(job))
        world.judge("judge-c", Verdict.SOFT)
        world.wait(world.params.limited_s)
    assert standing_of(world, "judge-a") == Standing.BANNED


def test_wrong_grades_in_a_row_are_what_the_scores_say():
    score, points = 0, []
    for _ in range(BANNED_BY):
        score = next_score(score, right=False)
        points.append(score)
    assert points[LIMITED_BY - 2] < LIMITED_AT <= points[LIMITED_BY - 1] < BANNED_AT <= points[BANNED_BY - 1]


@pytest.mark.parametrize("chance", [1.0, 0.3, 0.01])
def test_the_number_of_jobs_is_the_least_that_does(chance):
    number = count_jobs(chance, SURE)
    assert find_liar(chance, number) >= SURE
    assert number == BANNED_BY or find_liar(chance, number - 1) < SURE


def test_the_number_of_jobs_is_what_is_drawn():
    rng, chance = random.Random(0), 0.2
    most = count_jobs(chance, 0.9)
    found = sum(sum(rng.random() < chance for _ in range(most)) >= BANNED_BY for _ in range(4000))
    assert abs(found / 4000 - find_liar(chance, most)) < 0.02 and found / 4000 > 0.88


def fall_silent(world, *, bad=False):
    """judge-a is inconclusive on one submission, and judge-b decides it."""
    pass_on(world, "judge-a", abstain_job, bad=bad)


def test_a_silent_validator_is_limited_by_the_stated_job_and_sooner_the_next_time(make_world):
    world = begin(make_world)
    limited = []
    for number in range(1, SILENT_AT + SILENT_AT // 2 + 1):
        fall_silent(world)
        if standing_of(world, "judge-a") == Standing.LIMITED:
            limited.append(number)
            with pytest.raises(ApiError, match="may not judge for a while"):
                world.claim("judge-a")
            world.wait(world.params.limited_s)
    assert limited == [SILENT_AT, SILENT_AT + SILENT_AT // 2] == [32, 48]
    assert count_jobs(1.0, SURE, SILENT_AT) == 32 and count_jobs(0.5, SURE, SILENT_AT) == 85
    judge, ann = (world.query(find_owner, world.owner_id(name)) for name in ("judge-a", "ann"))
    assert judge.standing != Standing.BANNED and (ann.rejected, ann.accepted) == (0, 48)


def test_a_validator_without_weights_for_a_while_is_not_limited(make_world):
    world = begin(make_world)
    for _ in range(SILENT_AT - 1):
        fall_silent(world)
    world.work("w1")
    fall_silent(world)
    assert world.query(find_validator, world.owner_id("judge-a")).silence == SILENT_AT - 1
    assert standing_of(world, "judge-a") != Standing.LIMITED


def test_silence_about_work_that_nobody_accepts_does_not_count(make_world):
    """Nobody has the weights, or a stranger submits a file that a reader cannot handle."""
    world = begin(make_world)
    fall_silent(world, bad=True)
    world.submit("w1", world.lease("w1"))
    for judge in ("judge-a", "judge-b", "judge-c"):
        world.judge(judge, Verdict.INCONCLUSIVE)
    silences = [world.query(find_validator, world.owner_id(f"judge-{letter}")).silence for letter in "abc"]
    assert silences == [0, 0, 0]


def test_a_silent_validator_does_not_keep_others_from_convicting(make_world):
    """Three more owners would be asked in addition to the two honest ones, and one of them is useless."""
    world = begin(make_world)
    submission = world.submit("cheat", world.lease("cheat"))
    world.judge("judge-b", Verdict.HARD)
    world.judge("judge-a", Verdict.INCONCLUSIVE)
    world.judge("judge-c", Verdict.HARD)
    assert standing_of(world, "eve") == Standing.BANNED, submission


def test_a_machine_that_is_in_trouble_now_and_then_is_never_limited():
    rng, silence, most = random.Random(1), 0, 0
    for _ in range(100_000):
        silence = next_silence(silence, speaks=rng.random() < 0.75)
        most = max(most, silence)
    assert 4 < most < SILENT_AT
    assert halve_silence(SILENT_AT) == SILENT_AT // 2


def test_after_lapses_a_validator_claims_one_at_a_time_until_it_has_judged(make_world):
    world = begin(make_world, claim_s=10)
    world.join("other", "other")
    for name in ("w1", "other"):
        for _ in range(16):
            world.submit(name, world.lease(name))

    def claim(judge):
        return world.run(world.coordinator.claim_jobs(world.id(judge), most=8)).jobs

    assert len(claim("judge-a")) == 8
    world.wait(11)
    (job,) = claim("judge-a")
    world.post("judge-a", world.describe_verdict(job))
    assert len(claim("judge-a")) == 8, "it judges again"


def test_what_a_validator_has_claimed_goes_to_others_when_it_is_limited(make_world):
    """Otherwise a run would wait `claim_s` for a verdict that would not count."""
    world = begin(make_world)
    for _ in range(SILENT_AT - 1):
        fall_silent(world)
    for _ in range(4):
        world.submit("w1", world.lease("w1"))
    first, *others = world.run(world.coordinator.claim_jobs(world.id("judge-a"), most=2)).jobs
    world.post("judge-a", abstain_job(first).state(first))
    while (job := world.claim("judge-b").job) is not None and standing_of(world, "judge-a") != Standing.LIMITED:
        world.post("judge-b", world.describe_verdict(job))
    assert standing_of(world, "judge-a") == Standing.LIMITED and others
    world.wait(1)
    left = set()
    while (job := world.claim("judge-b").job) is not None:
        left.add(job.submission)
        world.post("judge-b", world.describe_verdict(job))
    assert {job.submission for job in others} <= left
