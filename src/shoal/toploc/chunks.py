"""The statistics of one chunk of 32 tokens: measured on honest rollouts by calibration, and compared by the checks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shoal.engine.base import CHUNK
from shoal.rollout import Rollout
from shoal.toploc.replay import Replay
from shoal.toploc.token_checks import compare_logprobs
from shoal.toploc.verify import ChunkResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStats:
    """Larger is worse for all except `bias`, which is signed."""

    tokens: int
    """32, or fewer in a rollout's last chunk"""
    exponent: float
    """how many of the verifier's top values have a different exponent in the proof"""
    mantissa: float
    """mean difference of the other values' mantissas, in units of the last bfloat16 bit"""
    median: float
    """median of the same"""
    sign: float
    """values whose sign differs"""
    distance: float
    """largest distance of a token from its seed's draw, in probability"""
    distance_mean: float
    logprob: float
    """largest difference of a token's log-prob"""
    logprob_mean: float
    bias: float
    """mean of claimed - recomputed log-prob, with sign"""

    @property
    def is_full(self) -> bool:
        """A short chunk commits to smaller values of fewer tokens and is noisier: it has thresholds of its own."""
        return self.tokens == CHUNK


STATISTICS = tuple(field.name for field in fields(ChunkStats) if field.name != "tokens")


def measure_chunks(
    rollout: Rollout, replay: Replay, results: Sequence[ChunkResult], *, seeded: bool = True
) -> list[ChunkStats]:
    """One record per chunk of an admitted rollout; `results` are those of its proofs.

    Without seeds there is no draw to be distant from: the distances are 0.
    """
    starts = np.arange(0, rollout.num_tokens, CHUNK)
    assert len(results) >= len(starts), "every chunk has a result; surplus proofs add one more"
    counts = np.diff(starts, append=rollout.num_tokens)
    gaps = compare_logprobs(rollout.logprobs, replay.logprobs)
    distances = replay.distances if seeded else np.zeros(rollout.num_tokens)
    columns = {
        "distance": np.maximum.reduceat(distances, starts),
        "distance_mean": np.add.reduceat(distances, starts) / counts,
        "logprob": np.maximum.reduceat(np.abs(gaps), starts),
        "logprob_mean": np.add.reduceat(np.abs(gaps), starts) / counts,
        "bias": np.add.reduceat(gaps, starts) / counts,
    }
    return [
        ChunkStats(
            tokens=int(counts[index]),
            exponent=float(result.exp_mismatches),
            mantissa=float(result.mant_err_mean),
            median=float(result.mant_err_median),
            sign=float(result.sign_mismatches),
            **{name: float(column[index]) for name, column in columns.items()},
        )
        for index, result in enumerate(results[: len(starts)])
    ]


def stack_stats(chunks: Sequence[ChunkStats]) -> dict[str, np.ndarray]:
    """Every statistic as an array over chunks."""
    return {name: np.array([getattr(chunk, name) for chunk in chunks], dtype=np.float64) for name in STATISTICS}
