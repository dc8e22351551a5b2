"""The report of a finished swarm: report.txt, report.html and report.png.

    metrics, spans, CPU seconds, ledger, rollouts -> sections -> text and page

It begins with the result: what was learned, who was caught, what checking cost, and how to look further.

Invariants:
- the page is one file that loads nothing; text of strangers is escaped;
- there is one chart: the picture, or without matplotlib the chart of the text.
"""

import base64
import html
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from shoal.audit.database import open_reader
from shoal.audit.verify import verify_ledger
from shoal.coordinator.explain import explain_submission
from shoal.coordinator.state import PROJECTIONS
from shoal.coordinator.status import read_leaders
from shoal.launch.cpu_usage import read_costs, share_checking
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.timeline import Broadcast, Interval, PartTrack, find_broadcasts, find_period, read_tracks
from shoal.launch.view import MARKS, describe_marks, draw_chart, read_lines
from shoal.ledger.db import read_snapshot
from shoal.ledger.event import MICRO
from shoal.protocol.messages import LeaderLine, Standing, SubmissionState
from shoal.train.report import draw_png, pick_series
from shoal.train.rollout_files import list_steps, show_groups
from shoal.util.clock import read_clock
from shoal.util.console import format_time
from shoal.util.files import write_atomic
from shoal.util.logs import clean_text
from shoal.util.units import count_things

NUM_GROUPS = 3
"""shown of a batch"""
NUM_ROLLOUTS = 4
"""shown of a group"""
MAX_OWNERS = 1000
_COUNTS = text("SELECT owner, state, count(*) FROM submission GROUP BY owner, state")
_WORST = text("SELECT submission FROM submission WHERE owner = :owner AND state = :state ORDER BY committed_ms LIMIT 1")
_REJECTED = (SubmissionState.HARD, SubmissionState.SOFT, SubmissionState.FORM)
_COLOURS = {"reward/mean": "0.6", "eval/greedy": "C1", "eval/pass_at_1": "C0"}
_BUSY, _WAIT, _LANE = "C0", "0.85", "C2"
_STATES = ("accepted", "rejected_hard", "rejected_soft", "rejected_form", "inconclusive", "superseded", "void")
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.15em .9em .15em 0;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #999;font-weight:600}
pre{background:#f5f5f5;padding:.8em;overflow-x:auto;font-size:13px}img{max-width:100%}h2{margin-top:1.6em}
summary{font-size:1.2em;font-weight:600;margin:.8em 0;cursor:pointer}"""

Row = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A heading with a sentence, a table, and texts to be shown as they are; each may be empty."""

    title: str
    text: str = ""
    lines: Sequence[str] = ()
    """sentences before the text, each on its own line"""
    rows: Sequence[Row] = ()
    """the first one is the head"""
    blocks: Sequence[str] = ()
    chart: str = ""
    """for readers that have no picture"""
    is_folded: bool = True
    """whether the page shows it only on a click"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """The ledger in short."""

    holds: bool
    summary: str
    """what its verification found"""
    leaders: tuple[LeaderLine, ...]
    verdicts: Mapping[str, Counter[str]]
    """how many submissions of each owner ended how"""
    worst: Mapping[str, str]
    """of each owner with a rejection, its worst submission"""
    cases: Mapping[str, str]
    """its explanation, by owner"""


def write_report(prepared: PreparedSwarm, ledger: Path | None = None) -> str:
    """Write the report of a swarm that has stopped; its summary in a few lines.

    `ledger` is a copy of the ledger, for a swarm whose coordinator is on another machine.
    """
    layout, config = prepared.layout, prepared.config
    ledger = ledger or layout.ledger
    lines = read_lines(layout.root)
    tracks = read_tracks(find_folders(prepared))
    broadcasts = find_broadcasts(tracks)
    evidence, costs = collect_evidence(ledger), read_costs(layout.costs)
    title = f"{config.run}: {config.steps} steps, async level {config.async_level}"
    learning = describe_learning(lines, tracks, config.steps)
    root = _shorten(layout.root)
    result = summarise(learning, evidence, prepared.names, describe_checking(costs), root)
    further = [
        f"shoal rollouts {root}",
        f"shoal ledger verify {_shorten(ledger)}",
        f"shoal eval {root}",
    ]
    sections = [
        ReportSection(
            title="Result",
            text=f"{learning.text} Look further with:",
            blocks=("\n".join(further),),
            lines=result,
            is_folded=False,
        ),
        learning,
        describe_rollouts(layout),
        describe_times(tracks),
        describe_costs(costs),
        describe_broadcasts(broadcasts),
        describe_verdicts(evidence, prepared.names),
        describe_cases(evidence, prepared.names),
        ReportSection(title="The ledger", text=f"{evidence.summary}. Check it again: {further[1]}"),
    ]
    picture, notes = b"", list[str]()
    if importlib.util.find_spec("matplotlib") is not None:
        picture = draw_picture(lines, tracks, broadcasts, title)
        write_atomic(layout.root / "report.png", picture)
    else:
        notes = ["no report.png: matplotlib is not installed (the extra `plots`)"]
    write_atomic(layout.root / "report.txt", format_text(title, sections).encode())
    write_atomic(layout.root / "report.html", format_page(title, sections, picture).encode())
    return "\n".join([*result, *notes, f"report: {root / 'report.html'}"])


def _shorten(path: Path) -> Path:
    """A path as the user would write it: relative, if it is below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_folders(prepared: PreparedSwarm) -> dict[str, Any]:
    """Where each part writes its spans, in the order in which they are shown."""
    workers = [name for name in prepared.identities if name.startswith(("worker-", "cheat-"))]
    judges = [name for name in prepared.identities if name.startswith("validator-")]
    return {name: prepared.layout.folder(name) for name in ("trainer", "evaluator", "origin", *judges, *workers)}


def describe_learning(lines: Sequence[Mapping[str, Any]], tracks: Sequence[PartTrack], steps: int) -> ReportSection:
    """What was learned."""
    rows: list[Row] = [("held-out tasks that pass", "before", "after")]
    for metric, label in (("eval/pass_at_1", "sampled"), ("eval/greedy", "greedy")):
        _, values = pick_series([dict(line) for line in lines], metric)
        if values:
            rows.append((label, f"{values[0]:.3f}", f"{values[-1]:.3f}"))
    begin, end = find_period(tracks)
    tokens = sum(pick_series([dict(line) for line in lines], "train/generated_tokens")[1])
    ages = pick_series([dict(line) for line in lines], "off_policy/lag_max")[1]
    text = f"{tokens:,.0f} tokens trained in {format_time(end - begin)}"
    text += f"; no batch was older than {max(ages):.0f} versions." if ages else "."
    chart = [*draw_chart(lines, last_step=steps, width=76, height=15), f"     {describe_marks()}"]
    return ReportSection(title="Learning", text=text, rows=rows, chart="\n".join(chart), is_folded=False)


def describe_rollouts(layout: SwarmPaths) -> ReportSection:
    """What was generated and trained on."""
    steps = list_steps(layout.root / "rollouts")
    blocks = [
        f"step {step}\n\n" + show_groups(steps[step], num_groups=NUM_GROUPS, num_rollouts=NUM_ROLLOUTS)
        for step in sorted({min(steps), max(steps)} if steps else ())
    ]
    shown = "Groups of the first batch and of the last, as they were trained on; those that all or none solve are left"
    return ReportSection(title="Rollouts", text=f"{shown} out." if blocks else "None were kept.", blocks=blocks)


def describe_times(tracks: Sequence[PartTrack]) -> ReportSection:
    """Where the time of each part went."""
    begin, end = find_period(tracks)
    whole = max(end - begin, 1e-9)
    rows: list[Row] = [("part", "busy s", "waiting s", "busy share", "most of its time")]
    for track in tracks:
        share = f"{track.busy_s / whole:.0%}"
        rows.append((track.name, f"{track.busy_s:.1f}", f"{track.wait_s:.1f}", share, _find_most(track)))
    text = "Shares are of the time from the first span to the last."
    return ReportSection(title="Who was busy when", text=text, rows=rows)


def describe_costs(costs: Mapping[str, float]) -> ReportSection:
    """CPU time of each part, and the share of checking."""
    if not costs:
        return ReportSection(title="CPU", text="Not counted on this machine.")
    total = sum(costs.values())
    rows: list[Row] = [("part", "CPU s", "of all")]
    rows += [(name, f"{spent:.1f}", f"{spent / total:.0%}") for name, spent in costs.items()]
    text = "CPU time of each process and its children."
    return ReportSection(title="CPU", text=" ".join([text, *describe_checking(costs)]), rows=rows)


def describe_checking(costs: Mapping[str, float]) -> list[str]:
    """A sentence on what checking came to, where it was counted."""
    share = share_checking(costs)
    return [] if share is None else [f"Checking took {share:.0%} of the CPU that generation took."]


def describe_broadcasts(broadcasts: Sequence[Broadcast]) -> ReportSection:
    """How long versions took to arrive."""
    names = sorted({name for item in broadcasts for name in item.reached_s})
    rows: list[Row] = [("version", "origin has it after", *names)]
    for item in broadcasts:
        cells = [f"{item.reached_s[name]:.2f} s" if name in item.reached_s else "-" for name in names]
        rows.append((f"v{item.version}", f"{item.published_s:.2f} s", *cells))
    text = "Time from the start of publishing until each worker has the version; '-': it skipped to a newer one."
    return ReportSection(title="Broadcasts", text=text, rows=rows)


def describe_verdicts(evidence: RunEvidence, names: Mapping[str, str]) -> ReportSection:
    """How submissions ended, and what their owners earned."""
    states = [state for state in _STATES if any(counts[state] for counts in evidence.verdicts.values())]
    rows: list[Row] = [("owner of", *(state.replace("_", " ") for state in states), "credits", "standing")]
    for line in evidence.leaders:
        counts = evidence.verdicts.get(line.owner, Counter())
        cells = [str(counts[state]) for state in states]
        name = names.get(line.owner, line.owner[:16])
        # Standing grows by accepted work, so that of an owner without work says nothing, unless it is a penalty.
        standing = line.standing.value if counts or line.standing is not Standing.PROBATION else "-"
        rows.append((name, *cells, f"{line.earned / MICRO:.6f}", standing))
    return ReportSection(title="Verdicts and credit", rows=rows)


def describe_cases(evidence: RunEvidence, names: Mapping[str, str]) -> ReportSection:
    """Why work was rejected."""
    if not evidence.cases:
        return ReportSection(title="Evidence", text="Nobody was rejected.")
    blocks = [f"{names.get(owner, owner[:16])}\n{case}" for owner, case in evidence.cases.items()]
    text = "The worst case of each owner with a rejection, as printed by `shoal explain`."
    return ReportSection(title="Evidence", text=text, blocks=blocks)


def summarise(
    learning: ReportSection, evidence: RunEvidence, names: Mapping[str, str], checking: Sequence[str], root: Path
) -> list[str]:
    """The result of a run in a few lines."""
    gains = ", ".join(f"{row[0]} {row[1]} -> {row[2]}" for row in learning.rows[1:])
    banned = [line.owner for line in evidence.leaders if line.standing is Standing.BANNED]
    caught = ", ".join(names.get(owner, owner[:16]) for owner in banned)
    whys = [
        f"why {names.get(owner, owner[:16])}: shoal explain {root} {evidence.worst[owner]}"
        for owner in banned
        if owner in evidence.worst
    ]
    lines = [
        f"held-out tasks that pass: {gains or 'not evaluated'}",
        f"caught cheating: {caught or 'nobody'}",
        *whys,
        *(line[0].lower() + line[1:].rstrip(".") for line in checking),
        evidence.summary,
    ]
    return [clean_text(line) for line in lines]


def _find_most(track: PartTrack) -> str:
    """What a part did, or waited for, most of the time."""
    sums: dict[str, float] = {}
    for span in track.spans:
        if not span.lane:
            name = span.name if span.kind == "busy" else f"waiting: {span.name}"
            sums[name] = sums.get(name, 0.0) + span.end_s - span.start_s
    return max(sums, key=lambda name: sums[name]) if sums else "-"


def collect_evidence(ledger: Path) -> RunEvidence:
    """Verify a ledger that nobody writes to any more, and read what it says of its owners."""
    with open_reader(str(ledger)) as engine:
        report = verify_ledger(engine, projections=PROJECTIONS)
        with read_snapshot(engine) as connection:
            leaders = tuple(read_leaders(connection, MAX_OWNERS))
            verdicts = _count_states(connection)
            found = {owner: _find_worst(connection, owner, states) for owner, states in verdicts.items()}
            worst = {owner: submission for owner, submission in found.items() if submission}
            cases = {
                owner: explain_submission(connection, submission, now_ms=read_clock())
                for owner, submission in worst.items()
            }
    counts = (
        f"{report.num_events} events, {report.num_postings} postings, {count_things(report.num_heads, 'signed head')}"
    )
    return RunEvidence(
        holds=report.holds,
        summary=f"the ledger holds: {counts}" if report.holds else f"THE LEDGER DOES NOT HOLD: {report.problem}",
        leaders=leaders,
        verdicts=verdicts,
        worst=worst,
        cases=cases,
    )


def _count_states(connection: Connection) -> dict[str, Counter[str]]:
    verdicts: dict[str, Counter[str]] = {}
    for owner, state, count in connection.execute(_COUNTS):
        verdicts.setdefault(str(owner), Counter())[str(state)] += int(count)
    return verdicts


def _find_worst(connection: Connection, owner: str, states: Counter[str]) -> str:
    for state in _REJECTED:
        if states[state.value]:
            row = connection.execute(_WORST, {"owner": owner, "state": state.value}).one()
            return str(row[0])
    return ""


def format_text(title: str, sections: Sequence[ReportSection]) -> str:
    """The report as plain text."""
    parts = [title, "=" * len(title), ""]
    for section in sections:
        parts += [section.title, "-" * len(section.title), *section.lines]
        parts += [section.text] if section.text else []
        parts += _align_rows(section.rows)
        blocks = [*([section.chart] if section.chart else []), *section.blocks]
        parts += [line for block in blocks for line in ("", *block.splitlines())]
        parts.append("")
    return clean_text("\n".join(parts))


def format_page(title: str, sections: Sequence[ReportSection], picture: bytes) -> str:
    """The report as a page of HTML."""
    body = [f"<h1>{_escape(title)}</h1>"]
    shown = [_format_section(section, has_picture=bool(picture)) for section in sections]
    if picture:
        encoded = base64.b64encode(picture).decode()
        shown.insert(1, f'<img alt="curves, busy times, broadcasts" src="data:image/png;base64,{encoded}">')
    body += shown
    head = f'<meta charset="utf-8"><title>{_escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _format_section(section: ReportSection, *, has_picture: bool) -> str:
    parts = [f"<ul>{''.join(f'<li>{_escape(line)}</li>' for line in section.lines)}</ul>"] if section.lines else []
    parts += [f"<p>{_escape(section.text)}</p>"] if section.text else []
    parts += [_format_table(section.rows)] if section.rows else []
    parts += [f"<pre>{_escape(section.chart)}</pre>"] if section.chart and not has_picture else []
    parts += [f"<pre>{_escape(block)}</pre>" for block in section.blocks]
    title, content = _escape(section.title), "\n".join(parts)
    if section.is_folded:
        return f"<details><summary>{title}</summary>\n{content}\n</details>"
    return f"<h2>{title}</h2>\n{content}"


def _escape(text: str) -> str:
    return html.escape(clean_text(text))


def _format_table(rows: Sequence[Row]) -> str:
    def join(cells: Row, tag: str) -> str:
        return "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells)

    head, *others = rows
    lines = "\n".join(f"<tr>{join(row, 'td')}</tr>" for row in others)
    return f"<table>\n<tr>{join(head, 'th')}</tr>\n{lines}\n</table>"


def _align_rows(rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([row[0].ljust(widths[0]), *cells[1:]]) for row, cells in zip(rows, aligned, strict=True)]


def draw_picture(
    lines: Sequence[Mapping[str, Any]], tracks: Sequence[PartTrack], broadcasts: Sequence[Broadcast], title: str
) -> bytes:
    """A PNG file; matplotlib is needed."""
    rows = max(3.0, 0.28 * len(tracks) + 1.2)
    with draw_png(3, 1, figsize=(9, 6.0 + rows), dpi=110, height_ratios=(3, rows, 2.2)) as (axes, picture):
        _draw_curves(axes[0], lines, title)
        _draw_tracks(axes[1], tracks)
        _draw_broadcasts(axes[2], broadcasts)
    return picture.getvalue()


def _draw_curves(axes: Any, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    for metric, colour in _COLOURS.items():
        steps, values = pick_series([dict(line) for line in lines], metric)
        axes.plot(steps, values, color=colour, marker=".", linewidth=1.5, label=MARKS[metric][0])
    axes.set(title=title, xlabel="step", ylabel="pass rate, reward", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _draw_tracks(axes: Any, tracks: Sequence[PartTrack]) -> None:
    """One bar per part: dark where it computed, light where it waited."""
    begin, _ = find_period(tracks)

    def shift(intervals: Sequence[Interval]) -> list[Interval]:
        return [(start - begin, end - start) for start, end in intervals]

    for row, track in enumerate(tracks):
        axes.broken_barh(shift(track.wait), (row - 0.35, 0.7), color=_WAIT)
        axes.broken_barh(shift(track.busy), (row - 0.35, 0.7), color=_BUSY)
        publishing = [(span.start_s, span.end_s) for span in track.spans if span.lane and span.kind == "busy"]
        axes.broken_barh(shift(publishing), (row + 0.35, 0.12), color=_LANE)
    axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
    axes.invert_yaxis()
    axes.set(xlabel="seconds; dark: busy, light: waiting, thin: publishing at the same time", title="who was busy when")


def _draw_broadcasts(axes: Any, broadcasts: Sequence[Broadcast]) -> None:
    for name in sorted({name for item in broadcasts for name in item.reached_s}):
        points = [(item.version, item.reached_s[name]) for item in broadcasts if name in item.reached_s]
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1.0, label=name)
    axes.set(xlabel="version", ylabel="seconds", title="from publishing a version until a worker has it")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
