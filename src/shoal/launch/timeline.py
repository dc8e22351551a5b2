"""Where the time of a swarm went: the spans that its roles recorded, one track per part.

    busy    in which a role computed              wait    in which it waited and did nothing else

Both may overlap, for a role does several things at once: what counts as busy is the union of its busy spans, and
waiting is what is left of its waits. A span of a lane (the trainer's `publish`) is drawn, and no part of these shares.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BusySpan:
    """One line of a file of spans, in seconds since the epoch."""

    name: str
    kind: str
    start_s: float
    end_s: float
    lane: str = ""
    version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrack:
    """The spans of one part."""

    name: str
    spans: Sequence[BusySpan]
    busy: Sequence[Interval] = field(default_factory=list)
    wait: Sequence[Interval] = field(default_factory=list)

    @property
    def busy_s(self) -> float:
        return sum(end - start for start, end in self.busy)

    @property
    def wait_s(self) -> float:
        return sum(end - start for start, end in self.wait)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """How long a version took to arrive, from the start of its publishing, in seconds."""

    version: int
    published_s: float
    """until the origin served it"""
    reached_s: Mapping[str, float]
    """until each part had it"""


def read_tracks(folders: Mapping[str, Path]) -> list[PartTrack]:
    """The tracks of parts by the folders with their spans; parts that wrote none are left out."""
    tracks = []
    for name, folder in folders.items():
        spans = [span for span in _read_spans(folder / "spans.jsonl") if span.end_s >= span.start_s]
        if spans:
            own = [span for span in spans if not span.lane]
            busy = merge_intervals((span.start_s, span.end_s) for span in own if span.kind == "busy")
            wait = merge_intervals((span.start_s, span.end_s) for span in own if span.kind == "wait")
            tracks.append(PartTrack(name=name, spans=spans, busy=busy, wait=subtract_intervals(wait, busy)))
    return tracks


def find_broadcasts(tracks: Sequence[PartTrack]) -> list[Broadcast]:
    """When each version was where: from the origin's `publish` to the `have` of the others."""
    published = {
        span.version: span
        for track in tracks
        if track.name == "origin"
        for span in sorted(track.spans, key=lambda span: -span.start_s)  # the first of several counts
        if span.name == "publish"
    }
    reached: dict[int, dict[str, float]] = {version: {} for version in published}
    for track in tracks:
        for span in track.spans:
            if span.name == "have" and span.version in published:
                seconds = span.end_s - published[span.version].start_s
                reached[span.version].setdefault(track.name, max(0.0, seconds))
    sent = sorted(published.items())
    return [Broadcast(version, span.end_s - span.start_s, reached[version]) for version, span in sent]


def find_period(tracks: Sequence[PartTrack]) -> Interval:
    """From the first span to the last."""
    spans = [span for track in tracks for span in track.spans]
    if not spans:
        return 0.0, 0.0
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, in order, without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract_intervals(wholes: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of merged intervals without others, merged too."""
    left: list[Interval] = []
    for begin, end in wholes:
        start = begin
        for first, last in holes:
            if last <= start or first >= end:
                continue
            if first > start:
                left.append((start, first))
            start = last
        if start < end:
            left.append((start, end))
    return left


def _read_spans(path: Path) -> Iterator[BusySpan]:
    """Spans of a file; the last line may be half-written."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        try:
            found: Any = json.loads(line)
        except ValueError:
            continue  # a kill in the middle of a line, which the next start appended to
        start_s, end_s = found["start_ms"] / 1000, found["end_ms"] / 1000
        yield BusySpan(found["name"], found["kind"], start_s, end_s, found.get("lane", ""), found.get("version", -1))
