"""Proofs without the work: a small model writes, and what it hands in as proofs comes from elsewhere.

Such a cheat runs the true weights only once in a while, on tasks of its own, to know what their states look like. It
has no better log-probs than the small model's.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.engine.base import CHUNK
from shoal.group import plan_groups
from shoal.policy.model import Policy
from shoal.redteam.altered import shrink_policy
from shoal.redteam.forge import Forged, decode_requests, list_rollouts
from shoal.seeds import derive_seed
from shoal.toploc.field import P
from shoal.toploc.proof import TOPK, pack_proofs
from shoal.toploc.replay import replay_rollouts
from shoal.worker.author import Author, Work

_STUDIED_GROUPS = 2
Bits = NDArray[np.uint16]


class ProofForger(Author, ABC):
    """Half of the layers write; proofs are forged."""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The small policy, after a look at the true one."""
        true = super().open_policy(version, folder)
        self.study(true)
        return shrink_policy(true)

    @abstractmethod
    def study(self, policy: Policy) -> None:
        """Learn from the true policy what helps to forge."""

    @abstractmethod
    def forge(self, num_tokens: int) -> list[bytes]:
        """Proofs for a rollout of so many tokens."""

    def finish(self, work: Work) -> Work:
        """The small model's work with forged proofs."""
        return replace(work, proofs={r.id: self.forge(r.num_tokens) for r in list_rollouts(work)})

    def work_honestly(self, policy: Policy) -> Forged:
        """Honest work on tasks that nobody asked for."""
        beacon = derive_seed("study", policy.num_parameters)
        plans = plan_groups(
            self.family, policy.tokenizer, self.shape, step=1, beacon=beacon, first=0, count=_STUDIED_GROUPS
        )
        requests = [request for plan in plans for request in plan.requests]
        return decode_requests(policy.model, requests, eos_id=policy.eos_id)

    def read_states(self, policy: Policy) -> list[Tensor]:
        """States (tokens, width) of the true model on such work, for each rollout."""
        rollouts = self.work_honestly(policy).rollouts
        return [replay.hidden for replay in replay_rollouts(policy.model, rollouts, eos_id=policy.eos_id)]


def commit_constant(pattern: int, num_tokens: int, width: int) -> list[bytes]:
    """Proofs by constant polynomials, which show one pattern everywhere; of the right number and lengths."""
    proofs = []
    for start in range(0, num_tokens, CHUNK):
        size = min(TOPK, min(CHUNK, num_tokens - start) * width)
        coefficients = np.zeros((1, size), dtype=np.uint16)
        coefficients[0, 0] = pattern
        proofs += pack_proofs(np.array([P]), coefficients)
    return proofs


def pick_pattern(patterns: Bits) -> np.uint16:
    """The commonest exponent, the median mantissa of those that have it, and their commoner sign."""
    exponents = patterns & 0x7F80
    values, counts = np.unique(exponents, return_counts=True)
    same = patterns[exponents == values[counts.argmax()]]
    sign = 0x8000 if (same >= 0x8000).mean() > 0.5 else 0
    return np.uint16(values[counts.argmax()] | int(np.median(same & 0x7F)) | sign)


def average_channels(states: list[Tensor]) -> Tensor:
    """The mean state (width,) over all tokens."""
    return torch.cat(states).float().mean(0)
