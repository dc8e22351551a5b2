"""Honest ways of computing a rollout, and of replaying it, that differ in the last bits alone.

A worker differs from its verifier in batch size, threads, kernels, in decoding token by token over cached keys where
the verifier takes all at once. Each variant below is one such difference that can be made on this machine. `plain`
decoding runs transformers' own forward and cache with unpadded batches: another engine's arithmetic. `double` replays
with float64 products: this machine's distance from exact arithmetic, and so a stand-in for a machine with other
kernels.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from shoal.engine.base import CHUNK, HiddenSink
from shoal.engine.choice import choose_tokens
from shoal.engine.torch import TorchEngine
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import uniform_rows
from shoal.toploc.replay import Replay, replay_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How rollouts are generated and replayed."""

    name: str
    source: Literal["engine", "plain"] = "engine"
    batch: int = 64
    """slots of the engine, or rows of a plain batch"""
    threads: int = 1
    replay: Literal["packed", "alone", "double"] = "packed"
    refresh: int = 0
    """tokens after which the engine drops its cache and computes anew; 0: never"""
    dtype: str = ""
    """the worker's, if it is not the verifier's"""


def list_ways(dtype: str, *, threads: int, mixed: bool) -> list[Way]:
    """The variants to measure for a verifier in `dtype`; `mixed` allows workers in the other of the two dtypes."""
    ways = [
        Way(name="64 slots"),
        Way(name="7 slots", batch=7),
        Way(name="1 slot", batch=1),
        Way(name="recomputed every 16 tokens", refresh=16),
        Way(name="replayed alone", replay="alone"),
        Way(name="transformers, batch 1", source="plain", batch=1),
        Way(name="transformers, batch 7", source="plain", batch=7),
    ]
    if threads > 1:
        ways.append(Way(name=f"{threads} threads", threads=threads))
    if dtype == "float32":
        ways.append(Way(name="replayed in float64", replay="double"))
    if mixed:
        other = "bfloat16" if dtype == "float32" else "float32"
        ways.append(Way(name=f"worker in {other}", dtype=other))
    return ways


def cast_models(way: Way, model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The worker's model and the verifier's."""
    worker = copy.deepcopy(model).to(getattr(torch, way.dtype)) if way.dtype else model
    return worker, copy.deepcopy(model).double() if way.replay == "double" else model


def run_way(
    way: Way, worker: PreTrainedModel, requests: Sequence[Request], *, eos_id: int, sink: HiddenSink
) -> list[Rollout]:
    """Generate the requests in this way; the sink gets the states."""
    with use_threads(way.threads):
        if way.source == "plain":
            return _decode_plain(worker, requests, batch=way.batch, eos_id=eos_id, sink=sink)
        engine = TorchEngine(worker, eos_id=eos_id, slots=way.batch, sink=sink)
        engine.submit(requests)
        rollouts: list[Rollout] = []
        steps = 0
        while engine.busy:
            rollouts += engine.step()
            steps += 1
            if way.refresh and steps % way.refresh == 0:
                engine.swap_weights(0, dict(worker.state_dict()))
        return rollouts


def replay_way(way: Way, verifier: PreTrainedModel, rollouts: Sequence[Rollout], *, eos_id: int) -> dict[str, Replay]:
    """Replays by rollout id, computed in this way."""
    if way.replay == "alone":
        replays = [replay_rollouts(verifier, [rollout], eos_id=eos_id)[0] for rollout in rollouts]
    else:
        replays = replay_rollouts(verifier, rollouts, eos_id=eos_id)
    if way.replay == "double":  # proofs are of float32 and shorter
        replays = [replace(replay, hidden=replay.hidden.float()) for replay in replays]
    return {rollout.id: replay for rollout, replay in zip(rollouts, replays, strict=True)}


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Run with this many torch threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decode_plain(
    model: PreTrainedModel, requests: Sequence[Request], *, batch: int, eos_id: int, sink: HiddenSink
) -> list[Rollout]:
    """Batches of prompts of one length, each run until its last row ends."""
    by_length: dict[int, list[Request]] = {}
    for request in requests:
        by_length.setdefault(len(request.prompt_ids), []).append(request)
    rollouts: list[Rollout] = []
    for same in by_length.values():
        for start in range(0, len(same), batch):
            rollouts += _decode_batch(model, same[start : start + batch], eos_id, sink)
    return rollouts


@torch.inference_mode()
def _decode_batch(model: PreTrainedModel, requests: Sequence[Request], eos_id: int, sink: HiddenSink) -> list[Rollout]:
    cache = DynamicCache()
    limit = max(request.max_tokens for request in requests)
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    uniforms = torch.from_numpy(uniform_rows(seeds, np.zeros(len(requests), dtype=np.int64), limit))
    temperatures = torch.tensor([request.temperature for request in requests])
    feed = torch.tensor([request.prompt_ids for request in requests])
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    ended = torch.zeros(len(requests), dtype=torch.bool)
    while not bool(ended.all()):
        output = model.base_model(input_ids=feed, past_key_values=cache, use_cache=True)
        hidden = output.last_hidden_state[:, -1]
        logits = model.get_output_embeddings()(hidden).float()
        tokens, logprobs = choose_tokens(logits, temperatures, uniforms[:, len(columns)])
        columns.append((tokens, logprobs, hidden.clone()))
        ended |= (tokens == eos_id) | (len(columns) >= limit)
        feed = tokens[:, None]
    tokens_bt, logprobs_bt, hidden_btw = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return [
        _finish_row(request, tokens, logprobs, hidden, eos_id, sink)
        for request, tokens, logprobs, hidden in zip(requests, tokens_bt, logprobs_bt, hidden_btw, strict=True)
    ]


def _finish_row(
    request: Request, tokens: Tensor, logprobs: Tensor, hidden: Tensor, eos_id: int, sink: HiddenSink
) -> Rollout:
    ends = (tokens == eos_id).nonzero()[:, 0].tolist()
    stopped = bool(ends) and ends[0] < request.max_tokens
    count = ends[0] + 1 if stopped else request.max_tokens
    for start in range(0, count, CHUNK):
        sink(request.id, start, hidden[start : min(start + CHUNK, count)])
    return Rollout(
        id=request.id,
        prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
        token_ids=tokens[:count].int().numpy(),
        logprobs=logprobs[:count].numpy(),
        finish=Finish.STOP if stopped else Finish.LENGTH,
        versions=(VersionRange(0, 0, count),),
        temperature=request.temperature,
        seed=request.seed,
    )
