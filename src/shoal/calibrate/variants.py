"""Honest ways of computing a rollout, and of replaying it, that differ only in the last bits.

A worker differs from its verifier in batch size, threads and kernels, and in decoding token by token over cached keys
where the verifier runs one prefill. Each variant below is one such difference that this machine can produce. `plain`
decoding runs transformers' own forward and cache with unpadded batches: the arithmetic of another engine. `double`
replays with float64 products: this machine's distance from exact arithmetic, which stands in for a machine with other
kernels. A dtype that this machine may not support is first tried in a child process (`probe_dtype`).
"""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from shoal.config.run import EngineConfig
from shoal.engine import open_engine
from shoal.engine.base import CHUNK, HiddenSink
from shoal.engine.sampling import choose_tokens
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import uniform_rows
from shoal.toploc.replay import Replay, replay_rollouts
from shoal.util.process import use_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSetup:
    """How rollouts are generated and replayed."""

    name: str
    source: Literal["engine", "plain"] = "engine"
    batch: int = 64
    """slots of the engine, or rows of a plain batch"""
    threads: int = 1
    replay: Literal["packed", "alone", "double"] = "packed"
    refresh: int = 0
    """tokens after which the engine drops its cache and recomputes it; 0: never"""
    dtype: str = ""
    """dtype of the worker, if it differs from the verifier's"""


def list_setups(dtype: str, *, threads: int, mixed: bool) -> list[VariantSetup]:
    """The variants to measure for a verifier in `dtype`; `mixed` also allows workers in the other dtype."""
    setups = [
        VariantSetup(name="64 slots"),
        VariantSetup(name="7 slots", batch=7),
        VariantSetup(name="1 slot", batch=1),
        VariantSetup(name="recomputed every 16 tokens", refresh=16),
        VariantSetup(name="replayed alone", replay="alone"),
        VariantSetup(name="transformers, batch 1", source="plain", batch=1),
        VariantSetup(name="transformers, batch 7", source="plain", batch=7),
    ]
    if threads > 1:
        setups.append(VariantSetup(name=f"{threads} threads", threads=threads))
    if dtype == "float32":
        setups.append(VariantSetup(name="replayed in float64", replay="double"))
    if mixed:
        other = "bfloat16" if dtype == "float32" else "float32"
        setups.append(VariantSetup(name=f"worker in {other}", dtype=other))
    return setups


def cast_models(setup: VariantSetup, model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The worker's model and the verifier's."""
    worker = copy.deepcopy(model).to(getattr(torch, setup.dtype)) if setup.dtype else model
    return worker, copy.deepcopy(model).double() if setup.replay == "double" else model


def run_variant(
    setup: VariantSetup, worker: PreTrainedModel, requests: Sequence[Request], *, eos_id: int, sink: HiddenSink
) -> list[Rollout]:
    """Generate the requests with this variant; the sink gets the states."""
    with use_threads(setup.threads):
        if setup.source == "plain":
            return _decode_plain(worker, requests, batch=setup.batch, eos_id=eos_id, sink=sink)
        engine = open_engine(EngineConfig(slots=setup.batch), worker, eos_id=eos_id, sink=sink)
        engine.submit(requests)
        rollouts: list[Rollout] = []
        steps = 0
        while engine.busy:
            rollouts += engine.step()
            steps += 1
            if setup.refresh and steps % setup.refresh == 0:
                engine.swap_weights(0, dict(worker.state_dict()))
        return rollouts


def replay_variant(
    setup: VariantSetup,
    verifier: PreTrainedModel,
    rollouts: Sequence[Rollout],
    *,
    eos_id: int,
    change: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Replay]:
    """Replays by rollout id, computed with this variant; `change` alters the verifier's matrices."""
    batches = [[rollout] for rollout in rollouts] if setup.replay == "alone" else [rollouts]
    replays = [replay for batch in batches for replay in replay_rollouts(verifier, batch, eos_id=eos_id, change=change)]
    if setup.replay == "double":  # proofs are built from float32 or shorter
        replays = [replace(replay, hidden=replay.hidden.float()) for replay in replays]
    return {rollout.id: replay for rollout, replay in zip(rollouts, replays, strict=True)}


def _decode_plain(
    model: PreTrainedModel, requests: Sequence[Request], *, batch: int, eos_id: int, sink: HiddenSink
) -> list[Rollout]:
    """Batches of prompts of equal length, each run until its last row ends."""
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
    device = model.device
    uniforms = torch.from_numpy(uniform_rows(seeds, np.zeros(len(requests), dtype=np.int64), limit)).to(device)
    temperatures = torch.tensor([request.temperature for request in requests], device=device)
    feed = torch.tensor([request.prompt_ids for request in requests], device=device)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    ended = torch.zeros(len(requests), dtype=torch.bool, device=device)
    while not bool(ended.all()):
        output = model.base_model(input_ids=feed, past_key_values=cache, use_cache=True)
        hidden = output.last_hidden_state[:, -1]
        logits = model.get_output_embeddings()(hidden).float()
        tokens, logprobs = choose_tokens(logits, temperatures, uniforms[:, len(columns)])
        columns.append((tokens, logprobs, hidden.clone()))
        ended |= (tokens == eos_id) | (len(columns) >= limit)
        feed = tokens[:, None]
    stacked = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    tokens_bt, logprobs_bt, hidden_btw = (values.cpu() for values in stacked)
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


_PROBE_S = 120.0
_PROBE = """
import torch
import torch.nn.functional as F
dtype = getattr(torch, {dtype!r})
for rows in (1, 16, 256):
    F.linear(torch.ones(rows, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype))
"""


def probe_dtype(dtype: str) -> str:
    """Why products in `dtype` cannot be computed here; empty if they can. Tried in a child, which some machines kill.

    Virtual machines may advertise matrix instructions that their host does not allow.
    """
    if dtype == "float32":
        return ""
    command = [sys.executable, "-c", _PROBE.format(dtype=dtype)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{dtype} products took more than {_PROBE_S:.0f} s"
    if done.returncode == 0:
        return ""
    if done.returncode > 0:
        return f"{dtype} products fail here: {done.stderr.strip().splitlines()[-1]}"
    name = signal.Signals(-done.returncode).name
    hint = "" if "ONEDNN_MAX_CPU_ISA" in os.environ else "; ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment may help"
    return f"{dtype} products crash the process here ({name}){hint}"
