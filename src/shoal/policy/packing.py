"""Packed micro-batches of rollouts, for the learner's training step and the verifier's replay.

Samples of one group in one micro-batch share a single copy of the prompt. Unless disabled, equal beginnings of
completions are shared too: a policy that is sure of its answer writes it again and again.

Micro-batches are bins, packed first fit decreasing, measured in tokens: sample i adds lengths[i] tokens to a bin that
holds its group and prompts[i] + lengths[i] to any other. Groups are ordered by their longest sample and stay together
if there is room: a sample goes to the first bin with room that holds its group, else to the first bin with room, else
to a new one. (Ordering samples by length alone scatters each group over many bins: up to 1.8 times the tokens.)

Invariants:
- every sample is in exactly one micro-batch;
- nothing is truncated: a sample above the limit has a micro-batch of its own;
- the result depends only on the arguments (ties by index);
- every per-token array has the length of the completion; concatenated in sample order they stay aligned.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import Attend
from shoal.policy.flex import AttentionName, place_attention
from shoal.rollout import Rollout


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
    attention: Attend
    rows: Tensor
    """[T] flat index of the state that predicts each completion token"""
    targets: Tensor
    """[T]"""
    segment: Tensor
    """[T] sample of each completion token"""
    temperatures: Tensor
    """[T]"""

    def to(self, device: torch.device, attention: AttentionName = "auto") -> "Pack":
        """The same micro-batch on the device of the model; a pack is built on the host."""
        if self.token_ids.device == device:
            return self
        assert isinstance(self.attention, PackedAttention), "a pack moves once, from the host"
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, attention=place_attention(self.attention, device, attention), **moved)

    def spread(self, values: Sequence[float]) -> Tensor:
        """[T] one number per sample, repeated for its tokens."""
        return torch.tensor(values, device=self.segment.device)[self.segment]

    @property
    def behaviour(self) -> Tensor:
        """[T] log-probs that the sampler recorded."""
        logprobs = np.concatenate([sample.rollout.logprobs for sample in self.samples])
        return torch.from_numpy(logprobs).to(self.segment.device)

    @property
    def is_scaled(self) -> bool:
        """Whether any temperature is not 1; decided on the host."""
        return any(sample.rollout.temperature != 1 for sample in self.samples)


_TENSORS = ("token_ids", "positions", "rows", "targets", "segment", "temperatures")


def build_packs(samples: Sequence[Sample], max_tokens: int, *, strips: bool = False, share: bool = True) -> list[Pack]:
    """Micro-batches of at most `max_tokens` input tokens; a longer sample has one to itself.

    `strips` makes attention without gradients cheaper, see policy/attention.py. `share` computes equal beginnings of a
    group's completions once; micro-batches become smaller, but no more samples fit into one.
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


def pack_samples(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Bins of sample indices, each ascending, from completion lengths, prompt lengths and groups of the samples."""
    _check_samples(lengths, prompts, groups)
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)  # tokens left in each bin; at most one bin per sample
    group_bins: dict[int, list[int]] = defaultdict(list)  # group -> bins that hold its prompt
    for i in _order_samples(lengths, prompts, groups):
        cost = lengths[i]
        b = next((b for b in group_bins[groups[i]] if room[b] >= cost), None)
        if b is None:
            cost += prompts[i]
            # The bins of its own group are excluded: they lack room even without the prompt.
            fits = room[: len(bins)] >= cost
            b = int(fits.argmax()) if fits.any() else len(bins)
            group_bins[groups[i]].append(b)
        if b == len(bins):
            bins.append([])
            room[b] = max_tokens
        bins[b].append(i)
        room[b] -= cost
    return [sorted(members) for members in bins]


def _order_samples(lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Groups by their longest sample, the samples of a group by length, both descending; without groups plain FFD."""
    longest: dict[int, int] = {}
    first: dict[int, int] = {}
    for i, group in enumerate(groups):
        longest[group] = max(longest.get(group, 0), prompts[i] + lengths[i])
        first.setdefault(group, i)
    return sorted(range(len(lengths)), key=lambda i: (-longest[groups[i]], first[groups[i]], -lengths[i], i))


def _check_samples(lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int]) -> None:
    assert len(lengths) == len(prompts) == len(groups), "one length, prompt and group per sample"
    assert min(lengths, default=1) >= 1 and min(prompts, default=0) >= 0, "lengths are token counts"
    prompt_of = dict(zip(groups, prompts, strict=True))
    assert all(prompt_of[g] == p for g, p in zip(groups, prompts, strict=True)), "a group has one prompt"
