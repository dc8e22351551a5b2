"""What a verdict states about accepted work, in whole numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from shoal.protocol.messages import Verdict
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.toploc.check import RolloutReport
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.sequential_test import Bet, EvidenceStream, Level
from shoal.validator.finding import count_drift, describe_group


def make_group(*logprobs, rewards):
    rollouts = [
        Rollout(
            id=str(place),
            prompt_ids=np.zeros(1, np.int32),
            token_ids=np.zeros(len(own), np.int32),
            logprobs=np.array(own, np.float32),
            finish=Finish.STOP,
            versions=(VersionRange(0, 0, len(own)),),
            temperature=1.0,
            seed=0,
        )
        for place, own in enumerate(logprobs)
    ]
    scores = tuple(Score(reward, "") for reward in rewards)
    return Group(index=3, task_id="t", rollouts=tuple(rollouts), scores=scores)


def make_report(*chunks):
    empty = dict.fromkeys(("exponent", "mantissa", "median", "sign", "distance", "distance_mean", "logprob"), 0.0)
    stats = [ChunkStats(tokens=size, logprob_mean=gap, bias=0.0, **empty) for size, gap in chunks]
    return RolloutReport(rollout_id="r", findings=(), chunks=tuple(stats))


def make_calibration(full, short):
    def make(levels):
        return {
            EvidenceStream.LOGPROB: Bet(levels=tuple(Level(value=value, chance=chance) for value, chance in levels))
        }

    return SimpleNamespace(bets={True: make(full), False: make(short)})


LEVELS = [(0.1, 0.5), (0.2, 0.25), (0.3, 0.1), (0.4, 1.0)]


def test_the_numbers_of_a_group_by_hand():
    found = describe_group(make_group([-1.0, -2.0], [-0.5], rewards=[1.0, 0.25]), signal=True)
    assert (found.index, found.signal) == (3, True)
    assert found.numbers is not None
    assert (found.numbers.tokens, found.numbers.reward, found.numbers.entropy) == (3, 625_000, 1_166_667)


@pytest.mark.parametrize(("logprob", "wanted"), [(-1e30, 10**12), (1e30, -(10**12))])
def test_numbers_beyond_the_bounds_are_reported_as_the_bound(logprob, wanted):
    found = describe_group(make_group([logprob], rewards=[0.0]), signal=False)
    assert found.numbers is not None
    assert found.numbers.entropy == wanted


def test_drift_is_counted_at_each_level_for_full_chunks_and_for_short_ones():
    reports = [make_report((32, 0.15), (32, 0.35), (7, 0.1)), make_report((32, 0.05), (1, float("nan")))]
    counts = count_drift(reports, make_calibration(LEVELS, LEVELS[::-1]))
    rows = [(count.level, count.chance, count.chunks, count.above) for count in counts]
    assert rows[:4] == [(0, 500_001, 3, 2), (1, 250_001, 3, 1), (2, 100_001, 3, 1), (3, 1_000_000, 3, 0)]
    assert [row[2:] for row in rows[4:]] == [(2, 1)] * 4, "NaN is beyond each level"


def test_kinds_of_chunks_that_did_not_occur_are_not_reported():
    assert count_drift([], make_calibration(LEVELS, LEVELS)) == ()
    assert len(count_drift([make_report((32, 0.0))], make_calibration(LEVELS, LEVELS))) == 4


def test_an_accepting_opinion_has_numbers_and_drift_and_no_other_has(hand_in):
    opinion = hand_in().opinion()
    assert opinion.verdict is Verdict.ACCEPTED
    numbers = [group.numbers for group in opinion.groups]
    assert sum(own.tokens for own in numbers) == opinion.tokens
    assert all(own.entropy > 0 and 0 <= own.reward <= 10**6 for own in numbers)
    assert {count.level for count in opinion.drift} == {0, 1, 2, 3}
    rejected = hand_in(edit_proofs=lambda proofs: {name: [] for name in proofs}).opinion()
    assert (rejected.verdict, rejected.groups, rejected.drift) == (Verdict.HARD, (), ())
