"""The report of a field: tables in Markdown, one object of JSON, a picture. All numbers are from the ledger.

<run>/redteam.md  redteam.json  redteam.png
"""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shoal.console import format_time
from shoal.files import write_atomic
from shoal.launch.meter import share_checking
from shoal.redteam.field import Field
from shoal.redteam.liars.registry import LIES
from shoal.redteam.matrix import MOST_PIECES, Matrix, Row, build_matrix
from shoal.redteam.rate import Rate
from shoal.redteam.registry import Fate
from shoal.redteam.tally import read_tally

if TYPE_CHECKING:
    from shoal.eval import Estimate
    from shoal.redteam.indoors import Indoors

EXIT_FAULT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is printed."""

    text: str
    figures: Mapping[str, Any]
    code: int
    """0 if every attack met its fate and nobody honest was punished"""

    def to_text(self) -> str:
        """The tables."""
        return self.text

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.figures)


def write_report(field: Field, indoors: "Indoors | None" = None) -> Report:
    """Read the ledger of a field that stands still, write the report into its folder, and return it."""
    layout = field.prepared.layout
    tally = read_tally(layout.ledger)
    matrix = build_matrix(tally, field.attempts, honest=field.honest, liars=field.liars)
    figures = collect_figures(field, matrix)
    lines = [*_tell_field(field, matrix), "", *format_matrix(matrix), "", *_tell_rest(field, matrix)]
    if indoors is not None:
        lines += format_indoors(indoors)
        figures |= dump_indoors(indoors)
    text = "\n".join(lines)
    write_atomic(layout.root / "redteam.md", text.encode() + b"\n")
    write_atomic(layout.root / "redteam.json", json.dumps(figures, indent=1).encode() + b"\n")
    if importlib.util.find_spec("matplotlib") is not None and matrix.rows:
        from shoal.redteam.draw import draw_matrix

        write_atomic(layout.root / "redteam.png", draw_matrix(matrix))
    return Report(text=text, figures=figures, code=EXIT_FAULT if matrix.faults else 0)


def format_matrix(matrix: Matrix) -> list[str]:
    """A row for each attack: what it brought, and the share of its judged submissions in which each check failed."""
    columns = matrix.columns
    head = ("attack", "fate", "met", "tried", "judged", "found", "until caught", "tokens", "peak", "left", "honest")
    rows = [_join((*head, *columns)), _join(["---"] * (len(head) + len(columns)))]
    for row in matrix.rows:
        cells = [row.name, row.fate.value if row.fate else "sleeper", "yes" if row.met else "**no**"]
        cells += [str(len(row.outcomes)), str(row.sum("judged")), _show_rate(row.detection)]
        cells += [str(row.until) if row.until else "-", f"{row.until_tokens:,}" if row.until else "-"]
        cells += [f"{row.sum(name):,}" for name in ("peak", "left", "deserved")]
        cells += [_show_share(row.columns[name], row.sum("judged")) for name in columns]
        rows.append(_join(cells))
    return rows


def collect_figures(field: Field, matrix: Matrix) -> dict[str, Any]:
    """Everything for a program to read."""
    honest, cost = matrix.honest, measure_cost(field.cpu_s, field)
    return {
        "attacks": [_dump_row(row) for row in matrix.rows],
        "met": sum(row.met for row in matrix.rows),
        "faults": matrix.faults,
        "hard_caught": sum(row.caught for row in matrix.rows if row.fate is Fate.HARD),
        "hard_attacks": sum(row.fate is Fate.HARD for row in matrix.rows),
        "honest_workers": honest.workers,
        "honest_submissions": honest.pieces,
        "honest_rollouts": honest.rollouts,
        "honest_false_alarms": honest.alarms,
        "honest_punished": len(honest.punished),
        "honest_credit": {name: round(value, 4) for name, value in honest.ratios.items() if not math.isnan(value)},
        "liars": dict(matrix.liars),
        "checking_cost": cost,
        "cpu_s": {name: round(value, 1) for name, value in field.cpu_s.items()},
        "ledger_holds": matrix.holds,
        "ledger": matrix.ledger,
        "attempts": len(field.attempts),
        "planned": len(field.plan.trials),
        "seconds": round(field.seconds, 1),
        "interrupted": field.code != 0,
    }


def format_indoors(indoors: "Indoors") -> list[str]:
    """Tables of what was measured without a swarm."""
    lines = []
    if indoors.powers:
        lines += ["", "Offline, all rollouts checked: bad rollouts and submissions with such that are found.", ""]
        lines += [_join(("attack", "bad rollouts", "found", "submissions found", "false alarms")), _join(["---"] * 5)]
        for power in indoors.powers:
            bad = f"{round(power.changed.value * power.num_rollouts)} of {power.num_rollouts}"
            cells = (power.attack, bad, _show_estimate(power.rollouts), _show_estimate(power.submissions))
            lines.append(_join((*cells, str(power.alarms))))
    if indoors.careers:
        lines += [
            "",
            "Offline, owners of good record that cheat in some of their submissions; bad rollouts are no honest work.",
            "",
        ]
        head = ("attack", "standing", "cheats in", "bad", "replayed", "promise", "kept", "mean", "one in 100 lasts")
        lines += [_join(head), _join(["---"] * len(head))]
        for career in indoors.careers:
            promise = f"within {career.promised}, {career.probability:.0%}"
            cells = (career.attack, career.standing, f"{career.cheats:.0%}", f"{career.fraction:.1%}")
            numbers = (
                f"{career.checked} of {career.rollouts}",
                promise,
                _show_rate(career.kept, 1),
                f"{career.mean:.1f}",
                f"{career.longest:.0f}",
            )
            lines.append(_join((*cells, *numbers)))
    return lines


def dump_indoors(indoors: "Indoors") -> dict[str, Any]:
    """The same for a program."""
    careers = [
        asdict(career) | {"kept": career.kept.value, "kept_interval": list(career.kept.interval), "holds": career.holds}
        for career in indoors.careers
    ]
    return {"power": {power.attack: asdict(power) for power in indoors.powers}, "sleepers": careers}


def measure_cost(cpu_s: Mapping[str, float], field: Field) -> float | None:
    """What checking costs of all generating; who lies does not check."""
    share = share_checking(cpu_s, field.liars.values())
    return None if share is None else round(share, 4)


def _dump_row(row: Row) -> dict[str, Any]:
    rate = row.detection
    return {
        "name": row.name,
        "fate": row.fate.value if row.fate else "sleeper",
        "hard": row.fate in (Fate.HARD, None),
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


def _tell_field(field: Field, matrix: Matrix) -> list[str]:
    plan, honest = field.plan, matrix.honest
    met, tried = sum(row.met for row in matrix.rows), f"{len(field.attempts)} of {len(plan.trials)} attempts"
    lying = f", {len(plan.lies)} of them liars ({', '.join(plan.lies)})" if plan.lies else ""
    return [
        f"{tried} in {format_time(field.seconds)}; {met} of {len(matrix.rows)} attacks met their fate.",
        f"{honest.workers} honest workers, {plan.validators} validators{lying}.",
        *(f"- NOT AS IT MUST BE: {fault}" for fault in matrix.faults),
    ]


def _tell_rest(field: Field, matrix: Matrix) -> list[str]:
    """Honest workers, liars, cost."""
    honest, cost = matrix.honest, measure_cost(field.cpu_s, field)
    ratios = [value for value in honest.ratios.values() if not math.isnan(value)]
    alarms = Rate(honest.alarms, honest.pieces)
    credit = f"{min(ratios):.1%} to {max(ratios):.1%}" if ratios else "nothing"
    lines = [
        f"Honest: {honest.rollouts:,} rollouts in {honest.pieces:,} submissions; false alarms {honest.alarms} "
        f"(at most {alarms.interval[1]:.2%} of submissions, by 95 % confidence); punished "
        f"{', '.join(honest.punished) or 'nobody'}; paid {credit} of what the work deserves.",
        "Found is the share of bad submissions that an honest validator rejected, with its 95 % interval. A newcomer "
        f"is to be convicted within {MOST_PIECES}. Credit in micro-credits: at its peak, at the end, and what honest "
        "work of the same size would have earned.",
    ]
    lies = {name: LIES[lie] for name, lie in field.lies.items()}
    lines += [f"{name} ({lies[name]}) is {standing}." for name, standing in matrix.liars.items()]
    if cost is not None:
        lines.append(f"Checking took {cost:.1%} of the CPU of all who generate, honest or not.")
    return [*lines, f"The ledger {'holds' if matrix.holds else 'IS BROKEN'}: {matrix.ledger}."]


def _show_rate(rate: Rate, digits: int = 0) -> str:
    if not rate.trials:
        return "-"
    low, high = rate.interval
    return f"{rate.value:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"


def _show_estimate(estimate: "Estimate") -> str:
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"


def _show_share(hits: int, trials: int) -> str:
    return f"{hits / trials:.0%}" if hits and trials else ""


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
