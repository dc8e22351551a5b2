"""One look at a swarm: what its coordinator says, what its trainer wrote down, how its processes do.

A coordinator that does not answer leaves its last word standing, and a sentence that says so.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.launch.prepare import Prepared
from shoal.launch.supervise import Supervisor
from shoal.report import read_metrics
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.link import GLANCE, Link, parse_place
from shoal.swarm.messages import LeaderLine, Status
from shoal.swarm.open_client import OpenClient

METRICS, EVALS = "metrics.jsonl", "eval.jsonl"
"""where trainer and evaluator write (`shoal.trainer.evals`, which would bring torch with it)"""
_ONCE = Patience(tries=1, first_s=0.1, longest_s=0.1)
_NODE = re.compile(r"\bnode ([0-9a-f]{8})\b")
_MAX_NEWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """How things stand."""

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

    def find_last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        return next((line[metric] for line in reversed(self.lines) if line.get(metric) is not None), None)

    def list_waits(self) -> list[str]:
        """Who waits for whom, in words, nodes by their names here."""
        if self.status is None:
            return []
        return [name_nodes(wait.text, self.names) for wait in self.status.waits]


class Watch:
    """Takes looks."""

    def __init__(self, prepared: Prepared, supervisor: Supervisor) -> None:
        self._prepared, self._supervisor = prepared, supervisor
        place = parse_place(prepared.url)
        self._client = OpenClient(place, link=Link(place, GLANCE), asker=Asker(_ONCE))
        self._names = prepared.names
        self._begun = time.monotonic()
        self._status: Status | None = None
        self._leaders: tuple[LeaderLine, ...] = ()
        self._heard = self._begun

    async def look(self) -> Glance:
        """How things stand now."""
        problem = ""
        try:
            self._status = await self._client.read_status()
            self._leaders = (await self._client.read_leaders()).leaders
            self._heard = time.monotonic()
        except (UnreachableError, RefusedError) as error:
            silent_s = time.monotonic() - self._heard
            problem = f"the coordinator does not answer for {silent_s:.0f} s, all wait for it: {error}"
        if self._supervisor.is_stopping:
            problem = "all parts are being stopped, the coordinator last"
        now = time.monotonic()
        events = list(self._supervisor.events)[-_MAX_NEWS:]
        return Glance(
            elapsed_s=now - self._begun,
            steps=self._prepared.config.steps,
            status=self._status,
            leaders=self._leaders,
            names=self._names,
            lines=read_lines(self._prepared.layout.root),
            parts={name: state.describe(now) for name, state in self._supervisor.states.items()},
            news=tuple(f"{event.part} {event.text}" for event in events),
            problem=problem,
        )

    def close(self) -> None:
        """No more looks."""
        self._client.close()


def read_lines(root: Path) -> list[dict[str, Any]]:
    """Metrics of training and evaluation together, by step; none before there are any."""
    lines = [*_read_file(root / METRICS), *_read_file(root / EVALS)]
    return sorted(lines, key=lambda line: int(line["step"]))


def read_steps(path: Path) -> set[int]:
    """The steps that a file of metrics speaks of."""
    return {int(line["step"]) for line in _read_file(path)}


def _read_file(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path) if path.exists() else []


def name_nodes(text: str, names: Mapping[str, str]) -> str:
    """A sentence of the coordinator's with the names of parts in the place of the beginnings of keys."""
    short = {key[:8]: name for key, name in names.items()}
    return _NODE.sub(lambda match: short.get(match[1], match[0]), text)
