"""Several submissions judged at once: each gets the numbers that it gets alone, to the last bit."""

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from shoal.redteam.attacks.int8 import Int8Author
from shoal.swarm.messages import Verdict
from shoal.swarm.params import MILLION
from shoal.toploc.check import Batch, Report, check_batches
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.sequence import Stream
from shoal.validator import proof
from shoal.validator.meaning import Meaning
from shoal.validator.proof import Case, check_proofs
from shoal.worker.author import Author


@pytest.fixture
def stack(hand_in, tmp_path: Path):
    """Hands in work and keeps its file beside those of others."""

    def keep(name: str, *args: object, **changes: object):
        case = hand_in(*args, **changes)
        case.path = Path(shutil.copy(case.path, tmp_path / f"{name}.parquet"))
        case.job = case.job.model_copy(update={"submission": f"s{len(name)}"})
        return case

    return keep


def test_opinions_are_the_same_together_and_alone(stack, judge_together) -> None:
    cases = [
        stack("a", Author),
        stack("bb", Int8Author),
        stack("ccc", Author, check_ppm=MILLION // 2, check_seed="ef" * 32),
        stack("dddd", Author),
        stack("eeeee", Author, first=1),
        stack("ffffff", Author, edit_proofs=lambda proofs: proofs | {"g0.0": []}),
    ]
    cases[3].path.write_bytes(b"PAR1 is not all that it takes PAR1")
    alone = [case.opinion() for case in cases]
    assert judge_together(cases) == alone
    assert judge_together(cases[::-1]) == alone[::-1]
    found = [opinion.verdict for opinion in alone]
    assert found == [Verdict.ACCEPTED, Verdict.HARD, Verdict.ACCEPTED, Verdict.FORM, Verdict.FORM, Verdict.HARD]
    assert [opinion.replayed.rollouts for opinion in alone] == [8, 8, 4, 0, 0, 8]


def test_a_bound_on_memory_changes_no_number(stack, judge_together, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [stack("a", Author), stack("bb", Int8Author), stack("ccc", Author, check_ppm=MILLION // 4)]
    whole = judge_together(cases)
    sizes: list[int] = []
    real = check_batches

    def count(models, batches, *args, **changes) -> list[list[Report]]:
        sizes.append(len(batches))
        return real(models, batches, *args, **changes)

    monkeypatch.setattr(proof, "check_batches", count)
    monkeypatch.setattr(proof, "MAX_TOKENS", 1)
    assert judge_together(cases) == whole
    assert sizes == [1, 1, 1]


def test_reports_are_the_same_to_the_bit(stack, court, policies, calibration, recipe) -> None:
    """Not only in the six digits that a verdict shows."""
    runner, judge = court
    batches: list[Batch] = []
    for name, author in (("a", Author), ("bb", Int8Author), ("ccc", Author)):
        case = stack(name, author, check_ppm=MILLION // len(name))
        contents = runner.run(judge._read(case.job, case.path, case.policy))
        plans = Meaning(recipe, case.policy.tokenizer).plan(case.job)
        batches.append(Case(job=case.job, plans=plans, contents=contents).draw())
    policy = policies[0]
    values = {"eos_id": policy.eos_id, "seeded": recipe.seeded}
    together = check_batches({0: policy.model}, batches, calibration, **values)
    alone = [check_batches({0: policy.model}, [batch], calibration, **values)[0] for batch in batches]
    for ours, theirs in zip(chain(*together), chain(*alone), strict=True):
        assert (ours.rollout_id, ours.findings, ours.chunks) == (theirs.rollout_id, theirs.findings, theirs.chunks)
        assert all(np.array_equal(ours.odds[stream], theirs.odds[stream]) for stream in ours.odds)


def test_nothing_to_check_is_no_mistake(policies, calibration) -> None:
    assert check_proofs([], policies[0].model, calibration, eos_id=policies[0].eos_id, seeded=True) == []


def test_small_faults_in_every_rollout_are_found_though_each_alone_would_pass(
    hand_in, calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rollouts of a submission are evidence together: who stays below every threshold everywhere is found by it."""
    case, real = hand_in(), check_batches
    alone: list[bool] = []

    def blur(models, batches, *args, **changes) -> list[list[Report]]:
        (reports,) = real(models, batches, *args, **changes)
        alone.extend(finding.failed for report in reports for finding in report.findings)
        return [[replace(report, chunks=tuple(map(raise_drift, report.chunks))) for report in 4 * reports]]

    def raise_drift(chunk: ChunkStats) -> ChunkStats:
        levels = calibration.bets[chunk.is_full][Stream.LOGPROB].levels
        return replace(chunk, logprob_mean=2.0 * max(level.value for level in levels))

    monkeypatch.setattr(proof, "check_batches", blur)
    opinion = case.opinion()
    assert alone and not any(alone)
    assert opinion.verdict is Verdict.HARD
    (found,) = [finding for finding in opinion.findings if not finding.passed]
    assert found.check == "sequence" and found.where.startswith("all of it")
