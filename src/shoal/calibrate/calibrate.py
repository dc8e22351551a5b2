"""Calibration: measure honest rollouts of a model as its verifier sees them, and fit thresholds and bets.

Every variant of calibrate/variants.py generates rollouts with proofs and replays them. All randomness derives from
`seed`, so that a calibration can be repeated.

Chunks are grouped by variant and by number of tokens. The samples are a mixture of the groups, and a node may always
belong to one of them, so thresholds are picked for a rate that is smaller by the share of the smallest group: if the
mixture exceeds a threshold with probability p, a group with a share s of it does so with probability p / s at most. A
bet's chance is that of the group with the largest.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from shoal.calibrate.power import is_found, measure_power
from shoal.calibrate.prompts import PromptSource, draw_requests
from shoal.calibrate.variants import VariantSetup, cast_models, list_setups, probe_dtype, replay_variant, run_variant
from shoal.engine.base import CHUNK
from shoal.errors import ConfigError
from shoal.learner.checkpoint import find_newest
from shoal.policy.model import Policy, choose_device, open_policy
from shoal.rollout import Request
from shoal.toploc.build import ProofBuilder
from shoal.toploc.calibration import (
    LIMITED,
    SHARES,
    Calibration,
    ChunkLimits,
    Limit,
    Variant,
    hash_model,
    hash_weights,
    load_calibration,
)
from shoal.toploc.chunks import ChunkStats, measure_chunks, stack_stats
from shoal.toploc.finding import Check
from shoal.toploc.sequential_test import CALIBRATED, Bet, EvidenceStream, Level, SequentialEvidence, read_stream
from shoal.toploc.threshold import bound_rate, pick_threshold
from shoal.toploc.verify import verify_batch

logger = logging.getLogger(__name__)

FLOORS = {
    Check.EXPONENT: 2.0,
    Check.MANTISSA: 4 / 128,
    Check.MEDIAN: 0.5,
    Check.SIGN: 1.0,
    Check.SAMPLING: 1e-5,
    Check.LOGPROB: 1e-4,
}
"""Minimum thresholds, an allowance for machines other than the calibrating one: a few roundings to bfloat16 in the
other direction, and three times the largest difference of float32 log-probs seen here."""
UNITS = {Check.EXPONENT: 1.0, Check.MANTISSA: 1 / 128, Check.SIGN: 1.0}
"""What one value that rounds in the other direction adds to a statistic."""
LEVEL_FLOORS = {
    EvidenceStream.EXPONENT: 1.0,
    EvidenceStream.MANTISSA: 2 / 128,
    EvidenceStream.DISTANCE: 1e-6,
    EvidenceStream.LOGPROB: 1e-5,
    EvidenceStream.ABOVE: 5e-6,
    EvidenceStream.BELOW: 5e-6,
}
"""Minimum values to bet on, for the same reason: two roundings in the other direction, ten times the noise."""
LEVELS = (0.5, 0.9, 0.99, 0.999)
"""Shares of honest chunks below the values that are bet on."""
SLACK = 1.2
"""Factor by which chances are overstated: chunks of one rollout are correlated, but treated as independent."""
SIZES = (1, 2, 4, 8, 16, CHUNK)
"""Edges of the groups of short chunks by size."""
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
Samples = Mapping[str, Sequence[Sequence[ChunkStats]]]
"""Honest chunks by variant and rollout."""


def fit_kinds(samples: Samples, *, rate: float, confidence: float, max_tokens: int) -> tuple[ChunkLimits, ChunkLimits]:
    """Limits and bets of full and of short chunks, for a rate per rollout of at most `max_tokens`."""
    half = rate / SHARES / 2
    kinds = []
    for full, share in ((True, half / math.ceil(max_tokens / CHUNK)), (False, half)):
        variants = [[c for chunks in rollouts for c in chunks if c.is_full == full] for rollouts in samples.values()]
        kinds.append(_fit_kind(variants, rate=share, confidence=confidence))
    return kinds[0], kinds[1]


def _fit_kind(variants: Sequence[Sequence[ChunkStats]], *, rate: float, confidence: float) -> ChunkLimits:
    chunks = [chunk for own in variants for chunk in own]
    edges = np.searchsorted(SIZES, [chunk.tokens for chunk in chunks], side="right")
    sizes = [[c for c, edge in zip(chunks, edges, strict=True) if edge == own] for own in range(len(SIZES) + 1)]
    groups = [group for group in (*variants, *sizes) if group]
    if not groups:
        raise ValueError("no samples of full chunks, or none of short chunks")
    pooled, num = stack_stats(chunks), len(chunks)
    sure = 1 - (1 - confidence) / 2 / (len(LIMITED) + len(CALIBRATED) * len(LEVELS) * len(groups))
    aimed = rate * min(len(group) for group in groups) / num
    limits = {check: _fit_limit(check, pooled[name], rate, aimed, sure) for check, name in LIMITED.items()}
    stacked = [stack_stats(group) for group in groups]
    return ChunkLimits(limits=limits, bets={stream: _fit_bet(stream, pooled, stacked, sure) for stream in CALIBRATED})


def _fit_limit(check: Check, values: np.ndarray, rate: float, aimed: float, confidence: float) -> Limit:
    threshold = pick_threshold(values, aimed, confidence, floor=FLOORS[check], unit=UNITS.get(check, 0.0))
    quantiles = {f"{q:g}": float(np.quantile(values, q, method="higher")) for q in _QUANTILES}
    return Limit(
        threshold=threshold.value,
        method=threshold.method,
        rate=rate,
        proven=threshold.proven,
        num_samples=len(values),
        quantiles=quantiles,
    )


def _fit_bet(
    stream: EvidenceStream,
    pooled: Mapping[str, np.ndarray],
    groups: Sequence[Mapping[str, np.ndarray]],
    confidence: float,
) -> Bet:
    columns = [read_stream(stats, stream) for stats in groups]
    quantiles = np.quantile(read_stream(pooled, stream), LEVELS, method="higher")
    values = np.maximum(quantiles, LEVEL_FLOORS[stream]).tolist()
    return Bet(levels=tuple(Level(value=value, chance=_bound_chance(columns, value, confidence)) for value in values))


def _bound_chance(columns: Sequence[np.ndarray], value: float, confidence: float) -> float:
    rates = (bound_rate(int((column > value).sum()), len(column), confidence) for column in columns)
    return min(SLACK * max(rates), 1.0)


RATE = 1e-9
"""False alarms per rollout. A failure here convicts, and all validators see the same numbers: a second opinion does not
make an accident rarer. A run replays millions of rollouts, and none of its honest nodes may be banned by chance."""
LEAST_SAMPLES = 1000
"""Below this number of chunks the groups are too small to be meaningful."""
_BATCH = 64
"""Rollouts generated and replayed at a time."""
_NEVER = -1
"""An end token that no model writes: rollouts run to their limit, so that there are full chunks whatever the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """What to measure, and for which rate."""

    source: PromptSource
    samples: int = 4096
    """number of honest chunks, all variants together"""
    rate: float = RATE
    """false alarms per rollout"""
    confidence: float = 0.95
    threads: int = 2
    """thread count of one variant; the others use one thread"""
    mixed: bool = False
    """whether workers may use the other dtype"""
    device: str = "auto"
    """where both compute"""
    attacks: int = 0
    """rollouts of each attack whose power is measured; 0 to measure none"""
    answer_tokens: int = 0
    """longest answer of the run, for which power is measured; 0: as long as the rollouts"""
    step: float = 1e-5
    """how far one training step moves the weights: the run's learning rate"""


def run_calibration(path: str, dtype: str, plan: CalibrationPlan) -> Calibration:
    """Calibrate a policy, given by its folder, hub id, or a run directory (then its newest checkpoint is used)."""
    policy, setups = _open_subject(path, dtype, plan)
    return calibrate_policy(policy, setups, plan, name=path)


def run_recheck(path: str, dtype: str, plan: CalibrationPlan, file: Path) -> list[str]:
    """Reasons against using a calibration file for these weights; empty if it is still valid."""
    policy, setups = _open_subject(path, dtype, plan)
    calibration = load_calibration(file, policy.model)
    samples, _ = _measure_variants(policy, setups, plan)
    return list(find_complaints(calibration, samples))


def find_complaints(calibration: Calibration, samples: Samples) -> Iterator[str]:
    """Honest rollouts that would be accused, and variants whose nodes would be accused sooner or later."""
    for name, rollouts in samples.items():
        alarms = sum(is_found(chunks, calibration) for chunks in rollouts)
        if alarms:
            yield f"{name}: {alarms} of {len(rollouts)} honest rollouts would be accused"
        evidence = SequentialEvidence()
        for chunks in rollouts:
            evidence = evidence.extend(chunks, calibration.bets)
        if evidence.judge(calibration.share).failed:
            yield f"{name}: an honest node would be accused after {len(rollouts)} rollouts ({evidence.leader})"


def _open_subject(path: str, dtype: str, plan: CalibrationPlan) -> tuple[Policy, list[VariantSetup]]:
    _check_plan(plan)
    if reason := probe_dtype(dtype):
        raise ConfigError(f"--dtype {dtype}: {reason}")
    newest = find_newest(Path(path) / "checkpoints")
    place = path if newest is None else newest / "policy"
    policy = open_policy(place, dtype=getattr(torch, dtype), device=choose_device(plan.device))
    return policy, list_setups(dtype, threads=plan.threads, mixed=plan.mixed)


def calibrate_policy(
    policy: Policy, setups: Sequence[VariantSetup], plan: CalibrationPlan, *, name: str
) -> Calibration:
    """Measure, fit, and count false alarms on rollouts that the thresholds were not fitted to."""
    model = policy.model.eval()
    samples, variants = _measure_variants(policy, setups, plan)
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
    checked = cross_check(calibration, samples)
    if not plan.attacks:
        return checked
    able = [setup for setup in setups if setup.name in samples]
    source = replace(plan.source, tokens=plan.answer_tokens or plan.source.tokens)
    return measure_power(policy, able, source, checked, step=plan.step, rollouts=plan.attacks)


def measure_variant(
    policy: Policy, setup: VariantSetup, source: PromptSource, num_chunks: int
) -> list[list[ChunkStats]]:
    """Honest rollouts of one variant, as the statistics of their chunks; at least `num_chunks` in all."""
    requests = draw_requests(policy, source, setup.name)
    models = cast_models(setup, policy.model)
    measured: list[list[ChunkStats]] = []
    count = 0
    while count < num_chunks:
        batch = [next(requests) for _ in range(min(_BATCH, num_chunks - count))]
        rollouts = _measure_batch(setup, *models, batch, policy.eos_id)
        measured += rollouts
        count += sum(len(chunks) for chunks in rollouts)
    return measured


def cross_check(calibration: Calibration, samples: Samples) -> Calibration:
    """The calibration with the false alarms on each half of the rollouts under thresholds fitted to the other half."""
    # Every other pair: full and short rollouts may alternate, and each half needs both.
    halves = [
        {name: [own for i, own in enumerate(rollouts) if i // 2 % 2 == half] for name, rollouts in samples.items()}
        for half in (0, 1)
    ]
    alarms = 0
    for known, unseen in (halves, halves[::-1]):
        full, short = fit_kinds(
            known, rate=calibration.rate, confidence=calibration.confidence, max_tokens=calibration.max_tokens
        )
        fitted = calibration.model_copy(update={"full": full, "short": short})
        alarms += sum(is_found(chunks, fitted) for rollouts in unseen.values() for chunks in rollouts)
    total = sum(len(rollouts) for rollouts in samples.values())
    return calibration.model_copy(update={"heldout_rollouts": total, "heldout_alarms": alarms})


def format_table(calibration: Calibration) -> str:
    """Honest quantiles and thresholds as a text table."""
    lines = [f"{'check':<18}{'chunks':<8}{'median':>10}{'99 %':>10}{'largest':>10}{'threshold':>11}  by"]
    for name, kind in (("full", calibration.full), ("short", calibration.short)):
        for check, limit in kind.limits.items():
            seen = [f"{limit.quantiles[q]:>10.3g}" for q in ("0.5", "0.99", "1")]
            lines.append(f"{check:<18}{name:<8}{''.join(seen)}{limit.threshold:>11.3g}  {limit.method}")
    bound = bound_rate(calibration.heldout_alarms, calibration.heldout_rollouts, calibration.confidence)
    lines.append(
        f"target: {calibration.rate:g} false alarms per rollout; {calibration.heldout_alarms} of "
        f"{calibration.heldout_rollouts} held-out rollouts gave one, which proves at most {bound:.2g} "
        f"({calibration.confidence:.0%} confidence); the rest is extrapolated"
    )
    return "\n".join(lines) + "\n"


def _check_plan(plan: CalibrationPlan) -> None:
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
    policy: Policy, setups: Sequence[VariantSetup], plan: CalibrationPlan
) -> tuple[dict[str, list[list[ChunkStats]]], list[Variant]]:
    samples: dict[str, list[list[ChunkStats]]] = {}
    variants = []
    for setup in setups:
        if reason := probe_dtype(setup.dtype or "float32"):
            variants.append(Variant(name=setup.name, skipped=reason))
            logger.warning(f"{setup.name}: skipped, {reason}")
            continue
        own = measure_variant(policy, setup, plan.source, math.ceil(plan.samples / len(setups)))
        chunks = [chunk for rollout in own for chunk in rollout]
        num_tokens = sum(chunk.tokens for chunk in chunks)
        samples[setup.name] = own
        variants.append(Variant(name=setup.name, rollouts=len(own), chunks=len(chunks), tokens=num_tokens))
        logger.info(f"{setup.name}: {len(chunks)} chunks, {num_tokens} tokens of {len(own)} rollouts")
    return samples, variants


def _measure_batch(
    setup: VariantSetup, worker: PreTrainedModel, verifier: PreTrainedModel, requests: Sequence[Request], eos_id: int
) -> list[list[ChunkStats]]:
    builder = ProofBuilder()
    rollouts = run_variant(setup, worker, requests, eos_id=_NEVER, sink=builder)
    replays = replay_variant(setup, verifier, rollouts, eos_id=eos_id)
    proofs = [builder.take(rollout.id) for rollout in rollouts]
    results = verify_batch([replays[rollout.id].hidden for rollout in rollouts], proofs)
    pairs = zip(rollouts, results, strict=True)
    return [measure_chunks(rollout, replays[rollout.id], own) for rollout, own in pairs]
