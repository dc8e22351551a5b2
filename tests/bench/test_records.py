"""Records keep what the checks read, and windows of them are judged like rollouts."""

from pathlib import Path

import numpy as np
import pytest

from attacks import ATTACKS
from parts import Part
from records import (
    Record,
    cut_windows,
    judge_record,
    judge_submission,
    judge_windows,
    load_records,
    replay_attack,
    save_records,
)
from separation import fit_thresholds, list_stats
from shoal.rollout import Finish
from shoal.toploc.calibration import Calibration, hash_model
from shoal.toploc.check import check_rollouts
from shoal.toploc.finding import Check
from shoal.toploc.sequential_test import NUM_LEVELS, Bet, EvidenceStream, Level
from stage import Stage


@pytest.fixture(scope="module")
def records(stage: Stage) -> list[Record]:
    return replay_attack(stage, ATTACKS["greedy"], stage.honest)


@pytest.fixture(scope="module")
def calibration(records: list[Record]) -> Calibration:
    return fit_thresholds(Part("tiny", "float32", (), 16, 80), {"engine": records})


def test_windows_lie_side_by_side_and_the_last_reaches_back() -> None:
    assert cut_windows(7, 4) == [(0, 4), (3, 7)]
    assert cut_windows(8, 4) == [(0, 4), (4, 8)]
    assert cut_windows(3, 4) == [(0, 3)]


def test_saved_records_come_back_equal(records: list[Record], tmp_path: Path) -> None:
    save_records(tmp_path / "some.npz", records)
    for old, new in zip(records, load_records(tmp_path / "some.npz"), strict=True):
        assert old.results == new.results
        assert (old.max_tokens, old.changed, old.rollout.finish) == (new.max_tokens, new.changed, new.rollout.finish)
        assert np.array_equal(old.rollout.token_ids, new.rollout.token_ids)
        for name in ("logprobs", "distances", "eos_probs", "tilts", "masses"):
            assert np.array_equal(getattr(old.replay, name), getattr(new.replay, name))


def test_a_window_without_the_end_is_taken_as_if_the_limit_were_there(records: list[Record]) -> None:
    first, last = records[0].cut(0, 1), records[0].cut(1, 3)
    assert first.max_tokens == first.rollout.num_tokens == 32
    assert first.rollout.finish is Finish.LENGTH
    assert last.rollout.num_tokens == records[0].rollout.num_tokens - 32
    assert last.max_tokens == records[0].max_tokens - 32


def test_honest_windows_pass(records: list[Record], calibration: Calibration, stage: Stage) -> None:
    counts, trials, whole = judge_windows(records, calibration, stage.eos_id)
    assert trials[0] == sum(record.num_chunks for record in records)
    assert sum(count["all"] for count in counts) == 0
    assert judge_submission(whole, calibration) == set()


@pytest.mark.parametrize("name", ["greedy", "half the layers", "1 token edited", "proof of another rollout"])
def test_a_record_fails_what_the_check_of_its_submission_fails(
    name: str, calibration: Calibration, stage: Stage
) -> None:
    work = ATTACKS[name].run(stage)
    known = calibration.model_copy(update={"model_hash": hash_model(stage.model)})
    reports = check_rollouts({0: stage.model}, stage.requests, work.rollouts, work.proofs, known, eos_id=stage.eos_id)
    verdicts = [judge_record(r, calibration, stage.eos_id) for r in replay_attack(stage, ATTACKS[name], work)]
    for report, verdict in zip(reports, verdicts, strict=True):
        failed = {finding.check for finding in report.failed}
        assert ("all" in verdict.failed) == bool(failed)
        assert ("sampling" in verdict.failed) == (Check.SAMPLING in failed)
        assert ("logprob" in verdict.failed) == (Check.LOGPROB in failed)
    assert "all" in judge_submission(verdicts, calibration)


def test_a_small_excess_in_every_chunk_shows_in_the_submission_alone(
    records: list[Record], calibration: Calibration, stage: Stage
) -> None:
    kinds = {}
    for name, whole in (("full", True), ("short", False)):
        kind = getattr(calibration, name)
        values = np.array([chunk.logprob_mean for chunk in list_stats(records) if chunk.is_full == whole])
        level = Level(value=float(values.min()) / 2, chance=0.3)
        low = Bet(levels=(level,) * NUM_LEVELS)
        kinds[name] = kind.model_copy(update={"bets": {**kind.bets, EvidenceStream.LOGPROB: low}})
    strict = calibration.model_copy(update=kinds)
    verdicts = [judge_record(record, strict, stage.eos_id) for record in records]
    assert not any(verdict.failed for verdict in verdicts)
    assert judge_submission(verdicts, strict) == {"sequence", "all"}


def test_work_with_honest_tokens_is_no_other_choice(records: list[Record], stage: Stage) -> None:
    assert not any(record.changed for record in records)
    assert all(record.changed for record in replay_attack(stage, ATTACKS["int8 weights"], stage.honest))
