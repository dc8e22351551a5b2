"""Rollouts as the learner sees them, and packed micro-batches of them.

Invariants:
- advantages are computed here, by group, from task rewards and the length reward of the settings: no number of a
  worker's is trained on but tokens, log-probs and recomputed rewards;
- every per-token array has the length of the completion; concatenated in sample order they stay parallel;
- the samples of a group that share a micro-batch share one copy of the prompt, and unless told otherwise those that
  wrote the same share one copy of that too: a policy that is sure of its answer writes it again and again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.config import LengthConfig
from shoal.learner.advantage import AdvantageKind, compute_advantages
from shoal.learner.binpack import pack_samples
from shoal.policy.layout import PackedAttention, Segment, positions_of
from shoal.rollout import Group, Rollout
from shoal.tasks.length import total_rewards

NO_LENGTH = LengthConfig()


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout with its advantage; samples of equal `group` have equal prompts."""

    group: int
    rollout: Rollout
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """One micro-batch. N flat input tokens, T completion tokens, S samples."""

    samples: tuple[Sample, ...]
    token_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    attention: PackedAttention
    rows: Tensor
    """[T] flat index of the state that predicts each completion token"""
    targets: Tensor
    """[T]"""
    segment: Tensor
    """[T] sample of each completion token"""
    temperatures: Tensor
    """[T]"""

    def spread(self, values: Sequence[float]) -> Tensor:
        """[T] one number per sample, repeated for its tokens."""
        return torch.tensor(values)[self.segment]

    @property
    def behaviour(self) -> Tensor:
        """[T] log-probs that the sampler recorded."""
        return torch.from_numpy(np.concatenate([sample.rollout.logprobs for sample in self.samples]))


def build_samples(groups: Sequence[Group], kind: AdvantageKind, length: LengthConfig = NO_LENGTH) -> list[Sample]:
    """Samples in order of group and sample index, with advantages within each group."""
    samples = []
    for group in groups:
        advantages = compute_advantages(total_rewards(length, group), kind)
        pairs = zip(group.rollouts, advantages, strict=True)
        samples += [Sample(group.index, rollout, float(advantage)) for rollout, advantage in pairs]
    return samples


def build_packs(samples: Sequence[Sample], max_tokens: int, *, strips: bool = False, share: bool = True) -> list[Pack]:
    """Micro-batches of at most `max_tokens` input tokens; a longer sample has one to itself.

    `strips` makes attention cheaper where no gradient is wanted, see policy/layout.py. `share` feeds once what several
    samples of a group wrote alike; it makes micro-batches smaller, and no more samples fit into one.
    """
    bins = pack_samples(
        [sample.rollout.num_tokens for sample in samples],
        [len(sample.rollout.prompt_ids) for sample in samples],
        [sample.group for sample in samples],
        max_tokens,
    )
    return [_build_pack([samples[index] for index in sorted(members)], strips, share) for members in bins]


def _build_pack(samples: Sequence[Sample], strips: bool, share: bool) -> Pack:
    flat: list[np.ndarray] = []
    segments: list[Segment] = []
    rows: list[Tensor] = []
    prompts: dict[int, int] = {}
    written: dict[tuple[int, int, bytes], int] = {}
    size = 0

    def add_segment(tokens: np.ndarray, prefix: int | None) -> None:
        nonlocal size
        segments.append(Segment(size, size + len(tokens), prefix))
        flat.append(tokens)
        size += len(tokens)

    for sample in samples:
        if sample.group not in prompts:
            prompts[sample.group] = len(segments)
            add_segment(sample.rollout.prompt_ids, None)
        prompt = prompts[sample.group]
        assert np.array_equal(flat[prompt], sample.rollout.prompt_ids), "the samples of a group share one prompt"
        fed = sample.rollout.token_ids[:-1]  # the last token predicts nothing
        start = written.setdefault((prompt, len(fed), fed.tobytes()), size) if share else size
        if start == size and len(fed):
            add_segment(fed, prompt)
        rows.append(torch.cat((torch.tensor([segments[prompt].end - 1]), torch.arange(start, start + len(fed)))))
    lengths = torch.tensor([sample.rollout.num_tokens for sample in samples])
    segment = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return Pack(
        samples=tuple(samples),
        token_ids=torch.from_numpy(np.concatenate(flat)).long(),
        positions=positions_of(segments),
        attention=PackedAttention(segments, strips=strips),
        rows=torch.cat(rows),
        targets=torch.from_numpy(np.concatenate([sample.rollout.token_ids for sample in samples])).long(),
        segment=segment,
        temperatures=torch.tensor([sample.rollout.temperature for sample in samples])[segment],
    )
