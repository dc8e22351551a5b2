"""Only the leased work passes: values, copies, rewards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.messages import Finding, Job
from shoal.recipe import Recipe
from shoal.rollout import Group, Rollout, Score, VersionRange
from shoal.submission.read import SubmissionContents
from shoal.tasks.base import Task, is_expensive, score_text
from shoal.validator.consistency import CHANCE_NATS, ConsistencyCheck
from shoal.validator.proof import draw_positions

MILLION = 1_000_000


class HonestWork:
    """Honest work as parsed, to be changed and checked."""

    def __init__(self, job: Job, groups: Sequence[Group], meaning: ConsistencyCheck) -> None:
        self.job, self.groups, self.meaning = job, tuple(groups), meaning

    def look(self, groups: Sequence[Group] | None = None, **changes: object) -> list[Finding]:
        contents = SubmissionContents(groups=tuple(groups or self.groups), proofs={})
        manifest = self.job.manifest.model_copy(update={"rollouts": contents.entries})
        job = self.job.model_copy(update={"manifest": manifest, **changes})
        return list(self.meaning.find_violations(job, self.meaning.plan(job), contents))


@pytest.fixture
def honest(hand_in, recipe: Recipe) -> HonestWork:
    kept: list[Sequence[Group]] = []
    case = hand_in(edit=lambda groups: kept.append(groups) or groups)
    return HonestWork(case.job, kept[0], ConsistencyCheck(recipe, case.policy.tokenizer))


def checks(findings: Sequence[Finding]) -> set[str]:
    return {finding.check for finding in findings}


def change(groups: Sequence[Group], place: int, edit: Callable[[Rollout], Rollout]) -> list[Group]:
    """Change one rollout of the first group."""
    first, *rest = groups
    rollouts = [edit(rollout) if at == place else rollout for at, rollout in enumerate(first.rollouts)]
    return [replace(first, rollouts=tuple(rollouts)), *rest]


def with_nats(rollout: Rollout, nats: float, like: Rollout | None = None) -> Rollout:
    """The same rollout, or one with the tokens of another, with this many nats in total."""
    ids = (like or rollout).token_ids
    logprobs = np.full(len(ids), -nats / len(ids), dtype=np.float32)
    finish = (like or rollout).finish
    versions = (VersionRange(rollout.version, 0, len(ids)),)
    return replace(rollout, token_ids=ids, logprobs=logprobs, finish=finish, versions=versions)


def test_honest_work_is_what_was_leased(honest) -> None:
    assert honest.look() == []


@pytest.mark.parametrize(
    ("value", "is_fine"),
    [(0.0, True), (9e-7, True), (1e-3, False), (-40.0, True), (-CHANCE_NATS - 10, False), (-3e38, False)],
)
def test_a_log_prob_is_one_of_a_token_that_can_be_drawn(honest, value: float, is_fine: bool) -> None:
    def set_last(rollout: Rollout) -> Rollout:
        logprobs = rollout.logprobs.copy()
        logprobs[-1] = value
        return replace(rollout, logprobs=logprobs)

    assert checks(honest.look(change(honest.groups, 0, set_last))) == (set() if is_fine else {"bounds"})


@pytest.mark.parametrize(("own", "other", "is_copy"), [(1, 1, False), (39, 39, False), (41, 1, True), (1, 41, True)])
def test_two_rollouts_are_copies_if_they_are_equal_and_unlikely(honest, own: int, other: int, is_copy: bool) -> None:
    """Either claim of how likely they are counts against both: a cheat would have to lie about its best sample too."""
    groups = change(honest.groups, 0, lambda rollout: with_nats(rollout, other))
    first = groups[0].rollouts[0]
    groups = change(groups, 1, lambda rollout: with_nats(rollout, own, like=first))
    assert ("copy" in checks(honest.look(groups))) == is_copy


@pytest.mark.parametrize(("nats", "is_copy"), [(39, False), (41, True)])
def test_a_copy_of_earlier_work_may_be_equal_by_chance_if_it_is_likely(honest, nats: float, is_copy: bool) -> None:
    groups = change(honest.groups, 1, lambda rollout: with_nats(rollout, nats))
    assert checks(honest.look(groups, duplicates=(1,))) == ({"copy"} if is_copy else set())


def test_a_reward_is_equal_to_the_last_bit(honest) -> None:
    first, *rest = honest.groups
    score = first.scores[0]
    nudged = Score(math.nextafter(score.value, 0.5), score.reason)
    findings = honest.look([replace(first, scores=(nudged, *first.scores[1:])), *rest])
    assert checks(findings) == {"reward"}
    assert repr(nudged.value) in findings[0].where


class ExpensiveFamily:
    """A family whose verifier is expensive for some tasks, all unless they are named, and counts its calls."""

    def __init__(self, family: object, expensive: Sequence[str] | None = None) -> None:
        self._family, self.num_asked, self._expensive = family, 0, expensive

    def is_expensive(self, task: Task) -> bool:
        return self._expensive is None or task.id in self._expensive

    def __getattr__(self, name: str) -> object:
        return getattr(self._family, name)

    def score(self, task: Task, completion: str) -> Score:
        self.num_asked += 1
        return self._family.score(task, completion)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("share", "per_group"), [(MILLION, 4), (500_000, 2), (1, 1), (0, 1)])
def test_expensive_rewards_are_recomputed_for_the_jobs_share_and_at_least_one_per_group(
    honest, share, per_group
) -> None:
    size = len(honest.groups[0].rollouts)
    family = ExpensiveFamily(honest.meaning._family)
    honest.meaning._family = family
    assert is_expensive(family, honest.meaning.plan(honest.job)[0].task) and honest.look(check_ppm=share) == []
    assert family.num_asked == len(honest.groups) * min(per_group, size)


def test_one_expensive_task_leaves_no_reward_of_the_others_unchecked(honest) -> None:
    """On a set with one code task, all rewards of the other tasks are computed again."""
    plans = honest.meaning.plan(honest.job)
    assert len({plan.task.id for plan in plans}) == len(plans) > 1
    family = honest.meaning._family = ExpensiveFamily(honest.meaning._family, [plans[0].task.id])
    size = len(honest.groups[0].rollouts)
    assert honest.look(check_ppm=1) == []
    assert family.num_asked == 1 + size * (len(plans) - 1)


@pytest.mark.parametrize(
    ("is_expensive", "claim", "check"),
    [(False, 1, "reward"), (False, -1, "reward"), (True, 1, "reward"), (True, -1, "reward_low")],
)
def test_less_than_a_verifier_with_a_time_limit_finds_is_not_called_a_lie(honest, is_expensive, claim, check) -> None:
    """A slow machine may have given up honestly; none finds more than there is."""
    first, *rest = honest.groups
    honest.meaning._family = ExpensiveFamily(honest.meaning._family, None if is_expensive else [])
    lies = [Score(own.value + claim, own.reason) for own in first.scores]
    findings = honest.look([replace(first, scores=tuple(lies)), *rest], check_ppm=MILLION)
    assert checks(findings) == {check}


class WideFamily(ExpensiveFamily):
    """A family that scores the completions of a group concurrently."""

    def __init__(self, family: object) -> None:
        super().__init__(family)
        self.widths: list[int] = []

    def score_many(self, task: Task, completions: Sequence[str]) -> list[Score]:
        self.widths.append(len(completions))
        return [self.score(task, completion) for completion in completions]


def test_rewards_of_a_group_are_computed_side_by_side_but_for_rollouts_that_were_not_asked_for(honest) -> None:
    family = honest.meaning._family = WideFamily(honest.meaning._family)
    size = len(honest.groups[0].rollouts)
    other = change(honest.groups, 1, lambda rollout: replace(rollout, seed=rollout.seed + 1))
    lie = [Score(1 - own.value, own.reason) if at == 2 else own for at, own in enumerate(other[0].scores)]
    findings = honest.look([replace(other[0], scores=tuple(lie)), *other[1:]], check_ppm=MILLION)
    assert family.widths == [size - 1, *[size] * (len(honest.groups) - 1)]
    assert [finding.check for finding in findings] == ["request", "reward"], "each score is compared with its own claim"
    assert findings[1].where.startswith(other[0].rollouts[2].id)


def test_a_false_expensive_reward_is_found_if_drawn_and_another_seed_draws_others(honest) -> None:
    honest.meaning._family = ExpensiveFamily(honest.meaning._family)
    size, first = len(honest.groups[0].rollouts), honest.groups[0]
    found = set()
    for number in range(40):
        seed = f"{number:064x}"
        job = honest.job.model_copy(update={"check_seed": seed, "check_ppm": 1})
        (drawn,) = draw_positions(job, size, f"reward {first.index} ")
        lie = [Score(1 - own.value, own.reason) if at == 0 else own for at, own in enumerate(first.scores)]
        findings = honest.look([replace(first, scores=tuple(lie)), *honest.groups[1:]], check_seed=seed, check_ppm=1)
        assert checks(findings) == ({"reward"} if drawn == 0 else set())
        found.add(drawn)
    assert found == set(range(size))


class BrokenFamily:
    """A verifier that fails on some texts, or returns an invalid score."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome

    def score(self, task: Task, completion: str) -> Score:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return Score(self._outcome, "")  # type: ignore[arg-type]


@given(
    st.sampled_from([ValueError("x"), KeyError(1), ZeroDivisionError(), RecursionError(), IndexError(), TypeError()])
    | st.floats().filter(lambda value: not 0 <= value <= 1)
)
def test_a_verifier_that_fails_gives_nothing_on_either_side(outcome) -> None:
    score = score_text(BrokenFamily(outcome), None, "text")  # type: ignore[arg-type]
    assert score.value == 0.0 and score.reason.startswith("the verifier")


def test_a_worker_and_a_validator_agree_about_a_text_over_which_the_verifier_fails(honest) -> None:
    broken = BrokenFamily(ValueError("hostile"))
    broken.__dict__.update({name: getattr(honest.meaning._family, name) for name in ("name", "make_task", "alphabet")})
    honest.meaning._family = broken
    zero = [replace(group, scores=tuple(Score(0.0, "") for _ in group.scores)) for group in honest.groups]
    assert honest.look(zero) == []
