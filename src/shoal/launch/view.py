"""The view of a running swarm: a page that is redrawn, or a line now and then.

    SnapshotReader: coordinator's status + trainer's metrics + supervisor's parts -> SwarmSnapshot -> View

Invariants:
- all text goes through `clean_text` and none is markup: no name of a node controls the terminal;
- while the coordinator does not answer, its last status is shown, with a sentence that says so.
"""

import asyncio
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.errors import UnreachableError
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.supervisor import Supervisor
from shoal.ledger.event import MICRO
from shoal.net.client import GLANCE, HttpClient, parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.public_client import PublicClient
from shoal.protocol.messages import LeaderLine, Status
from shoal.train.report import pick_series, read_metrics
from shoal.util.console import format_time, is_live
from shoal.util.logs import clean_text, print_logs_with

logger = logging.getLogger(__name__)

METRICS, EVALS = "metrics.jsonl", "eval.jsonl"
"""where trainer and evaluator write (`shoal.trainer.evaluator`, which would bring torch with it)"""
START_S = 30.0
"""in which the coordinator's first answer is expected: until then its silence is no problem"""
_NO_RETRY = RetryPolicy(tries=1, first_s=0.1, longest_s=0.1)
_NODE = re.compile(r"\bnode ([0-9a-f]{8})\b")
_MAX_NEWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSnapshot:
    """The state of a swarm at one moment."""

    elapsed_s: float
    steps: int
    """of the whole run"""
    status: Status | None
    leaders: tuple[LeaderLine, ...]
    names: Mapping[str, str]
    """parts by the public keys of their nodes and owners"""
    lines: Sequence[Mapping[str, Any]]
    """metrics of training and evaluation, by step"""
    parts: Mapping[str, str]
    """how each process does"""
    news: tuple[str, ...]
    """what happened to processes last"""
    problem: str = ""
    """an alarm"""
    note: str = ""
    """what the whole swarm does now, if it neither runs nor has a problem"""

    def find_last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        return next((line[metric] for line in reversed(self.lines) if line.get(metric) is not None), None)

    def list_waits(self) -> list[str]:
        """Who waits for whom, as text, nodes by their names here."""
        waits = [name_nodes(wait.text, self.names) for wait in (self.status.waits if self.status else ())]
        return [self.note, *waits] if self.note else waits


class SnapshotReader:
    """Takes snapshots of a swarm."""

    def __init__(self, prepared: PreparedSwarm, supervisor: Supervisor) -> None:
        self._prepared, self._supervisor = prepared, supervisor
        place = parse_endpoint(prepared.url)
        self._client = PublicClient(place, link=HttpClient(place, GLANCE), asker=RetryingClient(_NO_RETRY))
        self._names = prepared.names
        self._begun = time.monotonic()
        self._status: Status | None = None
        self._leaders: tuple[LeaderLine, ...] = ()
        self._answered = self._begun

    async def read(self) -> SwarmSnapshot:
        """The state now."""
        problem = note = ""
        try:
            self._status = await self._client.read_status()
            self._leaders = (await self._client.read_leaders()).leaders
            self._answered = time.monotonic()
        except (UnreachableError, RefusedError) as error:
            silent_s = time.monotonic() - self._answered
            if self._status is None and silent_s < START_S:
                note = "the coordinator is starting"
            else:
                problem = f"the coordinator has not answered for {silent_s:.0f} s, all wait for it: {error}"
        if self._supervisor.is_stopping:
            problem, note = "", "stopping all processes in order, the coordinator last"
        now = time.monotonic()
        return SwarmSnapshot(
            elapsed_s=now - self._begun,
            steps=self._prepared.config.steps,
            status=self._status,
            leaders=self._leaders,
            names=self._names,
            lines=read_lines(self._prepared.layout.root),
            parts={name: state.describe(now) for name, state in self._supervisor.states.items()},
            news=tuple(self._supervisor.events)[-_MAX_NEWS:],
            problem=problem,
            note=note,
        )

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def read_lines(root: Path) -> list[dict[str, Any]]:
    """Metrics of training and evaluation together, by step; none before there are any."""
    lines = [*_read_file(root / METRICS), *_read_file(root / EVALS)]
    return sorted(lines, key=lambda line: int(line["step"]))


def read_steps(path: Path) -> set[int]:
    """The steps in a file of metrics."""
    return {int(line["step"]) for line in _read_file(path)}


def _read_file(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path) if path.exists() else []


def name_nodes(text: str, names: Mapping[str, str]) -> str:
    """A sentence of the coordinator's with the names of parts in place of the beginnings of keys."""
    short = {key[:8]: name for key, name in names.items()}
    return _NODE.sub(lambda match: short.get(match[1], match[0]), text)


MARKS = {"reward/mean": ("training reward", "."), "eval/greedy": ("held-out, greedy", "+")}
MARKS["eval/pass_at_1"] = "held-out, sampled", "o"
"""metrics that are drawn, each with its name and its mark; later ones over earlier ones"""
_AXIS = 5
"""columns left of the chart"""


def draw_chart(lines: Sequence[Mapping[str, object]], *, last_step: int, width: int, height: int) -> list[str]:
    """Lines of text, `width` columns wide; values from 0 to 1 over steps from 0 to `last_step`."""
    columns, rows = max(8, width - _AXIS), max(3, height - 2)
    grid = [[" "] * columns for _ in range(rows)]
    for metric, (_, mark) in MARKS.items():
        for step, value in zip(*pick_series([dict(line) for line in lines], metric), strict=True):
            column = round(min(max(step / max(1, last_step), 0.0), 1.0) * (columns - 1))
            row = round(min(max(value, 0.0), 1.0) * (rows - 1))
            grid[rows - 1 - row][column] = mark
    labels = {0: " 1.0", rows - 1: " 0.0", (rows - 1) // 2: " 0.5"} if rows % 2 else {0: " 1.0", rows - 1: " 0.0"}
    drawn = [f"{labels.get(number, ''):<{_AXIS - 1}}|{''.join(row)}" for number, row in enumerate(grid)]
    steps = f"step 0{f'step {last_step}':>{columns - 6}}"
    return [*(line.rstrip() for line in drawn), f"{' ' * (_AXIS - 1)}+{'-' * columns}", f"{' ' * _AXIS}{steps}"]


def describe_marks() -> str:
    """What the marks mean."""
    return "   ".join(f"{mark} {name}" for name, mark in MARKS.values())


REDRAW_S, PLAIN_S = 1.0, 5.0
_CHART_ROWS, _MIN_CHART_ROWS, _MAX_WAITS = 13, 5, 7
_MAX_NAME = 16
_KEY_CHARS = 8
"""shown of a key, as in `shoal status`"""
_LIST_ROWS, _MIN_WAITS = 2, 3
"""rows of a list in addition to its lines; lines of one that the chart leaves room for"""
_STYLES = {"banned": "bold red", "limited": "yellow", "good": "green", "trusted": "green"}
_MARK_STYLES = {".": "dim", "+": "yellow", "o": "bold cyan"}


class View:
    """Shows a swarm on a stream until it is cancelled."""

    def __init__(self, reader: SnapshotReader, stream: TextIO | None = None) -> None:
        self._reader, self._stream = reader, stream or sys.stdout
        self._is_live = is_live(self._stream)

    async def run(self) -> None:
        """Draw until cancelled."""
        while not self._is_live:
            logger.info(describe_line(await self._reader.read()))
            await asyncio.sleep(PLAIN_S)
        console = Console(file=self._stream, highlight=False)
        live = Live(console=console, auto_refresh=False, transient=True)
        with print_logs_with(lambda line: None), live:  # the page has the news
            while True:
                page = draw_page(await self._reader.read(), console.width, console.height)
                live.update(page, refresh=True)
                await asyncio.sleep(REDRAW_S)


def describe_line(snapshot: SwarmSnapshot) -> str:
    """The swarm in one line."""
    parts = [format_time(snapshot.elapsed_s), _describe_step(snapshot), *_list_figures(snapshot)]
    if snapshot.status is not None:
        parts.append(f"{snapshot.status.queue} awaiting validation")
    workers = filter(_has_worked, snapshot.leaders)
    parts += [f"{_name_owner(snapshot, line)} {_count_verdicts(line)}" for line in workers]
    waits = snapshot.list_waits()
    parts += [snapshot.problem] if snapshot.problem else waits[:1]
    return "  ".join(clean_text(part) for part in parts)


def draw_page(snapshot: SwarmSnapshot, width: int, height: int) -> RenderableType:
    """The swarm on one page that fits: what is wrong and who waits go before the chart, and the chart before news."""
    waits = snapshot.list_waits()[:_MAX_WAITS]
    alarms = [*([snapshot.problem] if snapshot.problem else []), *(snapshot.status.alarms if snapshot.status else ())]
    alarms, news = alarms[:_MAX_WAITS], list(snapshot.news)
    head = _draw_head(snapshot)
    others = _count_rows(head, width) + 1 + _LIST_ROWS * bool(alarms) + len(alarms)
    is_short = height - 1 < others + len(snapshot.parts) + 2 + _LIST_ROWS + len(waits) + _MIN_CHART_ROWS + 2
    table = _draw_parts(snapshot, is_short=is_short)
    left = height - 1 - others - table.row_count - 2  # one row is the cursor's
    chart_rows = min(_CHART_ROWS, left - _LIST_ROWS - min(len(waits), _MIN_WAITS) - 2)
    blocks: list[RenderableType] = [head, Text()]
    if chart_rows >= _MIN_CHART_ROWS:
        chart = draw_chart(snapshot.lines, last_step=snapshot.steps, width=min(width - 2, 76), height=chart_rows)
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


def _draw_head(snapshot: SwarmSnapshot) -> Text:
    """Two lines of at most 80 columns: how far it is, and how well it does."""
    parts = ["shoal", format_time(snapshot.elapsed_s), _describe_step(snapshot)]
    if (status := snapshot.status) is not None:
        absent = status.nodes_stale + status.nodes_gone
        parts += [f"{status.nodes_live} nodes live, {absent} not", f"{status.queue} awaiting validation"]
    head = Text("  ".join(parts), style="bold")
    head.append(f"\n{'  '.join(_list_figures(snapshot))}", style="not bold")
    return head


def _describe_step(snapshot: SwarmSnapshot) -> str:
    status = snapshot.status
    if status is None:
        return "starting"
    version = f"v{status.newest_version}" if status.newest_version >= 0 else "no version yet"
    return f"step {status.trained}/{status.steps}  {version}"


def _list_figures(snapshot: SwarmSnapshot) -> list[str]:
    """The newest rewards and pass rates, and the age of the last batch: versions between writing and training."""
    names = {"reward/mean": "reward", "eval/pass_at_1": "held-out", "eval/greedy": "greedy"}
    found = {name: snapshot.find_last(metric) for metric, name in names.items()}
    mean, most = snapshot.find_last("off_policy/lag"), snapshot.find_last("off_policy/lag_max")
    age = [] if mean is None or most is None else [f"age {mean:.1f}, at most {most:.0f}"]
    return [f"{name} {value:.3f}" for name, value in found.items() if value is not None] + age


def _colour_chart(lines: Sequence[str]) -> Text:
    """Lines of `draw_chart` with their marks in colours; the labels and the last two lines have none."""
    marks = [[(char, _MARK_STYLES.get(char, "")) for char in line[_AXIS:]] for line in lines[:-2]]
    drawn = [Text.assemble(line[:_AXIS], *row) for line, row in zip(lines, marks, strict=False)]
    return Text("\n", no_wrap=True).join([*drawn, *map(Text, lines[-2:])])


def _draw_parts(snapshot: SwarmSnapshot, *, is_short: bool = False) -> Table:
    """A row for each process, with what the ledger says of its owner. A short page has one for all that simply run."""
    table = Table(box=None, pad_edge=False)
    table.add_column("part", no_wrap=True, min_width=min(_MAX_NAME, max(map(len, snapshot.parts), default=0)))
    table.add_column("owner", no_wrap=True, min_width=_KEY_CHARS)
    table.add_column("standing", no_wrap=True, min_width=len("probation"))
    for name in ("accepted", "rejected", "credit"):
        table.add_column(name, no_wrap=True, min_width=len(name), justify="right")
    table.add_column("process", no_wrap=True)
    owners = {_name_owner(snapshot, line): line for line in snapshot.leaders}
    busy = {name for name, line in owners.items() if _has_worked(line)}
    # A process that simply runs is not worth a row of a short page.
    calm = {name for name, state in snapshot.parts.items() if state.startswith("runs") and "started" not in state}
    folded = calm - busy if is_short else set()
    for name, state in snapshot.parts.items():
        if name in folded:
            continue
        line = owners.get(name)
        cells = [""] * 5
        if line is not None:
            counts = str(line.accepted), str(line.rejected), f"{line.earned / MICRO:.3f}"
            cells = [line.owner[:_KEY_CHARS], line.shown_standing, *counts]
        row = [Text(clean_text(cell)) for cell in (name, *cells, state)]
        row[2].stylize(_STYLES.get(cells[1], ""))
        table.add_row(*row)
    if folded:
        num = "run" if len(folded) > 1 else "runs"
        table.add_row(*(Text(cell) for cell in (f"{len(folded)} more", "", "", "", "", "", num)))
    return table


def _count_rows(text: Text, width: int) -> int:
    return sum(max(1, -(-len(line) // max(1, width))) for line in text.plain.split("\n"))


def _draw_list(title: str, texts: Sequence[str], width: int, style: str = "") -> list[RenderableType]:
    if not texts:
        return []
    shown = [Text(f"  {clean_text(text)}"[: width - 1].replace("\n", " "), style=style) for text in texts]
    return [Text(title, style="bold"), *shown, Text()]


def _name_owner(snapshot: SwarmSnapshot, line: LeaderLine) -> str:
    return snapshot.names.get(line.owner, line.owner[:_KEY_CHARS])


def _has_worked(line: LeaderLine) -> bool:
    return bool(line.accepted or line.rejected)


def _count_verdicts(line: LeaderLine) -> str:
    rejected = f"-{line.rejected}" if line.rejected else ""
    standing = f" {line.standing.value}" if line.standing.value in ("banned", "limited") else ""
    return f"+{line.accepted}{rejected}{standing}"
