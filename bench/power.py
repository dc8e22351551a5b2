"""Whether the check rate's promise is kept in bfloat16: owners that use other weights, caught by measured power.

    python bench/power.py [--quick] [--json] [--model sort|smollm2 ...]

Each model is calibrated in bfloat16, with the power against each attack. The dial turns that and the default guarantee
(10 % of the work, 100 submissions, 99 %) into how many rollouts of a submission are replayed. Then owners live: their
submissions are drawn from rollouts that calibration has not seen, honest or of an attack, and judged by the checks of a
submission and by the coordinator's own rule (coordinator/rules/suspicion.py), with two owners of validators in turn.

    throughout   every submission is cheated
    whole        one in ten submissions, drawn at random, is cheated throughout
    spread       one in ten rollouts, drawn at random, is cheated

Figures, per model:
    caught_*       least share of owners caught within the promised submissions, for the promised attacks, throughout
                   and whole
    spread_*       the same for spread
    within_*       submissions until 99 % of the owners are caught, the most over promised attacks, throughout and whole
    replayed_*     rollouts of a submission that are replayed
    alarms_*       honest owners convicted
    honest_*       replayed honest rollouts of these
    odds_*         largest mean odds of honest rollouts over engines and rivals: at most 1 by the bound
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from common import build_parser, finish
from models import Subject, allow_bfloat16, has_smollm2, load_subject
from shoal.calibrate.calibrate import CalibrationPlan, calibrate_policy
from shoal.calibrate.power import Measured, is_found, list_attacks, measure_work
from shoal.calibrate.prompts import PromptSource
from shoal.calibrate.variants import VariantSetup, list_setups
from shoal.coordinator.rules.suspicion import CONVICTIONS, LINE, Suspicion
from shoal.engine.base import CHUNK
from shoal.policy.altered import shift_weights
from shoal.protocol.check_rate import ValidationConfig
from shoal.protocol.power import Dial, read_power
from shoal.seeds import derive_seed
from shoal.toploc.calibration import Calibration
from shoal.toploc.finding import SHARES, mix_odds, spell_odds
from shoal.toploc.rivals import make_rivals
from shoal.util.process import tune_process

FRACTION = 0.1
VALIDATORS = 2
WAYS = {"throughout": 1.0, "whole": FRACTION, "spread": FRACTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured of one model."""

    task: str
    tokens: int
    """longest answer"""
    step: float
    rollouts: int
    """of a submission"""
    samples: int
    """honest chunks of the calibration"""
    attacks: int
    """rollouts of each attack for the calibration, and as many for the owners"""
    owners: int
    honest: int
    """submissions of each honest owner"""


FULL = {
    "sort": Size(task="sort", tokens=13, step=1e-4, rollouts=256, samples=2800, attacks=384, owners=200, honest=2000),
    "smollm2": Size(task="", tokens=40, step=3e-5, rollouts=32, samples=120, attacks=20, owners=200, honest=2000),
}
QUICK = {"sort": replace(FULL["sort"], samples=1000, attacks=128, owners=50, honest=200)}


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a validator knows of some replayed rollouts."""

    found: np.ndarray
    """whether one check alone rejects it (rollouts,)"""
    odds: np.ndarray
    """logarithms of its odds (rollouts, rivals, shares)"""

    def draw(self, rng: np.random.Generator, count: int) -> "Weighed":
        """So many of them, drawn at random."""
        places = rng.integers(len(self.found), size=count)
        return Weighed(self.found[places], self.odds[places])

    def join(self, other: "Weighed") -> "Weighed":
        return Weighed(np.concatenate([self.found, other.found]), np.concatenate([self.odds, other.odds]))


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(FULL), help="default: all that are installed")
    flags = parser.parse_args()
    allow_bfloat16()
    tune_process(1)
    sizes = QUICK if flags.quick else FULL
    names = [name for name in flags.model or sizes if name in sizes and (name != "smollm2" or has_smollm2())]
    tables, figures = [], {}
    for name in names:
        table, own = measure_model(name, sizes[name], flags)
        tables.append(table)
        figures |= {f"{key}_{name}": value for key, value in own.items()}
    finish(flags, "\n\n".join(tables), figures)


def measure_model(name: str, size: Size, flags: argparse.Namespace) -> tuple[str, dict[str, float]]:
    subject = load_subject(name, torch.bfloat16)
    subject.policy.model.eval()
    setups = list_setups("bfloat16", threads=1, mixed=False)
    if name == "smollm2":  # the two extremes of what this machine offers
        setups = [setup for setup in setups if setup.name in ("64 slots", "transformers, batch 7")]
    elif flags.quick:  # one at a time takes most of the time and is as noisy as seven
        setups = [setup for setup in setups if setup.name not in ("1 slot", "transformers, batch 1")]
    calibration = calibrate(subject, setups, size)
    powers = read_power(calibration.model_dump_json().encode())
    dial = Dial(ValidationConfig(), powers, rollouts=size.rollouts, validators=VALIDATORS)
    hardest = dial.hardest
    assert hardest is not None, "power was measured"
    replayed = hardest.checked or size.rollouts
    honest, cheated = weigh_unseen(subject, setups, calibration, size)
    promise = ValidationConfig().guarantee
    rows, caught, spread, within = [], 1.0, 1.0, 0.0
    lines = {cover.attack: line for cover, (_, line) in zip(dial.covers, dial.describe(replayed), strict=True)}
    pool = reduce(Weighed.join, honest.values())
    for attack, work in cheated.items():
        cells = []
        for way, fraction in WAYS.items():
            owner = Owner(work, pool, way, fraction)
            seeds = [derive_seed(name, attack, way, number) for number in range(size.owners)]
            lives = [owner.live(replayed, promise.submissions, calibration, seed) for seed in seeds]
            share = sum(life is not None for life in lives) / len(lives)
            late = sorted(math.inf if life is None else life for life in lives)[math.ceil(0.99 * len(lives)) - 1]
            cells.append(f"{100 * share:.3g} % ({late:g})")
            if attack in ValidationConfig().promised and way == "spread":
                spread = min(spread, share)
            elif attack in ValidationConfig().promised:
                caught, within = min(caught, share), max(within, late)
        nats, alone = work.odds[:, :, -1].mean(axis=0).max(), work.found.mean()
        rows.append(f"| {attack} | {100 * alone:.3g} % | {nats:.2f} | {' | '.join(cells)} |")
    alarms, number, odds = count_alarms(honest, replayed, size, calibration)
    table = [
        f"### {name}, bfloat16",
        "",
        f"{replayed} of {size.rollouts} rollouts of a submission are replayed. Owners caught within "
        f"{promise.submissions} submissions, and within how many 99 % of them were:",
        "",
        f"| attack | found alone | nats | {' | '.join(WAYS)} |",
        "|---" * (3 + len(WAYS)) + "|",
        *rows,
        "",
        f"{alarms} of {len(honest)} honest owners convicted, {number:,} rollouts replayed; mean odds <= {odds:.2f}",
        "",
        *(f"    {line}" for line in lines.values()),
    ]
    figures = {"caught": caught, "spread": spread, "within": within, "replayed": float(replayed)}
    return "\n".join(table), figures | {"alarms": float(alarms), "honest": float(number), "odds": odds}


def calibrate(subject: Subject, setups: Sequence[VariantSetup], size: Size) -> Calibration:
    begun = time.monotonic()
    plan = CalibrationPlan(
        source=_make_source(size, 0, max(CHUNK, size.tokens)),
        samples=size.samples,
        threads=1,
        attacks=size.attacks,
        answer_tokens=size.tokens,
        step=size.step,
    )
    calibration = calibrate_policy(subject.policy, setups, plan, name=subject.name)
    _log(subject, f"calibrated, {time.monotonic() - begun:.0f} s")
    return calibration


def _make_source(size: Size, seed: int, tokens: int) -> PromptSource:
    return PromptSource(tokens=tokens, temperature=1.0, seed=seed, task=size.task)


def weigh_unseen(
    subject: Subject, setups: Sequence[VariantSetup], calibration: Calibration, size: Size
) -> tuple[dict[str, Weighed], dict[str, Weighed]]:
    """Rollouts on prompts that calibration has not seen, by engine and by attack."""
    policy, source = subject.policy, _make_source(size, 1, size.tokens)
    rivals = make_rivals(policy.model, shift_weights(policy.model, size.step))
    honest, cheated = {}, {}
    for setup in setups:
        work = measure_work(policy, setup, policy.model, rivals, source, size.attacks)
        honest[setup.name] = _weigh(work, calibration)
        _log(subject, f"honest, {setup.name}")
    for name, alter in list_attacks(size.step).items():
        model = alter(policy.model).eval()
        work = measure_work(policy, VariantSetup(name="cheat"), model, rivals, source, size.attacks, label=name)
        cheated[name] = _weigh(work, calibration)
        _log(subject, name)
    return honest, cheated


def _weigh(work: Sequence[Measured], calibration: Calibration) -> Weighed:
    bets = calibration.rivals
    logs = [[bets[rival].weigh(own.leans[rival]) for rival in bets] for own in work]
    odds = [[[mix_odds(log, share) for share in SHARES] for log in own] for own in logs]
    return Weighed(np.array([is_found(own.chunks, calibration) for own in work]), np.array(odds))


@dataclass(frozen=True, slots=True)
class Owner:
    """One that cheats in a fraction of its work."""

    cheated: Weighed
    honest: Weighed
    way: str
    fraction: float

    def live(self, replayed: int, submissions: int, calibration: Calibration, seed: int) -> int | None:
        """The submission with which it is caught; None if it is not."""
        rng = np.random.default_rng(seed)
        judges = [Suspicion({}) for _ in range(VALIDATORS)]
        for number in range(1, submissions + 1):
            is_spread = self.way == "spread"
            bad = rng.binomial(replayed, self.fraction) if is_spread else replayed * int(rng.random() < self.fraction)
            drawn = self.cheated.draw(rng, bad).join(self.honest.draw(rng, replayed - bad))
            if judge(drawn, judges, rng, calibration):
                return number
        return None


def judge(drawn: Weighed, judges: list[Suspicion], rng: np.random.Generator, calibration: Calibration) -> bool:
    """Whether an owner is convicted with this submission; the evidence of the validator that judges it is updated."""
    logs = drawn.odds.sum(axis=0)
    together = np.logaddexp.reduce(logs.ravel()) - math.log(logs.size)
    if drawn.found.any() or together > -math.log(calibration.share):
        return True
    place = int(rng.integers(len(judges)))
    odds = {rival.value: [spell_odds(log) for log in own] for rival, own in zip(calibration.rivals, logs, strict=True)}
    judges[place] = judges[place].weigh(odds, len(drawn.found))
    return sum(own.evidence >= LINE for own in judges) >= CONVICTIONS


def count_alarms(
    honest: Mapping[str, Weighed], replayed: int, size: Size, calibration: Calibration
) -> tuple[int, int, float]:
    """Convicted owners that are honest, one for each engine; replayed rollouts; the largest mean odds."""
    alarms = 0
    for name, work in honest.items():
        rng, judges = np.random.default_rng(derive_seed("honest", name)), [Suspicion({}) for _ in range(VALIDATORS)]
        alarms += any(judge(work.draw(rng, replayed), judges, rng, calibration) for _ in range(size.honest))
    means = [np.exp(work.odds[:, :, -1]).mean(axis=0).max() for work in honest.values()]
    return alarms, len(honest) * size.honest * replayed, float(max(means))


def _log(subject: Subject, text: str) -> None:
    print(f"{subject.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
