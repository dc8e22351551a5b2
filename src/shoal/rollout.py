"""The records that travel through the system: request, rollout, score, group.

Invariants:

- token ids travel end to end; text is decoded from them, never the other way round;
- every per-token array of a rollout has the length of `token_ids`;
- records carry an id and are matched by it, never by order of iteration.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Finish(StrEnum):
    """Why a rollout ended: it wrote the end token, or it reached its token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout to generate. Top-p is 1 and top-k off by contract, so neither is a field."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Tokens start .. end - 1 of a rollout were sampled with weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion as the engine returns it."""

    id: str
    prompt_ids: np.ndarray
    """int32"""
    token_ids: np.ndarray
    """int32, including the end token if there is one"""
    logprobs: np.ndarray
    """float32 log-softmax(logits / temperature) of each chosen token"""
    finish: Finish
    versions: tuple[VersionRange, ...]
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        assert len(self.logprobs) == len(self.token_ids), "log-probs and token ids differ in length"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def version(self) -> int:
        """The oldest version that sampled any of its tokens: staleness is measured from it."""
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's result: value in [0, 1] and the reason in a few words."""

    value: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G rollouts of one task with their scores, in order of sample index."""

    index: int
    """position of the group in its step; task and seeds derive from it"""
    task_id: str
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        assert len(self.rollouts) == len(self.scores), "each rollout has exactly one score"

    @property
    def rewards(self) -> np.ndarray:
        return np.array([score.value for score in self.scores], dtype=np.float32)

    @property
    def num_tokens(self) -> int:
        return sum(rollout.num_tokens for rollout in self.rollouts)
