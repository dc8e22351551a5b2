"""What a person sees of a swarm while it runs: a page that is drawn again and again, or a line now and then.

All text goes through `clean_text` and none is markup: whatever a node calls itself, the terminal obeys none of it.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.console import clean_text, format_time, is_live
from shoal.disk import spare_words
from shoal.launch.curve import describe_marks, draw_chart
from shoal.launch.glance import Glance, Watch
from shoal.swarm.messages import LeaderLine
from shoal.swarm.postings import MICRO

REDRAW_S, PLAIN_S = 1.0, 5.0
_CHART_ROWS, _LEAST_ROWS, _MAX_WAITS = 13, 5, 7
_MAX_NAME = 16
_LIST_ROWS, _FEW = 2, 3
"""rows of a list beside its lines; lines of one that the chart leaves room for"""
_STYLES = {"banned": "bold red", "limited": "yellow", "good": "green", "trusted": "green"}
_MARK_STYLES = {".": "dim", "+": "yellow", "o": "bold cyan"}


class View:
    """Shows a swarm on a stream until it is cancelled."""

    def __init__(self, watch: Watch, stream: TextIO | None = None) -> None:
        self._watch, self._stream = watch, stream or sys.stdout
        self._is_live = is_live(self._stream)

    async def run(self) -> None:
        """Draw for ever."""
        if not self._is_live:
            return await self._print_lines()
        console = Console(file=self._stream, highlight=False)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                page = draw_page(await self._watch.look(), console.width, console.height)
                live.update(page, refresh=True)
                await asyncio.sleep(REDRAW_S)

    def note(self, text: str) -> None:
        """Say something that stays; on a live page the news say it."""
        if not self._is_live:
            self._write(text)

    async def _print_lines(self) -> None:
        while True:
            self._write(describe_line(await self._watch.look()))
            await asyncio.sleep(PLAIN_S)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        with spare_words():  # of a log on a full disk: it costs the words, and not the swarm
            self._stream.write(f"{clean_text(text)}\n".encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def describe_line(glance: Glance) -> str:
    """The swarm in one line."""
    parts = [format_time(glance.elapsed_s), _describe_step(glance)]
    parts += _list_figures(glance)
    if (age := _describe_age(glance)) is not None:
        parts.append(age)
    if glance.status is not None:
        parts.append(f"{glance.status.queue} to judge")
    parts += [f"{_name_owner(glance, line)} {_count_verdicts(line)}" for line in glance.leaders if _has_worked(line)]
    waits = glance.list_waits()
    parts += [glance.problem] if glance.problem else waits[:1]
    return "  ".join(clean_text(part) for part in parts)


def draw_page(glance: Glance, width: int, height: int) -> RenderableType:
    """The swarm on one page that fits: what is wrong and who waits go before the chart, and the chart before news."""
    waits = glance.list_waits()[:_MAX_WAITS]
    alarms = [*([glance.problem] if glance.problem else []), *(glance.status.alarms if glance.status else ())]
    alarms, news = alarms[:_MAX_WAITS], list(glance.news)
    head = _draw_head(glance)
    others = _count_rows(head, width) + 1 + _LIST_ROWS * bool(alarms) + len(alarms)
    is_low = height - 1 < others + len(glance.parts) + 2 + _LIST_ROWS + len(waits) + _LEAST_ROWS + 2
    table = _draw_parts(glance, is_low=is_low)
    left = height - 1 - others - table.row_count - 2  # one row is the cursor's
    chart_rows = min(_CHART_ROWS, left - _LIST_ROWS - min(len(waits), _FEW) - 2)
    blocks: list[RenderableType] = [head, Text()]
    if chart_rows >= _LEAST_ROWS:
        chart = draw_chart(glance.lines, last_step=glance.steps, width=min(width - 2, 76), height=chart_rows)
        marks = Text(f"     {describe_marks()}"[: width - 1], style="dim")
        blocks += [_colour_chart(chart), marks, Text()]
        left -= chart_rows + 2
    blocks += [table, Text()]
    blocks += _draw_list("alarms", alarms, width, style="bold red")
    waits = waits[: max(0, left - _LIST_ROWS)]
    blocks += _draw_list("who waits for whom", waits, width)
    left -= (_LIST_ROWS + len(waits)) * bool(waits)
    blocks += _draw_list("news", news[len(news) - max(0, min(len(news), left - _LIST_ROWS)) :], width)
    return Group(*blocks)


def _draw_head(glance: Glance) -> Text:
    """Two lines: how far it is, and how it goes."""
    head = Text("  ".join(["shoal", format_time(glance.elapsed_s), _describe_step(glance)]), style="bold")
    parts = _list_figures(glance)
    if (age := _describe_age(glance)) is not None:
        parts.append(age)
    if (status := glance.status) is not None:
        absent = status.nodes_stale + status.nodes_gone
        parts += [f"{status.nodes_live} nodes live, {absent} not", f"{status.queue} to judge"]
    head.append(f"\n{'  '.join(parts)}", style="not bold")
    return head


def _describe_step(glance: Glance) -> str:
    status = glance.status
    if status is None:
        return "starting"
    version = f"v{status.newest_version}" if status.newest_version >= 0 else "no version yet"
    return f"step {status.trained}/{status.steps}  {version}"


def _list_figures(glance: Glance) -> list[str]:
    """The newest rewards and pass rates."""
    names = {"reward/mean": "reward", "eval/pass_at_1": "held-out", "eval/greedy": "greedy"}
    found = {name: glance.find_last(metric) for metric, name in names.items()}
    return [f"{name} {value:.3f}" for name, value in found.items() if value is not None]


def _describe_age(glance: Glance) -> str | None:
    """How old the last batch was: versions between the one that wrote it and the one that was trained."""
    mean, most = glance.find_last("off_policy/lag"), glance.find_last("off_policy/lag_max")
    return None if mean is None or most is None else f"age {mean:.1f}, at most {most:.0f}"


def _colour_chart(lines: Sequence[str]) -> Text:
    text = Text(no_wrap=True)
    for number, line in enumerate(lines):
        is_drawing = number < len(lines) - 2
        for position, char in enumerate(line):
            text.append(char, style=_MARK_STYLES.get(char, "") if is_drawing and position > 4 else "")
        text.append("\n" if number < len(lines) - 1 else "")
    return text


def _draw_parts(glance: Glance, *, is_low: bool = False) -> Table:
    """A row for each process, with what the ledger says of its owner. A low page has one for all that simply run."""
    table = Table("part", "standing", "accepted", "rejected", "credit", "process", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:5]:
        column.min_width = len(str(column.header))
    table.columns[0].min_width = min(_MAX_NAME, max(map(len, glance.parts), default=0))
    for column in table.columns[2:5]:
        column.justify = "right"
    owners = {_name_owner(glance, line): line for line in glance.leaders}
    busy = {name for name, line in owners.items() if _has_worked(line)}
    folded = [name for name, state in glance.parts.items() if is_low and name not in busy and _runs_well(state)]
    for name, state in glance.parts.items():
        if name in folded:
            continue
        line = owners.get(name)
        cells = ["", "", "", ""]
        if line is not None:
            cells = [line.standing.value, str(line.accepted), str(line.rejected), f"{line.earned / MICRO:.3f}"]
        row = [Text(clean_text(cell)) for cell in (name, *cells, state)]
        row[1].stylize(_STYLES.get(cells[0], ""))
        table.add_row(*row)
    if folded:
        table.add_row(*(Text(cell) for cell in (f"{len(folded)} others", "", "", "", "", "run")))
    return table


def _runs_well(state: str) -> bool:
    """Whether a process simply runs: nothing about it is worth a row of a low page."""
    return state.startswith("runs") and "started" not in state


def _count_rows(text: Text, width: int) -> int:
    return sum(max(1, -(-len(line) // max(1, width))) for line in text.plain.split("\n"))


def _draw_list(title: str, texts: Sequence[str], width: int, style: str = "") -> list[RenderableType]:
    if not texts:
        return []
    shown = [Text(f"  {clean_text(text)}"[: width - 1].replace("\n", " "), style=style) for text in texts]
    return [Text(title, style="bold"), *shown, Text()]


def _name_owner(glance: Glance, line: LeaderLine) -> str:
    return glance.names.get(line.owner, line.owner[:8])


def _has_worked(line: LeaderLine) -> bool:
    return bool(line.accepted or line.rejected)


def _count_verdicts(line: LeaderLine) -> str:
    rejected = f"-{line.rejected}" if line.rejected else ""
    standing = f" {line.standing.value}" if line.standing.value in ("banned", "limited") else ""
    return f"+{line.accepted}{rejected}{standing}"
