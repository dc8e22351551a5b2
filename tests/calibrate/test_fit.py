"""From samples to limits and bets: shares of the rate, the worst group, floors."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.calibrate.calibrate import FLOORS, LEVEL_FLOORS, LEVELS, SLACK, fit_kinds
from shoal.toploc.calibration import LIMITED, SHARES
from shoal.toploc.chunks import STATISTICS, ChunkStats, stack_stats
from shoal.toploc.finding import Check
from shoal.toploc.sequential_test import CALIBRATED, EvidenceStream, SequentialEvidence, read_stream

QUIET = ChunkStats(tokens=32, **dict.fromkeys(STATISTICS, 0.0))


def make_rollouts(num: int, scale: float, seed: int) -> list[list[ChunkStats]]:
    """Rollouts of one full and one short chunk whose statistics are exponential with this mean."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for index in range(num):
        draws = rng.exponential(scale, (2, len(STATISTICS)))
        rows = [dict(zip(STATISTICS, row.tolist(), strict=True)) for row in draws]
        sizes = (32, 1 + index % 31)
        rollouts.append([ChunkStats(tokens=size, **row) for size, row in zip(sizes, rows, strict=True)])
    return rollouts


def fit(samples, **changes: float):
    return fit_kinds(samples, **{"rate": 1e-4, "confidence": 0.95, "max_tokens": 512, **changes})


@pytest.fixture(scope="module")
def samples() -> dict[str, list[list[ChunkStats]]]:
    return {"calm": make_rollouts(600, 1.0, 0), "loud": make_rollouts(600, 1.5, 1)}


def test_the_rate_is_shared_by_checks_and_chunks(samples) -> None:
    full, short = fit(samples)
    assert set(full.limits) == set(LIMITED) and set(full.bets) == set(CALIBRATED)
    assert full.limits[Check.MANTISSA].rate == pytest.approx(1e-4 / SHARES / 2 / 16)
    assert short.limits[Check.MANTISSA].rate == pytest.approx(1e-4 / SHARES / 2)


def test_longer_rollouts_and_rarer_alarms_raise_the_thresholds(samples) -> None:
    base = fit(samples)[0].limits[Check.MANTISSA].threshold
    assert fit(samples, max_tokens=8192)[0].limits[Check.MANTISSA].threshold > base
    assert fit(samples, rate=1e-6)[0].limits[Check.MANTISSA].threshold > base
    assert fit(samples, rate=1e-2)[0].limits[Check.MANTISSA].threshold < base


def test_a_small_group_is_protected_as_much_as_a_large_one(samples) -> None:
    calm = samples["calm"]
    whole, split = fit({"a": calm})[0].limits[Check.MANTISSA], fit({"a": calm[:570], "b": calm[570:]})[0].limits
    assert split[Check.MANTISSA].threshold > whole.threshold + 2, "a rate twenty times smaller is aimed at: ln 20 = 3"
    assert split[Check.MANTISSA].rate == whole.rate


def test_a_limit_records_what_was_measured(samples) -> None:
    limit = fit(samples)[0].limits[Check.MANTISSA]
    values = np.array([chunks[0].mantissa for rollouts in samples.values() for chunks in rollouts])
    assert limit.num_samples == 1200 and limit.method == "tail"
    assert limit.quantiles["1"] == values.max() < limit.threshold
    assert limit.quantiles["0.5"] == pytest.approx(np.median(values), rel=0.01)
    assert limit.proven == pytest.approx(-math.log((0.05 / 2) / (6 + 6 * 4 * 3)) / 1200, rel=0.01)


def test_the_chance_of_a_bet_is_that_of_the_loudest_group(samples) -> None:
    loud = np.array([chunks[0].mantissa for chunks in samples["loud"]])
    pooled = np.concatenate([loud, [chunks[0].mantissa for chunks in samples["calm"]]])
    levels = fit(samples)[0].bets[EvidenceStream.MANTISSA].levels
    for level, share in zip(levels, LEVELS, strict=True):
        assert level.value == np.quantile(pooled, share, method="higher")
        assert level.chance > SLACK * (loud > level.value).mean() >= (pooled > level.value).mean()
    assert levels[0].chance < 1.5 * (loud > levels[0].value).mean()


def test_sizes_of_short_chunks_are_groups_too() -> None:
    """One-token chunks five times as noisy as the others: a node that writes only these must not alarm."""
    calm = make_rollouts(620, 1.0, 2)
    loud = [[full, replace(short, mantissa=5 * short.mantissa) if short.tokens == 1 else short] for full, short in calm]
    plain, mixed = fit({"a": calm})[1].bets[EvidenceStream.MANTISSA], fit({"a": loud})[1].bets[EvidenceStream.MANTISSA]
    ones = np.array([short.mantissa for _, short in loud if short.tokens == 1])
    assert all(level.chance >= (ones > level.value).mean() for level in mixed.levels)
    assert mixed.levels[1].chance > 1.2 * plain.levels[1].chance


def test_silence_gives_floors() -> None:
    silent = {"a": [[QUIET, replace(QUIET, tokens=3)]] * 300}
    for kind in fit(silent):
        assert all(FLOORS[check] <= limit.threshold <= 3 * FLOORS[check] for check, limit in kind.limits.items())
        for stream, bet in kind.bets.items():
            assert {level.value for level in bet.levels} == {LEVEL_FLOORS[stream]}
            assert all(0 < level.chance < 0.1 for level in bet.levels)


def test_a_signed_stream_is_bet_on_from_both_sides() -> None:
    rng = np.random.default_rng(0)
    rollouts = [[replace(QUIET, bias=float(rng.normal(0.01, 0.01)), logprob=0.1)] for _ in range(800)]
    short = [[replace(chunks[0], tokens=5)] for chunks in rollouts]
    bets = fit({"a": rollouts + short})[0].bets
    assert bets[EvidenceStream.ABOVE].levels[0].value == pytest.approx(0.01, abs=0.001)
    assert bets[EvidenceStream.BELOW].levels[0].value == LEVEL_FLOORS[EvidenceStream.BELOW]
    assert bets[EvidenceStream.BELOW].levels[1].value == pytest.approx(0.01 * (1.2816 - 1), abs=0.002)


def test_samples_of_one_kind_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples of full chunks, or none of short"):
        fit({"a": [[QUIET]] * 100})


@pytest.mark.parametrize("scale", [1.2, 3.0, 100.0])
def test_no_variant_exceeds_a_level_more_often_than_its_chance(scale: float) -> None:
    """A node may always run the noisiest variant: a bet that it wins on average would convict it."""
    samples = {"calm": make_rollouts(700, 1.0, 0), "loud": make_rollouts(100, scale, 1)}
    for kind, place in zip(fit(samples), (0, 1), strict=True):
        for stream, bet in kind.bets.items():
            for rollouts in samples.values():
                values = read_stream(stack_stats([chunks[place] for chunks in rollouts]), stream)
                assert all((values > level.value).mean() <= level.chance <= 1 for level in bet.levels)


def test_an_honest_node_of_the_loudest_variant_is_never_convicted() -> None:
    samples = {"calm": make_rollouts(700, 1.0, 0), "loud": make_rollouts(100, 30.0, 1)}
    full, short = fit(samples)
    evidence = SequentialEvidence()
    for chunks in make_rollouts(2000, 30.0, 2):
        evidence = evidence.extend(chunks, {True: full.bets, False: short.bets})
    assert not evidence.judge(1e-4).failed


def test_rare_flips_have_room_for_the_next_one() -> None:
    """Of a thousand chunks one had a flipped sign, or none: two in one chunk prove nothing."""
    for flips in (0, 1):
        chunks = [[replace(QUIET, sign=float(i < flips)), replace(QUIET, tokens=3)] for i in range(1000)]
        assert fit({"a": chunks})[0].limits[Check.SIGN].threshold >= 2
