"""Report of a red-team run: Markdown tables, a JSON object, a figure. All numbers come from the ledger.

<run>/redteam.md  redteam.json  redteam.png
"""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.cpu_usage import share_checking
from shoal.redteam.ledger_summary import read_ledger_summary
from shoal.redteam.matrix import MAX_SUBMISSIONS, AttackRow, Matrix, Proportion, build_matrix
from shoal.redteam.registry import Expected
from shoal.redteam.swarm import RedTeamSwarm
from shoal.redteam.validators import LIES
from shoal.train.report import draw_png
from shoal.util.console import format_time
from shoal.util.files import write_atomic

EXIT_FAULT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RedTeamReport:
    """What is printed."""

    text: str
    figures: Mapping[str, Any]
    code: int
    """0 if every attack had the expected outcome and no honest node was penalised"""


def write_report(swarm: RedTeamSwarm) -> RedTeamReport:
    """Read the ledger of a stopped swarm, write the report to its folder, and return it."""
    layout = swarm.prepared.layout
    ledger = read_ledger_summary(layout.ledger)
    matrix = build_matrix(ledger, swarm.attempts, honest=swarm.honest, liars=swarm.liars)
    figures = collect_figures(swarm, matrix)
    lines = [*_describe_attempts(swarm, matrix), "", *format_matrix(matrix), "", *_describe_honest(swarm, matrix)]
    text = "\n".join(lines)
    write_atomic(layout.root / "redteam.md", text.encode() + b"\n")
    write_atomic(layout.root / "redteam.json", json.dumps(figures, indent=1).encode() + b"\n")
    if importlib.util.find_spec("matplotlib") is not None and matrix.rows:
        write_atomic(layout.root / "redteam.png", draw_matrix(matrix))
    return RedTeamReport(text=text, figures=figures, code=EXIT_FAULT if matrix.faults else 0)


def format_matrix(matrix: Matrix) -> list[str]:
    """One row per attack: its gain, and the share of its judged submissions that failed each check."""
    columns = matrix.columns
    head = ("attack", "expected", "met", "tried", "judged", "found", "until caught", "tokens", "peak", "left", "honest")
    rows = [_join((*head, *columns)), _join(["---"] * (len(head) + len(columns)))]
    for row in matrix.rows:
        cells = [row.name, row.expect.value if row.expect else "sleeper", "yes" if row.met else "**no**"]
        cells += [str(len(row.outcomes)), str(row.sum("judged")), _show_rate(row.detection)]
        cells += [str(row.until) if row.until else "-", f"{row.until_tokens:,}" if row.until else "-"]
        cells += [f"{row.sum(name):,}" for name in ("peak", "left", "deserved")]
        cells += [f"{hits / row.sum('judged'):.0%}" if (hits := row.columns[name]) else "" for name in columns]
        rows.append(_join(cells))
    return rows


def collect_figures(swarm: RedTeamSwarm, matrix: Matrix) -> dict[str, Any]:
    """All figures, for the JSON report."""
    honest, cost = matrix.honest, measure_cost(swarm.cpu_s, swarm)
    return {
        "attacks": [_dump_row(row) for row in matrix.rows],
        "met": sum(row.met for row in matrix.rows),
        "faults": matrix.faults,
        "hard_caught": sum(row.caught for row in matrix.rows if row.expect is Expected.HARD),
        "hard_attacks": sum(row.expect is Expected.HARD for row in matrix.rows),
        "honest_workers": honest.workers,
        "honest_submissions": honest.submissions,
        "honest_rollouts": honest.rollouts,
        "honest_false_alarms": honest.alarms,
        "honest_punished": len(honest.punished),
        "honest_credit": {name: round(value, 4) for name, value in honest.ratios.items() if not math.isnan(value)},
        "liars": dict(matrix.liars),
        "checking_cost": cost,
        "cpu_s": {name: round(value, 1) for name, value in swarm.cpu_s.items()},
        "ledger_holds": matrix.holds,
        "ledger": matrix.ledger,
        "attempts": len(swarm.attempts),
        "planned": len(swarm.plan.attempts),
        "seconds": round(swarm.seconds, 1),
        "interrupted": swarm.code != 0,
    }


def measure_cost(cpu_s: Mapping[str, float], swarm: RedTeamSwarm) -> float | None:
    """Cost of checking relative to all generation, in CPU time; lying validators do not check."""
    share = share_checking(cpu_s, swarm.liars.values())
    return None if share is None else round(share, 4)


def _dump_row(row: AttackRow) -> dict[str, Any]:
    rate = row.detection
    return {
        "name": row.name,
        "fate": row.expect.value if row.expect else "sleeper",
        "hard": row.expect in (Expected.HARD, None),
        "met": row.met,
        "caught": row.caught,
        "attempts": len(row.outcomes),
        "submissions": sum(sum(outcome.states.values()) for outcome in row.outcomes),
        "judged": rate.trials,
        "found": rate.hits,
        "found_interval": [round(value, 4) for value in rate.interval],
        "submissions_until_caught": row.until,
        "tokens_until_caught": row.until_tokens if row.until else None,
        "accepted_by_liars": row.sum("by_liar"),
        "credit_peak": row.sum("peak"),
        "credit": row.sum("left"),
        "credit_of_honest_work": row.sum("deserved"),
        "checks": dict(row.checks),
        "ended": [outcome.attempt.ended for outcome in row.outcomes],
        "faults": [outcome.fault for outcome in row.outcomes if outcome.fault],
    }


def _describe_attempts(swarm: RedTeamSwarm, matrix: Matrix) -> list[str]:
    plan, honest = swarm.plan, matrix.honest
    met, tried = sum(row.met for row in matrix.rows), f"{len(swarm.attempts)} of {len(plan.attempts)} attempts"
    lying = f", {len(plan.lies)} of them liars ({', '.join(plan.lies)})" if plan.lies else ""
    return [
        f"{tried} in {format_time(swarm.seconds)}; {met} of {len(matrix.rows)} attacks had the expected outcome.",
        f"{honest.workers} honest workers, {plan.validators} validators{lying}.",
        *(f"- UNEXPECTED: {fault}" for fault in matrix.faults),
    ]


def _describe_honest(swarm: RedTeamSwarm, matrix: Matrix) -> list[str]:
    """Honest workers, lying validators, cost."""
    honest, cost = matrix.honest, measure_cost(swarm.cpu_s, swarm)
    ratios = [value for value in honest.ratios.values() if not math.isnan(value)]
    alarms = Proportion(honest.alarms, honest.submissions)
    credit = f"{min(ratios):.1%} to {max(ratios):.1%}" if ratios else "nothing"
    lines = [
        f"Honest: {honest.rollouts:,} rollouts in {honest.submissions:,} submissions; false positives {honest.alarms} "
        f"(at most {alarms.interval[1]:.2%} of submissions, 95 % confidence); penalised "
        f"{', '.join(honest.punished) or 'none'}; paid {credit} of the value of the work.",
        "Found is the share of bad submissions that an honest validator rejected, with its 95 % interval. A new owner "
        f"must be convicted within {MAX_SUBMISSIONS}. Credit in micro-credits: at its peak, at the end, and what "
        "honest work of the same size would have earned.",
    ]
    lies = swarm.plan.liars
    lines += [f"{name} ({LIES[lies[name]][0]}) is {standing}." for name, standing in matrix.liars.items()]
    if cost is not None:
        lines.append(f"Checking took {cost:.1%} of the CPU time of all generation, honest or not.")
    return [*lines, f"The ledger {'holds' if matrix.holds else 'DOES NOT HOLD'}: {matrix.ledger}."]


def _show_rate(rate: Proportion) -> str:
    if not rate.trials:
        return "-"
    low, high = rate.interval
    return f"{rate.value:.0%} ({low:.0%} to {high:.0%})"


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


_CAUGHT = (Expected.HARD, Expected.SOFT, Expected.FORM)
_MET, _MISSED = "C0", "C3"


def draw_matrix(matrix: Matrix) -> bytes:
    """The matrix as a PNG file; needs matplotlib."""
    height = 1.6 + 0.2 * len(matrix.rows)
    widths = (max(3, len(matrix.columns)), 4)
    with draw_png(1, 2, figsize=(10, height), dpi=110, width_ratios=widths, sharey=True) as (axes, picture):
        _draw_heat(axes[0], matrix)
        _draw_bars(axes[1], matrix)
    return picture.getvalue()


def _draw_heat(axes: Any, matrix: Matrix) -> None:
    """Attacks by checks: share of judged submissions that failed the check."""
    columns = matrix.columns or ["none"]
    shares = [[row.columns[name] / max(1, row.sum("judged")) for name in columns] for row in matrix.rows]
    axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    for line, row in enumerate(shares):
        for column, share in enumerate(row):
            if share:
                colour = "white" if share > 0.6 else "black"
                axes.text(column, line, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=8)
    names = [f"{row.name} ({row.expect.value if row.expect else 'sleeper'})" for row in matrix.rows]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_title("judged submissions that failed a check, %", fontsize=9)


def _draw_bars(axes: Any, matrix: Matrix) -> None:
    """The largest number of submissions until caught; as text where being caught is not the expectation."""
    counts = [row.until or 0 if row.expect in _CAUGHT else 0 for row in matrix.rows]
    axes.barh(range(len(counts)), counts, color=[_MET if row.met else _MISSED for row in matrix.rows], height=0.7)
    for line, row in enumerate(matrix.rows):
        if not counts[line]:
            axes.text(0.08, line, _describe_row(row), va="center", fontsize=7, color="black" if row.met else _MISSED)
    axes.axvline(MAX_SUBMISSIONS + 0.5, color="0.6", linewidth=0.8, linestyle=":")
    axes.set_title("bad submissions until caught", fontsize=9)
    axes.set_xlabel("dotted: the allowed maximum; red: unexpected", fontsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, max(MAX_SUBMISSIONS + 1, *counts))
    axes.grid(axis="x", alpha=0.3)


def _describe_row(row: AttackRow) -> str:
    if row.expect is None:
        return f"banned at submission {row.until}" if row.until else "not caught"
    if row.expect is Expected.REFUSED:
        return "refused" if row.met else "not refused"
    if row.expect in _CAUGHT:
        return "not caught"
    earned, deserved = row.sum("left"), row.sum("deserved")
    return f"earned {earned / deserved:.0%} of honest pay" if deserved else "earned nothing"
