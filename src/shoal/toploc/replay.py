"""One prefill with the trusted weights over the prompts and submitted tokens of many rollouts.

- Rollouts are untrusted: `admit_rollout` compares every field with the request and checks type, length and range
  before the model sees a token. It returns new arrays, so nothing from the peer is read twice.
- Prompts that rollouts share are computed once per pack. Memory is bounded by `pack_tokens` for states and by
  `SLICE_ELEMENTS` for logits, whatever the vocabulary; a longer rollout has a pack to itself.
- Row t of `hidden` is the state from which token t was chosen, as in the engine's sink.
- Of a large model only the weights of the layer that runs are copied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.policy.altered import map_linears
from shoal.policy.decoder import FreshLayers, Layers, compute_logits, is_lean, run_decoder
from shoal.policy.packing import Pack, Sample, build_packs
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import uniform_rows
from shoal.toploc.shape_test import measure_masses, measure_tilts
from shoal.toploc.token_checks import measure_distances
from shoal.util.units import count_things

PACK_TOKENS = 2048
SLICE_ELEMENTS = 2**23
"""Logits computed at a time: 32 MB in float32, and twice that for their sums."""
HELD_BYTES = 1 << 30
"""Size of a model up to which its layers are concatenated, and changed, once for all packs: that saves time."""

_SCALARS = {"id": (str,), "seed": (int,), "temperature": (int, float)}


class RolloutError(ValueError):
    """A submitted rollout that cannot be replayed: `field` names the part, the text gives the reason."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What the verifier computes for one rollout of T tokens."""

    hidden: Tensor
    """(T, W) states after the final norm"""
    logprobs: np.ndarray
    """(T,) float32 behaviour log-probs of the submitted tokens"""
    distances: np.ndarray
    """(T,) float64, see toploc/token_checks.py"""
    eos_probs: np.ndarray
    """(T,) float32 probability of the end token at each place"""
    tilts: np.ndarray
    """(T, S) float64, see toploc/shape_test.py; S = 0 unless asked for"""
    masses: np.ndarray
    """(T,) float64, probability of all likelier tokens, see toploc/shape_test.py"""


_COLUMNS = ("logprobs", "distances", "eos_probs", "tilts", "masses")
"""Arrays of a replay, in the order in which `_score_slice` returns them."""


def admit_rollout(rollout: Rollout, request: Request, model: PreTrainedModel) -> Rollout:
    """The rollout with checked arrays of our own; `RolloutError` names what is wrong with it."""
    config = model.config
    _check_fields(rollout, request)
    prompt_ids = _admit_ids("prompt_ids", rollout.prompt_ids, config.vocab_size)
    if prompt_ids.tolist() != list(request.prompt_ids):
        raise RolloutError("prompt_ids", "differ from the request's")
    token_ids = _admit_ids("token_ids", rollout.token_ids, config.vocab_size)
    if len(token_ids) > request.max_tokens:
        raise RolloutError("token_ids", f"{count_things(len(token_ids), 'token')}, allowed are {request.max_tokens}")
    if len(prompt_ids) + len(token_ids) > config.max_position_embeddings:
        raise RolloutError("token_ids", f"more than the model's {config.max_position_embeddings} positions")
    _check_spans(rollout.versions, len(token_ids))
    logprobs = rollout.logprobs
    if not isinstance(logprobs, np.ndarray) or logprobs.dtype.kind != "f" or logprobs.shape != token_ids.shape:
        raise RolloutError("logprobs", "must be one float per token")
    with np.errstate(over="ignore"):
        own = logprobs.astype(np.float32)
    return replace(rollout, prompt_ids=prompt_ids, token_ids=token_ids, logprobs=own)


def replay_rollouts(
    model: PreTrainedModel,
    rollouts: Sequence[Rollout],
    *,
    eos_id: int,
    change: Callable[[Tensor], Tensor] | None = None,
    shape: bool = False,
    pack_tokens: int = PACK_TOKENS,
) -> list[Replay]:
    """Replays in the order of the rollouts, which must be admitted and have unique ids."""
    return replay_batches(model, [rollouts], eos_id=eos_id, change=change, shape=shape, pack_tokens=pack_tokens)[0]


@torch.inference_mode()
def replay_batches(
    model: PreTrainedModel,
    batches: Sequence[Sequence[Rollout]],
    *,
    eos_id: int,
    change: Callable[[Tensor], Tensor] | None = None,
    shape: bool = False,
    pack_tokens: int = PACK_TOKENS,
) -> list[list[Replay]]:
    """Replays of several batches, each bitwise as if alone: none shares a pack with another.

    `change` alters every matrix of the layers; of a large model one layer at a time, which takes no memory.
    """
    layers: Layers | None = None
    if is_lean(model):
        fresh = FreshLayers(model, change)
        is_small = sum(weight.nbytes for weight in model.parameters()) <= HELD_BYTES
        layers = [fresh[index] for index in range(len(model.model.layers))] if is_small and any(batches) else fresh
    elif change is not None and any(batches):
        model = map_linears(model, change).eval()
    return [_replay_batch(model, layers, batch, eos_id, shape, pack_tokens) for batch in batches]


def join_replays(spans: Sequence[VersionRange], replays: Mapping[int, Replay]) -> Replay:
    """One replay of a rollout that several versions generated, from full replays under each of them."""
    if len(spans) == 1:
        return replays[spans[0].version]
    parts = [(replays[span.version], slice(span.start, span.end)) for span in spans]
    columns = {name: np.concatenate([getattr(replay, name)[rows] for replay, rows in parts]) for name in _COLUMNS}
    return Replay(hidden=torch.cat([replay.hidden[rows] for replay, rows in parts]), **columns)


def _check_fields(rollout: Rollout, request: Request) -> None:
    for field, kinds in _SCALARS.items():
        given, asked = getattr(rollout, field), getattr(request, field)
        if not isinstance(given, kinds) or given != asked:
            raise RolloutError(field, f"differs from the request's {asked!r}")
    if not isinstance(rollout.finish, Finish):
        raise RolloutError("finish", "must be stop or length")


def _admit_ids(field: str, ids: np.ndarray, vocabulary: int) -> np.ndarray:
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1 or not len(ids):
        raise RolloutError(field, "must be a list of at least one token id")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise RolloutError(field, f"token ids must be 0 to {vocabulary - 1}")
    return ids.astype(np.int32)


def _check_spans(spans: Sequence[VersionRange], num_tokens: int) -> None:
    """Versions must cover the tokens in order, without gaps."""
    if not isinstance(spans, list | tuple) or not all(isinstance(span, VersionRange) for span in spans):
        raise RolloutError("versions", "must be a list of ranges")
    if not all(isinstance(number, int) for span in spans for number in (span.version, span.start, span.end)):
        raise RolloutError("versions", "must be ranges of whole numbers")
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    if starts != edges[:-1] or edges[-1] != num_tokens or any(span.end <= span.start for span in spans):
        raise RolloutError("versions", "must cover the tokens in order, without gaps")


def _replay_batch(
    model: PreTrainedModel,
    layers: Layers | None,
    rollouts: Sequence[Rollout],
    eos_id: int,
    shape: bool,
    pack_tokens: int,
) -> list[Replay]:
    assert len({rollout.id for rollout in rollouts}) == len(rollouts), "rollout ids are unique"
    if not rollouts:
        return []
    prompts: dict[bytes, int] = {}
    samples = [Sample(prompts.setdefault(r.prompt_ids.tobytes(), len(prompts)), r, 0.0) for r in rollouts]
    found: dict[str, Replay] = {}
    for pack in build_packs(samples, pack_tokens, strips=True):
        found |= _replay_pack(model, layers, pack.to(model.device), eos_id, shape)
    return [found[rollout.id] for rollout in rollouts]


def _replay_pack(
    model: PreTrainedModel, layers: Layers | None, pack: Pack, eos_id: int, shape: bool
) -> dict[str, Replay]:
    hidden = run_decoder(model, pack.token_ids, pack.positions, pack.attention, layers).index_select(0, pack.rows)
    rollouts = [sample.rollout for sample in pack.samples]
    size = max(1, SLICE_ELEMENTS // model.config.vocab_size)
    uniforms = torch.from_numpy(_draw_uniforms(rollouts)).to(hidden.device)
    inputs = (hidden, pack.targets, pack.temperatures, uniforms)
    parts = [
        _score_slice(compute_logits(model, rows), tokens, temperatures, draws, eos_id, shape)
        for rows, tokens, temperatures, draws in zip(*(values.split(size) for values in inputs), strict=True)
    ]
    joined = zip(_COLUMNS, zip(*parts, strict=True), strict=True)
    columns = {name: torch.cat(part).cpu().numpy() for name, part in joined}
    hidden = hidden.cpu()  # once per pack: proofs are compared on the host
    ends = np.cumsum([rollout.num_tokens for rollout in rollouts])
    spans = [slice(end - rollout.num_tokens, end) for rollout, end in zip(rollouts, ends, strict=True)]
    return {
        rollout.id: Replay(hidden=hidden[span], **{name: column[span] for name, column in columns.items()})
        for rollout, span in zip(rollouts, spans, strict=True)
    }


def _draw_uniforms(rollouts: Sequence[Rollout]) -> np.ndarray:
    """The uniform of every token, in order of the rollouts: short rollouts are cheaper together than one by one."""
    lengths = [rollout.num_tokens for rollout in rollouts]
    seeds = np.repeat(np.array([rollout.seed for rollout in rollouts], dtype=np.uint64), lengths)
    return uniform_rows(seeds, np.concatenate([np.arange(length) for length in lengths]), 1)[:, 0]


def _score_slice(
    logits: Tensor, tokens: Tensor, temperatures: Tensor, uniforms: Tensor, eos_id: int, shape: bool
) -> tuple[Tensor, ...]:
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0]
    if bool(own.isnan().any()):
        raise FloatingPointError("logits are not finite: nothing can be checked with these weights")
    distances = measure_distances(logprobs, tokens, uniforms, greedy)
    tilts = measure_tilts(logprobs) if shape else logprobs.new_zeros(len(tokens), 0, dtype=torch.float64)
    masses = measure_masses(logprobs, tokens)
    return own, distances, logprobs[:, eos_id].exp(), tilts, masses
