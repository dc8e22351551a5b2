"""`shoal calibrate`: measure how honest rollouts of a model look to its verifier, and what follows from it.

Every variant of toploc/variants.py generates rollouts with proofs and replays them. All randomness derives from
`seed`, so that a calibration can be repeated.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shoal.engine.base import CHUNK
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest
from shoal.policy.model import Policy, open_policy
from shoal.rollout import Request
from shoal.toploc.calibration import LIMITED, Calibration, Variant, hash_model, hash_weights, load_calibration
from shoal.toploc.chunks import ChunkStats, measure_chunks
from shoal.toploc.fit import Samples, fit_kinds
from shoal.toploc.probe import probe_dtype
from shoal.toploc.prompts import Source, draw_requests
from shoal.toploc.sequence import Evidence
from shoal.toploc.stream import ProofBuilder
from shoal.toploc.tail import bound_rate
from shoal.toploc.variants import Way, cast_models, list_ways, replay_way, run_way
from shoal.toploc.verify import verify_batch

Note = Callable[[str], None]
RATE = 1e-9
"""False alarms per rollout. What fails here convicts, and all validators see the same numbers: a second opinion does
not make chance rarer. A run replays millions of rollouts, and none of its honest nodes may be banned by chance."""
LEAST_SAMPLES = 1000
"""Chunks below which groups are too small to say anything."""
_BATCH = 64
"""Rollouts generated and replayed at a time."""
_NEVER = -1
"""An end token that no model writes: rollouts run to their limit, so that there are full chunks whatever the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, and for which rate."""

    source: Source
    samples: int = 4096
    """honest chunks, all variants together"""
    rate: float = RATE
    """false alarms per rollout"""
    confidence: float = 0.95
    threads: int = 2
    """thread count of one variant; the others run on one"""
    mixed: bool = False
    """allow workers in the other dtype"""


def run_calibration(path: str, dtype: str, plan: Plan, note: Note) -> Calibration:
    """Calibrate a policy, given by its folder, hub id, or a run directory, of which the newest checkpoint is taken."""
    policy, ways = _open_subject(path, dtype, plan)
    return calibrate_policy(policy, ways, plan, note, name=path)


def run_recheck(path: str, dtype: str, plan: Plan, file: Path, note: Note) -> list[str]:
    """What speaks against going on with a calibration file for these weights; nothing, if it still holds."""
    policy, ways = _open_subject(path, dtype, plan)
    calibration = load_calibration(file, policy.model)
    samples, _ = _measure_variants(policy, ways, plan, note)
    return list(find_complaints(calibration, samples))


def find_complaints(calibration: Calibration, samples: Samples) -> Iterator[str]:
    """Honest rollouts that would be accused, and variants whose node would be sooner or later."""
    for name, rollouts in samples.items():
        alarms = sum(_raises_alarm(chunks, calibration) for chunks in rollouts)
        if alarms:
            yield f"{name}: {alarms} of {len(rollouts)} honest rollouts would be accused"
        evidence = Evidence()
        for chunks in rollouts:
            evidence = evidence.extend(chunks, calibration.bets)
        if evidence.judge(calibration.share).failed:
            yield f"{name}: an honest node would be accused after {len(rollouts)} rollouts ({evidence.leader})"


def _open_subject(path: str, dtype: str, plan: Plan) -> tuple[Policy, list[Way]]:
    _check_plan(plan)
    if reason := probe_dtype(dtype):
        raise ConfigError(f"--dtype {dtype}: {reason}")
    newest = find_newest(Path(path) / "checkpoints")
    policy = open_policy(path if newest is None else newest / "policy", dtype=getattr(torch, dtype))
    return policy, list_ways(dtype, threads=plan.threads, mixed=plan.mixed)


def calibrate_policy(policy: Policy, ways: Sequence[Way], plan: Plan, note: Note, *, name: str) -> Calibration:
    """Measure, fit, and count false alarms on rollouts that the thresholds have not seen."""
    model = policy.model.eval()
    samples, variants = _measure_variants(policy, ways, plan, note)
    context = model.config.max_position_embeddings
    full, short = fit_kinds(samples, rate=plan.rate, confidence=plan.confidence, max_tokens=context)
    calibration = Calibration(
        model=name,
        model_hash=hash_model(model),
        weights_hash=hash_weights(model),
        backend=f"torch {model.device.type}",
        dtype=str(model.dtype).removeprefix("torch."),
        torch_version=str(torch.__version__),
        temperature=plan.source.temperature,
        max_tokens=context,
        rate=plan.rate,
        confidence=plan.confidence,
        variants=tuple(variants),
        full=full,
        short=short,
        heldout_rollouts=0,
        heldout_alarms=0,
    )
    return cross_check(calibration, samples)


def measure_way(policy: Policy, way: Way, source: Source, num_chunks: int) -> list[list[ChunkStats]]:
    """Honest rollouts of one variant, as the statistics of their chunks; at least `num_chunks` in all."""
    requests = draw_requests(policy, source, way.name)
    models = cast_models(way, policy.model)
    measured: list[list[ChunkStats]] = []
    count = 0
    while count < num_chunks:
        batch = [next(requests) for _ in range(min(_BATCH, num_chunks - count))]
        rollouts = _measure_batch(way, *models, batch, policy.eos_id)
        measured += rollouts
        count += sum(len(chunks) for chunks in rollouts)
    return measured


def cross_check(calibration: Calibration, samples: Samples) -> Calibration:
    """With the false alarms on each half of the rollouts under thresholds fitted to the other half."""
    halves = [{name: _take_half(rollouts, half) for name, rollouts in samples.items()} for half in (0, 1)]
    alarms = 0
    for known, unseen in (halves, halves[::-1]):
        full, short = fit_kinds(
            known, rate=calibration.rate, confidence=calibration.confidence, max_tokens=calibration.max_tokens
        )
        fitted = calibration.model_copy(update={"full": full, "short": short})
        alarms += sum(_raises_alarm(chunks, fitted) for rollouts in unseen.values() for chunks in rollouts)
    total = sum(len(rollouts) for rollouts in samples.values())
    return calibration.model_copy(update={"heldout_rollouts": total, "heldout_alarms": alarms})


def format_table(calibration: Calibration) -> str:
    """Honest quantiles and thresholds as a table for people."""
    lines = [f"{'check':<18}{'chunks':<8}{'median':>10}{'99 %':>10}{'largest':>10}{'threshold':>11}  by"]
    for name, kind in (("full", calibration.full), ("short", calibration.short)):
        for check, limit in kind.limits.items():
            seen = [f"{limit.quantiles[q]:>10.3g}" for q in ("0.5", "0.99", "1")]
            lines.append(f"{check:<18}{name:<8}{''.join(seen)}{limit.threshold:>11.3g}  {limit.method}")
    bound = bound_rate(calibration.heldout_alarms, calibration.heldout_rollouts, calibration.confidence)
    lines.append(
        f"aimed at {calibration.rate:g} false alarms per rollout; {calibration.heldout_alarms} of "
        f"{calibration.heldout_rollouts} held-out rollouts gave one, which proves at most {bound:.2g} "
        f"({calibration.confidence:.0%} confidence); the rest is extrapolated"
    )
    return "\n".join(lines) + "\n"


def _check_plan(plan: Plan) -> None:
    if plan.samples < LEAST_SAMPLES:
        raise ConfigError(f"--samples: must be at least {LEAST_SAMPLES}, got {plan.samples}")
    for flag, value in (("--rate", plan.rate), ("--confidence", plan.confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{flag}: must be greater than 0 and less than 1, got {value:g}")
    if plan.source.tokens < CHUNK:
        raise ConfigError(f"--tokens: must be at least {CHUNK}, one full chunk, got {plan.source.tokens}")
    if not 0 < plan.source.temperature < math.inf:
        raise ConfigError(f"--temperature: must be greater than 0, got {plan.source.temperature:g}")
    if plan.threads < 1:
        raise ConfigError(f"--threads: must be at least 1, got {plan.threads}")


def _measure_variants(
    policy: Policy, ways: Sequence[Way], plan: Plan, note: Note
) -> tuple[dict[str, list[list[ChunkStats]]], list[Variant]]:
    samples: dict[str, list[list[ChunkStats]]] = {}
    variants = []
    for way in ways:
        if reason := probe_dtype(way.dtype or "float32"):
            variants.append(Variant(name=way.name, skipped=reason))
            note(f"{way.name}: skipped, {reason}")
            continue
        own = measure_way(policy, way, plan.source, math.ceil(plan.samples / len(ways)))
        chunks = [chunk for rollout in own for chunk in rollout]
        num_tokens = sum(chunk.tokens for chunk in chunks)
        samples[way.name] = own
        variants.append(Variant(name=way.name, rollouts=len(own), chunks=len(chunks), tokens=num_tokens))
        note(f"{way.name}: {len(chunks)} chunks, {num_tokens} tokens of {len(own)} rollouts")
    return samples, variants


def _measure_batch(
    way: Way, worker: PreTrainedModel, verifier: PreTrainedModel, requests: Sequence[Request], eos_id: int
) -> list[list[ChunkStats]]:
    builder = ProofBuilder()
    rollouts = run_way(way, worker, requests, eos_id=_NEVER, sink=builder)
    replays = replay_way(way, verifier, rollouts, eos_id=eos_id)
    proofs = [builder.take(rollout.id) for rollout in rollouts]
    results = verify_batch([replays[rollout.id].hidden for rollout in rollouts], proofs)
    pairs = zip(rollouts, results, strict=True)
    return [measure_chunks(rollout, replays[rollout.id], own) for rollout, own in pairs]


def _take_half(rollouts: Sequence[Sequence[ChunkStats]], half: int) -> list[Sequence[ChunkStats]]:
    """Every other pair: full and short rollouts may come in turns, and each half needs both."""
    return [chunks for index, chunks in enumerate(rollouts) if index // 2 % 2 == half]


def _raises_alarm(chunks: Sequence[ChunkStats], calibration: Calibration) -> bool:
    over = any(
        not getattr(chunk, name) <= calibration.limit_chunk(check, chunk)
        for chunk in chunks
        for check, name in LIMITED.items()
    )
    return over or Evidence().extend(chunks, calibration.bets).judge(calibration.share).failed
