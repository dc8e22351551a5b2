"""The report of a swarm that came to its end: report.txt for everybody, report.html and report.png to look at.

The page is one file that loads nothing from anywhere. What strangers wrote stands in it as text and nothing else.
Without matplotlib there is no picture, and the page has the chart of the text.
"""

import base64
import html
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.console import clean_text, format_time
from shoal.files import write_atomic
from shoal.launch.curve import describe_marks, draw_chart
from shoal.launch.evidence import Evidence, collect_evidence
from shoal.launch.glance import read_lines
from shoal.launch.layout import Layout
from shoal.launch.meter import read_costs, share_checking
from shoal.launch.prepare import Prepared
from shoal.launch.rollouts import show_rollouts
from shoal.launch.timeline import Broadcast, Track, find_broadcasts, find_period, read_tracks
from shoal.report import pick_series
from shoal.swarm.postings import MICRO

_STATES = ("accepted", "rejected_hard", "rejected_soft", "rejected_form", "inconclusive", "superseded", "void")
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.15em .9em .15em 0;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #999;font-weight:600}
pre{background:#f5f5f5;padding:.8em;overflow-x:auto;font-size:13px}img{max-width:100%}h2{margin-top:1.6em}"""

Row = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a sentence, a table, and texts to be shown as they are; each may be empty."""

    title: str
    text: str = ""
    rows: Sequence[Row] = ()
    """the first one is the head"""
    blocks: Sequence[str] = ()


def write_report(prepared: Prepared) -> str:
    """Write the report of a swarm that stands still; what it comes to, in a few lines."""
    layout, config = prepared.layout, prepared.config
    lines = read_lines(layout.root)
    tracks = read_tracks(find_folders(prepared))
    broadcasts = find_broadcasts(tracks)
    evidence, costs = collect_evidence(layout.ledger), read_costs(layout.costs)
    title = f"{config.run}: {config.steps} steps, async level {config.async_level}"
    sections = [
        describe_learning(lines, tracks, config.steps),
        describe_rollouts(layout),
        describe_times(tracks),
        describe_costs(costs),
        describe_broadcasts(broadcasts),
        describe_verdicts(evidence, prepared.names),
        describe_cases(evidence, prepared.names),
        Section(
            title="The ledger", text=f"{evidence.summary}. Check it again: shoal ledger verify {layout.coordinator}"
        ),
    ]
    picture = b""
    if importlib.util.find_spec("matplotlib") is not None:
        from shoal.launch.picture import draw_picture

        picture = draw_picture(lines, tracks, broadcasts, title)
        write_atomic(layout.root / "report.png", picture)
    write_atomic(layout.root / "report.txt", format_text(title, sections).encode())
    write_atomic(layout.root / "report.html", format_page(title, sections, picture).encode())
    return summarise(sections[0], evidence, prepared.names, layout, describe_checking(costs))


def find_folders(prepared: Prepared) -> dict[str, Any]:
    """Where each part writes its spans, in the order in which they are shown."""
    layout = prepared.layout
    workers = [name for name in prepared.identities if name.startswith(("worker-", "cheat-"))]
    judges = [name for name in prepared.identities if name.startswith("validator-")]
    names = ["trainer", "evaluator", "origin", *judges, *workers]
    return {name: layout.folder(name) for name in names}


def describe_learning(lines: Sequence[Mapping[str, Any]], tracks: Sequence[Track], steps: int) -> Section:
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
    return Section(title="Learning", text=text, rows=rows, blocks=("\n".join(chart),))


def describe_rollouts(layout: Layout) -> Section:
    """What was written and trained on."""
    blocks = show_rollouts(layout.root / "rollouts", layout.start)
    text = "Groups of the first batch and of the last, as they were trained on; those that all or none solve are not."
    return Section(title="Rollouts", text=text if blocks else "None were kept.", blocks=blocks)


def describe_times(tracks: Sequence[Track]) -> Section:
    """Where everybody's time went."""
    begin, end = find_period(tracks)
    whole = max(end - begin, 1e-9)
    rows: list[Row] = [("part", "busy s", "waiting s", "busy share", "most of its time")]
    for track in tracks:
        share = f"{track.busy_s / whole:.0%}"
        rows.append((track.name, f"{track.busy_s:.1f}", f"{track.wait_s:.1f}", share, _find_most(track)))
    return Section(title="Who was busy when", text="Shares are of the time from the first span to the last.", rows=rows)


def describe_costs(costs: Mapping[str, float]) -> Section:
    """What everybody took, and what of that was checking."""
    if not costs:
        return Section(title="CPU", text="Not counted on this machine.")
    total = sum(costs.values())
    rows: list[Row] = [("part", "CPU s", "of all")]
    rows += [(name, f"{spent:.1f}", f"{spent / total:.0%}") for name, spent in costs.items()]
    told = "Of each process and all that it started, from its start to its end."
    return Section(title="CPU", text=" ".join([told, *describe_checking(costs)]), rows=rows)


def describe_checking(costs: Mapping[str, float]) -> list[str]:
    """A sentence on what checking came to, where it was counted."""
    share = share_checking(costs)
    return [] if share is None else [f"Checking took {share:.0%} of the CPU that generation took."]


def describe_broadcasts(broadcasts: Sequence[Broadcast]) -> Section:
    """How long versions were under way."""
    names = sorted({name for item in broadcasts for name in item.reached_s})
    rows: list[Row] = [("version", "origin has it after", *names)]
    for item in broadcasts:
        cells = [f"{item.reached_s[name]:.2f} s" if name in item.reached_s else "-" for name in names]
        rows.append((f"v{item.version}", f"{item.published_s:.2f} s", *cells))
    text = "From the beginning of publishing until each worker has it; '-': it went from one to a newer one."
    return Section(title="Broadcasts", text=text, rows=rows)


def describe_verdicts(evidence: Evidence, names: Mapping[str, str]) -> Section:
    """How submissions ended, and what it brought their owners."""
    states = [state for state in _STATES if any(counts[state] for counts in evidence.verdicts.values())]
    rows: list[Row] = [("owner of", *(state.replace("_", " ") for state in states), "credits", "standing")]
    for line in evidence.leaders:
        counts = evidence.verdicts.get(line.owner, Counter())
        cells = [str(counts[state]) for state in states]
        name = names.get(line.owner, line.owner[:16])
        rows.append((name, *cells, f"{line.earned / MICRO:.6f}", line.standing.value))
    return Section(title="Verdicts and credit", rows=rows)


def describe_cases(evidence: Evidence, names: Mapping[str, str]) -> Section:
    """Why somebody was rejected."""
    if not evidence.cases:
        return Section(title="Evidence", text="Nobody was rejected.")
    blocks = [f"{names.get(owner, owner[:16])}\n{story}" for owner, story in evidence.cases.items()]
    return Section(
        title="Evidence", text="Of each that was rejected the gravest case, as `explain` tells it.", blocks=blocks
    )


def summarise(
    learning: Section, evidence: Evidence, names: Mapping[str, str], layout: Layout, checking: Sequence[str]
) -> str:
    """The end of a run for the screen."""
    gains = ", ".join(f"{row[0]} {row[1]} -> {row[2]}" for row in learning.rows[1:])
    banned = [names.get(line.owner, line.owner[:16]) for line in evidence.leaders if line.standing.value == "banned"]
    lines = [
        f"held-out tasks that pass: {gains or 'not evaluated'}",
        f"caught cheating: {', '.join(banned) or 'nobody'}",
        *(line[0].lower() + line[1:].rstrip(".") for line in checking),
        evidence.summary,
        f"report: {layout.root / 'report.html'}",
    ]
    return "\n".join(clean_text(line) for line in lines)


def format_text(title: str, sections: Sequence[Section]) -> str:
    """The report as plain text."""
    parts = [title, "=" * len(title), ""]
    for section in sections:
        parts += [section.title, "-" * len(section.title)]
        parts += [section.text] if section.text else []
        parts += _align_rows(section.rows)
        parts += [line for block in section.blocks for line in ("", *block.splitlines())]
        parts.append("")
    return clean_text("\n".join(parts))


def format_page(title: str, sections: Sequence[Section], picture: bytes) -> str:
    """The report as a page of HTML."""
    body = [f"<h1>{_escape(title)}</h1>"]
    if picture:
        encoded = base64.b64encode(picture).decode()
        body.append(f'<img alt="curves, busy times, broadcasts" src="data:image/png;base64,{encoded}">')
    for section in sections:
        body.append(f"<h2>{_escape(section.title)}</h2>")
        body += [f"<p>{_escape(section.text)}</p>"] if section.text else []
        body += [_format_table(section.rows)] if section.rows else []
        body += [f"<pre>{_escape(block)}</pre>" for block in section.blocks]
    head = f'<meta charset="utf-8"><title>{_escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _escape(text: str) -> str:
    return html.escape(clean_text(text))


def _format_table(rows: Sequence[Row]) -> str:
    def join(cells: Row, tag: str) -> str:
        return "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells)

    head, *others = rows
    lines = "\n".join(f"<tr>{join(row, 'td')}</tr>" for row in others)
    return f"<table>\n<tr>{join(head, 'th')}</tr>\n{lines}\n</table>"


def _align_rows(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if not column else f"{cell:>{width}}" for column, (cell, width) in enumerate(cells)
        )
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def _find_most(track: Track) -> str:
    """What a part did, or waited for, most of the time."""
    sums: dict[str, float] = {}
    for span in track.spans:
        if not span.lane:
            name = span.name if span.kind == "busy" else f"waiting: {span.name}"
            sums[name] = sums.get(name, 0.0) + span.end_s - span.start_s
    return max(sums, key=lambda name: sums[name]) if sums else "-"
