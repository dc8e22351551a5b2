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
_OTHER_ROWS = 16
"""rows of the page beside chart and parts, in the ordinary course"""
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
    """The swarm on one page; on a low terminal the chart is low."""
    blocks: list[RenderableType] = [_draw_head(glance), Text()]
    rows = min(_CHART_ROWS, max(_LEAST_ROWS, height - len(glance.parts) - _OTHER_ROWS))
    chart = draw_chart(glance.lines, last_step=glance.steps, width=min(width - 2, 76), height=rows)
    blocks += [_colour_chart(chart), Text(f"     {describe_marks()}", style="dim"), Text()]
    blocks += [_draw_parts(glance), Text()]
    blocks += _draw_list("who waits for whom", glance.list_waits()[:_MAX_WAITS], width)
    alarms = [*([glance.problem] if glance.problem else []), *(glance.status.alarms if glance.status else ())]
    blocks += _draw_list("alarms", alarms[:_MAX_WAITS], width, style="bold red")
    blocks += _draw_list("news", glance.news, width)
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


def _draw_parts(glance: Glance) -> Table:
    """A row for each process, with what the ledger says of its owner."""
    table = Table("part", "standing", "accepted", "rejected", "credit", "process", box=None, pad_edge=False)
    for column in table.columns[2:5]:
        column.justify = "right"
    owners = {_name_owner(glance, line): line for line in glance.leaders}
    for name, state in glance.parts.items():
        line = owners.get(name)
        cells = ["", "", "", ""]
        if line is not None:
            cells = [line.standing.value, str(line.accepted), str(line.rejected), f"{line.earned / MICRO:.3f}"]
        row = [Text(clean_text(cell)) for cell in (name, *cells, state)]
        row[1].stylize(_STYLES.get(cells[0], ""))
        table.add_row(*row)
    return table


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
