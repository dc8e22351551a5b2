"""Power: how surely the checks find each way of using other weights, measured on the model and dtype of a run.

Altered copies of the model (policy/altered.py) generate and prove like a worker, and their work is checked:

    found    lower bound of the share of rollouts that one check alone rejects
    odds     of each rollout against the rival that it leans to most (toploc/rivals.py), which add up over many

In float32 the first is close to 1 for all of them, and nothing is compared with rivals. In bfloat16 the bets on rivals
are fitted here: levels to honest work of every variant, stakes to work of the rival. Each is fitted to one half of the
rollouts; odds are those of the other half.

A rival of the kind `previous` is a version that nobody knows when a run is calibrated. It is represented by weights
that moved by `step` at random, and bets on it are placed only on versions that are at least that far apart. Honest work
leans less to a rival that is further away.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from shoal.calibrate.prompts import PromptSource, draw_requests
from shoal.calibrate.variants import VariantSetup, cast_models, replay_variant, run_variant
from shoal.policy.altered import add_adapter, map_linears, round_bytes, round_channels, round_groups, shift_weights
from shoal.policy.model import Policy
from shoal.rollout import Request
from shoal.toploc.build import ProofBuilder
from shoal.toploc.calibration import LIMITED, Calibration, Power
from shoal.toploc.chunks import ChunkStats, measure_chunks
from shoal.toploc.rivals import (
    NUM_LEVELS,
    Lean,
    Rival,
    RivalBet,
    RivalBets,
    RivalWeights,
    compare_replays,
    fit_stakes,
    list_gains,
    make_rivals,
    measure_change,
)
from shoal.toploc.sequential_test import Level, SequentialEvidence
from shoal.toploc.threshold import bound_rate
from shoal.toploc.verify import verify_batch

ADAPTERS = (1e-3, 1e-2, 3e-2)
"""sizes of the adapters that are tried, as shares of the weights' norm"""
LEVELS = (0.5, 0.8, 0.95, 0.99)
"""shares of honest chunks that lean less than the values that are bet on"""
LEAST_LEAN = 0.01
"""minimum lean to bet on: below it, rounding on another machine may decide"""
SLACK = 1.5
"""factor by which chances are overstated, for machines and prompts that were not measured"""
_BATCH = 64

Alter = Callable[[PreTrainedModel], PreTrainedModel]


@dataclass(frozen=True, slots=True)
class Measured:
    """One rollout: its chunks under the stated weights, and how far they lean to each rival."""

    chunks: Sequence[ChunkStats]
    leans: Mapping[Rival, Sequence[Lean]]


def list_attacks(step: float) -> dict[str, Alter]:
    """The alterations whose power is measured, by name."""
    adapters = {
        f"adapter of {share:g}": partial(map_linears, change=partial(add_adapter, share=share)) for share in ADAPTERS
    }
    return {
        "int8": partial(map_linears, change=round_channels),
        "int8 in groups": partial(map_linears, change=round_bytes),
        "int4": partial(map_linears, change=round_groups),
        f"previous version, moved by {step:g}": partial(shift_weights, size=step),
        **adapters,
    }


def measure_power(
    policy: Policy,
    setups: Sequence[VariantSetup],
    source: PromptSource,
    calibration: Calibration,
    *,
    step: float,
    rollouts: int,
) -> Calibration:
    """The calibration with the power against each attack, and in bfloat16 with bets on rivals."""
    model = policy.model
    rivals = make_rivals(model, shift_weights(model, step)) if calibration.dtype == "bfloat16" else {}
    honest = {
        setup.name: measure_work(policy, setup, cast_models(setup, model)[0], rivals, source, rollouts)
        for setup in (setups if rivals else ())
    }
    worker = VariantSetup(name="cheat")
    work = {
        name: measure_work(policy, worker, alter(model).eval(), rivals, source, rollouts, label=name)
        for name, alter in list_attacks(step).items()
    }
    change = measure_change(model, rivals[Rival.PREVIOUS].model) if rivals else 0.0
    bets = {
        rival: fit_rival(rival, honest, work[attack], calibration.confidence, change)
        for rival, attack in zip(rivals, name_rivals(step), strict=False)
    }
    fitted = calibration.model_copy(update={"rivals": bets})
    unseen = [own for rollouts in honest.values() for own in rollouts[1::2]]
    odds = {rival: _weigh_all(unseen, rival, bet) for rival, bet in bets.items()}
    power = tuple(_rate_attack(name, own, fitted) for name, own in work.items())
    return fitted.model_copy(update={"power": power, "honest_odds": odds})


def name_rivals(step: float) -> tuple[str, str, str]:
    """The attacks that use each rival, in the order of `Rival`."""
    int8, groups, _, previous, *_ = list_attacks(step)
    return int8, groups, previous


def measure_work(
    policy: Policy,
    setup: VariantSetup,
    worker: PreTrainedModel,
    rivals: Mapping[Rival, RivalWeights],
    source: PromptSource,
    rollouts: int,
    *,
    label: str = "",
) -> list[Measured]:
    """Rollouts that `worker` generates, as a validator sees them: against the true weights and against the rivals.

    They are as long as the answers of a run: short ones have less to show.
    """
    drawn = draw_requests(policy, source, f"power {label or setup.name}")
    requests = (request for request in drawn if request.max_tokens == source.tokens)
    measured: list[Measured] = []
    while len(measured) < rollouts:
        batch = [next(requests) for _ in range(min(_BATCH, rollouts - len(measured)))]
        measured += _measure_batch(policy, setup, worker, rivals, batch)
    return measured


def _measure_batch(
    policy: Policy,
    setup: VariantSetup,
    worker: PreTrainedModel,
    rivals: Mapping[Rival, RivalWeights],
    requests: Sequence[Request],
) -> list[Measured]:
    builder = ProofBuilder()
    rollouts = run_variant(setup, worker, requests, eos_id=policy.eos_id, sink=builder)
    proofs = [builder.take(rollout.id) for rollout in rollouts]

    def replay(weights: RivalWeights) -> list[list[ChunkStats]]:
        replays = replay_variant(setup, weights.model, rollouts, eos_id=policy.eos_id, change=weights.change)
        results = verify_batch([replays[rollout.id].hidden for rollout in rollouts], proofs)
        return [
            measure_chunks(rollout, replays[rollout.id], own) for rollout, own in zip(rollouts, results, strict=True)
        ]

    stated = replay(RivalWeights(policy.model))
    others = {rival: replay(weights) for rival, weights in rivals.items()}
    return [
        Measured(chunks, {rival: compare_replays(chunks, own[index]) for rival, own in others.items()})
        for index, chunks in enumerate(stated)
    ]


def fit_rival(
    rival: Rival,
    honest: Mapping[str, Sequence[Measured]],
    cheated: Sequence[Measured],
    confidence: float,
    change: float,
) -> RivalBets:
    """Bets on a rival: levels from honest work of all variants, stakes from every second rollout of the rival."""
    kinds = {}
    for is_full in (True, False):
        groups = [_pick(own, rival, is_full) for own in honest.values()]
        levels = _fit_levels([group for group in groups if group], confidence)
        stakes = fit_stakes(_list_gains(_pick(cheated[::2], rival, is_full), levels))
        kinds[is_full] = RivalBet(levels=levels, stakes=stakes)
    # Rounded weights of any version are as far from it as these; a previous version may be closer.
    least = change if rival is Rival.PREVIOUS else 0.0
    return RivalBets(full=kinds[True], short=kinds[False], least_change=least)


def _pick(rollouts: Sequence[Measured], rival: Rival, is_full: bool) -> list[Lean]:
    return [lean for own in rollouts for lean in own.leans[rival] if lean.is_full is is_full]


def _list_gains(leans: Sequence[Lean], levels: Sequence[Level]) -> np.ndarray:
    return list_gains(leans, levels) if leans else np.zeros((0, NUM_LEVELS))


def _fit_levels(groups: Sequence[Sequence[Lean]], confidence: float) -> tuple[Level, ...]:
    sure = 1 - (1 - confidence) / 2 / (NUM_LEVELS * max(1, len(groups)))
    levels = []
    for name in ("states", "logprobs"):
        columns = [np.array([getattr(lean, name) for lean in group]) for group in groups]
        pooled = np.concatenate([*columns, np.zeros(1)])
        for value in np.maximum(np.quantile(pooled, LEVELS, method="higher"), LEAST_LEAN).tolist():
            rates = [bound_rate(int((column > value).sum()), len(column), sure) for column in columns]
            levels.append(Level(value=value, chance=min(1.0, SLACK * max(rates, default=1.0))))
    return tuple(levels)


def _weigh_all(rollouts: Sequence[Measured], rival: Rival, bets: RivalBets) -> tuple[float, ...]:
    return tuple(round(bets.weigh(own.leans[rival]), 3) for own in rollouts)


def _rate_attack(name: str, rollouts: Sequence[Measured], calibration: Calibration) -> Power:
    """The power against an attack, by rollouts that no stake was fitted to."""
    unseen = rollouts[1::2]
    odds = {rival: _weigh_all(unseen, rival, bets) for rival, bets in calibration.rivals.items()}
    best = max(odds, key=lambda rival: sum(odds[rival]), default=None)
    missed = sum(not is_found(own.chunks, calibration) for own in rollouts)
    return Power(
        attack=name,
        rollouts=len(rollouts),
        found=1.0 - bound_rate(missed, len(rollouts), calibration.confidence),
        tokens=sum(chunk.tokens for own in rollouts for chunk in own.chunks) / len(rollouts),
        rival=best,
        odds=odds[best] if best is not None else (),
    )


def is_found(chunks: Sequence[ChunkStats], calibration: Calibration) -> bool:
    """Whether one rollout's chunks exceed a threshold, alone or together."""
    over = any(
        not getattr(chunk, name) <= calibration.limit_chunk(check, chunk)
        for chunk in chunks
        for check, name in LIMITED.items()
    )
    return over or SequentialEvidence().extend(chunks, calibration.bets).judge(calibration.share).failed


def format_power(calibration: Calibration) -> str:
    """The power against each attack as a text table."""
    lines = [f"{'attack':<34}{'rollouts':>9}{'tokens':>8}{'found':>8}{'nats':>8}  leans to"]
    for own in calibration.power:
        nats = f"{own.gain:>8.2f}" if own.odds else f"{'-':>8}"
        lines.append(f"{own.attack:<34}{own.rollouts:>9}{own.tokens:>8.0f}{own.found:>8.1%}{nats}  {own.rival or '-'}")
    return "\n".join(lines) + "\n"
