"""Several submissions judged at once: each gets the same numbers as alone, to the last bit."""

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from shoal.protocol.messages import Verdict
from shoal.protocol.params import MILLION
from shoal.redteam.attacks.weights import Int8Behaviour
from shoal.submission.read import ReadCost
from shoal.toploc.check import CheckBatch, RolloutReport, check_batches
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.sequential_test import EvidenceStream
from shoal.validator import proof
from shoal.validator.consistency import ConsistencyCheck
from shoal.validator.proof import ProofCase, check_proofs
from shoal.worker.behaviour import WorkerBehaviour


@pytest.fixture
def stack(hand_in, tmp_path: Path):
    """Submits work and keeps its file next to those of others."""

    def keep(name: str, *args: object, **changes: object):
        case = hand_in(*args, **changes)
        case.path = Path(shutil.copy(case.path, tmp_path / f"{name}.parquet"))
        case.job = case.job.model_copy(update={"submission": f"s{len(name)}"})
        return case

    return keep


def test_opinions_are_the_same_together_and_alone(stack, judge_together) -> None:
    cases = [
        stack("a", WorkerBehaviour),
        stack("bb", Int8Behaviour),
        stack("ccc", WorkerBehaviour, check_ppm=MILLION // 2, check_seed="ef" * 32),
        stack("dddd", WorkerBehaviour),
        stack("eeeee", WorkerBehaviour, first=1),
        stack("ffffff", WorkerBehaviour, edit_proofs=lambda proofs: proofs | {"g0.0": []}),
    ]
    cases[3].path.write_bytes(b"PAR1 is not all that it takes PAR1")
    alone = [case.opinion() for case in cases]
    assert judge_together(cases) == alone
    assert judge_together(cases[::-1]) == alone[::-1]
    found = [opinion.verdict for opinion in alone]
    assert found == [Verdict.ACCEPTED, Verdict.HARD, Verdict.ACCEPTED, Verdict.FORM, Verdict.FORM, Verdict.HARD]
    assert [opinion.replayed.rollouts for opinion in alone] == [8, 8, 4, 0, 0, 8]


def test_a_bound_on_memory_changes_no_number(stack, judge_together, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        stack("a", WorkerBehaviour),
        stack("bb", Int8Behaviour),
        stack("ccc", WorkerBehaviour, check_ppm=MILLION // 4),
    ]
    whole = judge_together(cases)
    sizes: list[int] = []
    real = check_batches

    def count(models, batches, *args, **changes) -> list[list[RolloutReport]]:
        sizes.append(len(batches))
        return real(models, batches, *args, **changes)

    monkeypatch.setattr(proof, "check_batches", count)
    monkeypatch.setattr(proof, "MAX_TOKENS", 1)
    assert judge_together(cases) == whole
    assert sizes == [1, 1, 1]


def test_reports_are_the_same_to_the_bit(stack, judge_runner, policies, calibration, recipe) -> None:
    """Not only in the six digits that a verdict shows."""
    runner, judge = judge_runner
    batches: list[CheckBatch] = []
    for name, author in (("a", WorkerBehaviour), ("bb", Int8Behaviour), ("ccc", WorkerBehaviour)):
        case = stack(name, author, check_ppm=MILLION // len(name))
        contents = runner.run(judge._read(case.job, case.path, case.policy, ReadCost()))
        plans = ConsistencyCheck(recipe, case.policy.tokenizer).plan(case.job)
        batches.append(ProofCase(job=case.job, plans=plans, contents=contents).draw())
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
    """All rollouts of a submission are combined evidence: it finds a worker that stays below every single threshold."""
    case, real = hand_in(), check_batches
    alone: list[bool] = []

    def blur(models, batches, *args, **changes) -> list[list[RolloutReport]]:
        (reports,) = real(models, batches, *args, **changes)
        alone.extend(finding.failed for report in reports for finding in report.findings)
        return [[replace(report, chunks=tuple(map(raise_drift, report.chunks))) for report in 4 * reports]]

    def raise_drift(chunk: ChunkStats) -> ChunkStats:
        levels = calibration.bets[chunk.is_full][EvidenceStream.LOGPROB].levels
        return replace(chunk, logprob_mean=2.0 * max(level.value for level in levels))

    monkeypatch.setattr(proof, "check_batches", blur)
    opinion = case.opinion()
    assert alone and not any(alone)
    assert opinion.verdict is Verdict.HARD
    (found,) = [finding for finding in opinion.findings if not finding.passed]
    assert found.check == "sequence" and found.where.startswith("all of it")
