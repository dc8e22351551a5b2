"""Statistics of chunks, by hand."""

import numpy as np
import pytest
import torch

from shoal.rollout import Finish, Rollout, VersionRange
from shoal.toploc.chunks import STATISTICS, measure_chunks, stack_stats
from shoal.toploc.replay import Replay
from shoal.toploc.verify import ChunkResult

RESULT = ChunkResult(3, 0.5, 0.25, 2, 1, 64, 127, 128)


def make_pair(tokens: int) -> tuple[Rollout, Replay]:
    claimed = np.full(tokens, -1.0, dtype=np.float32)
    rollout = Rollout(
        id="r",
        prompt_ids=np.array([1], dtype=np.int32),
        token_ids=np.full(tokens, 5, dtype=np.int32),
        logprobs=claimed,
        finish=Finish.LENGTH,
        versions=(VersionRange(0, 0, tokens),),
        temperature=1.0,
        seed=0,
    )
    recomputed = claimed.copy()
    recomputed[0] += 0.25
    recomputed[-1] -= 0.5
    distances = np.zeros(tokens)
    distances[1], distances[-1] = 0.1, 0.3
    replay = Replay(
        hidden=torch.zeros(tokens, 4),
        logprobs=recomputed,
        distances=distances,
        eos_probs=np.zeros(tokens),
        tilts=np.zeros((tokens, 0)),
        masses=np.zeros(tokens),
    )
    return rollout, replay


def test_each_chunk_has_its_own_numbers() -> None:
    first, last = measure_chunks(*make_pair(34), [RESULT, RESULT])
    assert (first.tokens, first.is_full, last.tokens, last.is_full) == (32, True, 2, False)
    assert (first.exponent, first.mantissa, first.median, first.sign) == (3.0, 0.5, 0.25, 2.0)
    assert (first.distance, first.distance_mean) == (0.1, 0.1 / 32)
    assert (first.logprob, first.logprob_mean, first.bias) == (0.25, 0.25 / 32, -0.25 / 32)
    assert (last.distance, last.distance_mean) == (0.3, 0.15)
    assert (last.logprob, last.logprob_mean, last.bias) == (0.5, 0.25, 0.25)


@pytest.mark.parametrize(("tokens", "chunks"), [(2, 1), (32, 1), (33, 2), (64, 2)])
def test_there_is_one_record_per_chunk_and_none_for_surplus_proofs(tokens: int, chunks: int) -> None:
    assert len(measure_chunks(*make_pair(tokens), [RESULT] * (chunks + 1))) == chunks


def test_without_seeds_there_is_no_distance() -> None:
    (chunk,) = measure_chunks(*make_pair(5), [RESULT], seeded=False)
    assert chunk.distance == chunk.distance_mean == 0.0 and chunk.logprob == 0.5


def test_statistics_are_stacked_by_name() -> None:
    stats = stack_stats(measure_chunks(*make_pair(40), [RESULT, RESULT]))
    assert set(stats) == set(STATISTICS) and "tokens" not in stats
    assert stats["exponent"].tolist() == [3.0, 3.0]
