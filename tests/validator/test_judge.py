"""Verdicts on honest work, and on work that is not."""

import asyncio
import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.protocol.messages import RolloutEntry, Verdict
from shoal.redteam.attacks.weights import Int8Behaviour, StaleBehaviour
from shoal.rollout import Group, Rollout, Score
from shoal.sandbox import pool
from shoal.tasks.base import score_texts
from shoal.tasks.verify.base import mark_near
from shoal.validator import consistency
from shoal.validator.finding import Assessment
from shoal.validator.judge import Judge


def failed(opinion: Assessment) -> set[str]:
    return {finding.check for finding in opinion.findings if not finding.passed}


def edit_first(**changes: object):
    """Change fields of the first rollout."""

    def edit(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        rollouts = (replace(first.rollouts[0], **changes), *first.rollouts[1:])
        return (replace(first, rollouts=rollouts), *rest)

    return edit


@pytest.mark.parametrize("version", [0, 1])
def test_honest_work_is_accepted_with_its_numbers(hand_in, version: int) -> None:
    case = hand_in(version=version)
    opinion = case.opinion()
    assert opinion.verdict is Verdict.ACCEPTED and not failed(opinion)
    assert opinion.tokens == sum(entry.tokens for entry in case.job.manifest.rollouts) > 0
    assert [group.index for group in opinion.groups] == [0, 1]
    assert {"toploc_exponent", "sampling", "logprob"} <= {finding.check for finding in opinion.findings}
    assert opinion.state(case.job).submission == "s1"


def test_the_same_file_gets_the_same_numbers(hand_in) -> None:
    case = hand_in()
    assert case.opinion() == case.opinion()


@pytest.mark.parametrize("author", [Int8Behaviour, StaleBehaviour])
def test_other_weights_are_found_out(hand_in, author) -> None:
    opinion = hand_in(author, version=1).opinion()
    assert opinion.verdict is Verdict.HARD
    assert failed(opinion) & {"toploc_exponent", "toploc_mantissa", "toploc_median", "logprob", "sampling", "sequence"}
    assert opinion.tokens == 0 and opinion.groups == ()


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"seed": 5}, "request"),
        ({"temperature": 0.5}, "request"),
        ({"prompt_ids": np.array([3, 4], dtype=np.int32)}, "request"),
    ],
)
def test_other_work_than_was_asked_for_is_not_paid(hand_in, changes, check: str) -> None:
    opinion = hand_in(edit=edit_first(**changes)).opinion()
    assert opinion.verdict is Verdict.SOFT and failed(opinion) == {check}


def test_a_reward_that_our_verifier_cannot_decide_is_inconclusive(hand_in, monkeypatch) -> None:
    def claim(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        return (replace(first, scores=(Score(0.75, ""), *first.scores[1:])), *rest)

    monkeypatch.setattr(consistency, "score_texts", lambda *words: list(map(mark_near, score_texts(*words))))
    assert hand_in().opinion().verdict is Verdict.ACCEPTED, "equal numbers agree"
    opinion = hand_in(edit=claim).opinion()
    assert opinion.verdict is Verdict.INCONCLUSIVE and failed(opinion) == {"limit"}


@pytest.mark.parametrize("bounded", [True, False])
def test_a_doubt_about_a_reward_hides_nothing_else(hand_in, monkeypatch, bounded: bool) -> None:
    """Otherwise an owner of record submits rubbish for ever, without blame, with one text near a limit in each file."""

    def claim(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        return (replace(first, scores=(Score(0.75, ""), *first.scores[1:])), *rest)

    def claim_and_lie(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        last = replace(first.rollouts[-1], temperature=0.5)
        return claim([replace(first, rollouts=(*first.rollouts[:-1], last)), *rest])

    monkeypatch.setattr(consistency, "score_texts", lambda *words: list(map(mark_near, score_texts(*words))))
    forged = hand_in(StaleBehaviour, version=1, edit=claim, bounded=bounded).opinion()
    assert forged.verdict is Verdict.HARD and "limit" in failed(forged)
    assert hand_in(edit=claim_and_lie, bounded=bounded).opinion().verdict is Verdict.SOFT
    monkeypatch.setattr(consistency, "CHANCE_NATS", 5.0)
    assert hand_in(edit=claim, bounded=bounded, duplicates=(3,)).opinion().verdict is Verdict.SOFT


def test_what_sandboxes_use_is_part_of_the_cpu_time_of_a_verdict(hand_in, monkeypatch) -> None:
    def score_in_sandboxes(*words):
        pool._JOBS_CPU.add(50.0)
        return score_texts(*words)

    monkeypatch.setattr(consistency, "score_texts", score_in_sandboxes)
    assert 100 <= hand_in().opinion().cpu_s < 200, "two groups"


@pytest.mark.parametrize(
    ("is_same", "verdict", "check"), [(True, Verdict.HARD, "reward"), (False, Verdict.INCONCLUSIVE, "limit")]
)
def test_a_reward_that_differs_under_other_conditions_is_inconclusive(
    hand_in, monkeypatch, is_same: bool, verdict: Verdict, check: str
) -> None:
    def claim(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        return (replace(first, scores=(Score(0.75, ""), *first.scores[1:])), *rest)

    def score_again(family, task, text, first: Score) -> Iterator[Score]:
        return iter((first, first if is_same else replace(first, value=1.0 - first.value)))

    monkeypatch.setattr(consistency, "score_again", score_again)
    assert hand_in().opinion().verdict is Verdict.ACCEPTED
    opinion = hand_in(edit=claim).opinion()
    assert opinion.verdict is verdict and failed(opinion) == {check}


def test_a_claimed_reward_is_recomputed(hand_in) -> None:
    def praise(groups: Sequence[Group]) -> Sequence[Group]:
        first, *rest = groups
        scores = tuple(Score(1.0 - score.value, "correct") for score in first.scores)
        return (replace(first, scores=scores), *rest)

    opinion = hand_in(edit=praise).opinion()
    assert opinion.verdict is Verdict.HARD and failed(opinion) == {"reward"}


@pytest.mark.parametrize(("claimed", "verdict"), [(1.0, Verdict.HARD), (0.0, Verdict.SOFT)])
def test_a_lie_about_an_expensive_reward_is_fraud_but_giving_up_too_soon_is_not(
    hand_in, monkeypatch, claimed: float, verdict: Verdict
) -> None:
    """Every owner that is drawn lying is convicted: 72 % of such lies were paid while they were only soft."""
    monkeypatch.setattr(consistency, "is_expensive", lambda family, task: True)
    monkeypatch.setattr(
        consistency, "score_texts", lambda family, task, texts: [Score(1.0 - claimed, "firm") for _ in texts]
    )

    def claim(groups: Sequence[Group]) -> Sequence[Group]:
        return [replace(group, scores=tuple(Score(claimed, "") for _ in group.scores)) for group in groups]

    opinion = hand_in(edit=claim).opinion()
    assert opinion.verdict is verdict
    assert failed(opinion) == {"reward" if verdict is Verdict.HARD else "reward_low"}


def test_a_rollout_cut_short_breaks_the_stop_rule(hand_in) -> None:
    def cut(groups: Sequence[Group]) -> Sequence[Group]:
        rollout: Rollout = groups[0].rollouts[0]
        assert rollout.num_tokens > 1
        changes = {"token_ids": rollout.token_ids[:-1], "logprobs": rollout.logprobs[:-1]}
        span = replace(rollout.versions[0], end=rollout.num_tokens - 1)
        return edit_first(**changes, versions=(span,))(groups)

    opinion = hand_in(edit=cut).opinion()
    assert opinion.verdict is Verdict.SOFT and "termination" in failed(opinion)


def test_edited_log_probs_are_found_out(hand_in) -> None:
    def shift(groups: Sequence[Group]) -> Sequence[Group]:
        return edit_first(logprobs=groups[0].rollouts[0].logprobs - np.float32(0.1))(groups)

    opinion = hand_in(edit=shift).opinion()
    assert opinion.verdict is Verdict.HARD and "logprob" in failed(opinion)


def test_missing_proofs_are_found_out(hand_in) -> None:
    opinion = hand_in(edit_proofs=lambda proofs: proofs | {"g0.0": []}).opinion()
    assert opinion.verdict is Verdict.HARD and "toploc_fault" in failed(opinion)


def test_proofs_of_another_rollout_are_found_out(hand_in) -> None:
    opinion = hand_in(edit_proofs=lambda proofs: proofs | {"g0.0": proofs["g1.1"]}).opinion()
    assert opinion.verdict is Verdict.HARD


def test_copies_that_the_coordinator_names_are_not_paid(hand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "CHANCE_NATS", 5.0)  # answers this short would not count as copies
    opinion = hand_in(duplicates=(3,)).opinion()
    assert opinion.verdict is Verdict.SOFT and failed(opinion) == {"copy"}


def test_groups_that_were_not_leased_are_a_matter_of_form(hand_in) -> None:
    opinion = hand_in(first=1).opinion()
    assert opinion.verdict is Verdict.FORM and failed(opinion) == {"groups"}


def test_a_manifest_about_something_else_is_a_matter_of_form(hand_in) -> None:
    case = hand_in()
    entries = (RolloutEntry(hash="0" * 64, tokens=1), *case.job.manifest.rollouts[1:])
    case.job = case.job.model_copy(update={"manifest": case.job.manifest.model_copy(update={"rollouts": entries})})
    opinion = case.opinion()
    assert opinion.verdict is Verdict.FORM and failed(opinion) == {"manifest"}


def test_an_invalid_file_is_a_matter_of_form(hand_in) -> None:
    case = hand_in()
    case.path.write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")
    opinion = case.opinion()
    assert opinion.verdict is Verdict.FORM and failed(opinion) == {"form"}
    assert opinion.state(case.job).findings


def test_what_is_late_is_computed_to_its_end_before_anything_else_is(
    hand_in, judge_runner: tuple[asyncio.Runner, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped: two that replay at once would both be late."""
    (runner, judge), case, ends = judge_runner, hand_in(), threading.Event()
    compute, begun = judge._judge_read, list[bool]()

    def compute_slowly(*args: Any) -> list[Assessment]:
        begun.append(ends.is_set())
        assert ends.wait(60.0)
        return compute(*args)

    monkeypatch.setattr(judge, "_judge_read", compute_slowly)

    async def go() -> Assessment:
        late = asyncio.create_task(judge.judge(case.job, case.path, case.policy))
        while not begun:
            await asyncio.sleep(0.01)
        late.cancel()
        finishing = asyncio.create_task(judge.finish())
        next_one = asyncio.create_task(judge.judge(case.job, case.path, case.policy))
        done, _ = await asyncio.wait((finishing, next_one), timeout=0.2)
        assert not done
        ends.set()
        await finishing
        return await next_one

    assert runner.run(go()).verdict is Verdict.ACCEPTED and begun == [False, True]


def test_a_file_may_be_as_large_as_the_run_took_it(hand_in, policies) -> None:
    """The operator may raise the file limit at any time; the author of a file of that size is not to blame."""
    case = hand_in()
    large = case.job.model_copy(update={"manifest": case.job.manifest.model_copy(update={"size": 1 << 27})})
    assert Judge(None, None, None).limit_file(large, policies[0]).file_bytes == 1 << 27  # type: ignore[arg-type]


def test_a_judge_computes_in_what_the_bench_of_the_loop_calls_prefill(hand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench" / "loop_probe"))
    stages = {stage.name: stage for stage in importlib.import_module("loop_stages").STAGES}
    (target,) = stages["prefill"].targets
    module, _, name = target.partition(":")
    replay, seen = getattr(importlib.import_module(module), name), list[int]()

    def count_rollouts(model: Any, batches: Sequence[Sequence[Rollout]], **options: Any) -> Any:
        seen.extend(map(len, batches))
        return replay(model, batches, **options)

    monkeypatch.setattr(f"shoal.toploc.check.{name}", count_rollouts)
    case = hand_in()
    assert case.opinion().verdict is Verdict.ACCEPTED and seen == [len(case.job.manifest.rollouts)]


def test_without_the_filter_every_accepted_group_counts(hand_in, judge_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (_, judge) = hand_in(), judge_runner
    assert not all(group.signal for group in case.opinion().groups)
    monkeypatch.setattr(judge, "_recipe", judge._recipe.model_copy(update={"filter": False}))
    assert all(group.signal for group in case.opinion().groups)
