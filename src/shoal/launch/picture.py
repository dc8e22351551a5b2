"""The picture of a swarm's report: what was learned, who was busy when, how long versions were under way."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.launch.timeline import Broadcast, Interval, Track, find_period
from shoal.report import pick_series

_CURVES = {
    "reward/mean": ("reward of what was trained", "0.6"),
    "eval/greedy": ("held-out, greedy", "C1"),
    "eval/pass_at_1": ("held-out, sampled", "C0"),
}
_BUSY, _WAIT, _LANE = "C0", "0.85", "C2"


def draw_picture(
    lines: Sequence[Mapping[str, Any]], tracks: Sequence[Track], broadcasts: Sequence[Broadcast], title: str
) -> bytes:
    """A PNG file; matplotlib is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = max(3.0, 0.28 * len(tracks) + 1.2)
    figure, axes = plt.subplots(3, 1, figsize=(9, 6.0 + rows), dpi=110, height_ratios=(3, rows, 2.2))
    _draw_curves(axes[0], lines, title)
    _draw_tracks(axes[1], tracks)
    _draw_broadcasts(axes[2], broadcasts)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def _draw_curves(axes: Any, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    for metric, (label, colour) in _CURVES.items():
        steps, values = pick_series([dict(line) for line in lines], metric)
        axes.plot(steps, values, color=colour, marker=".", linewidth=1.5, label=label)
    axes.set(title=title, xlabel="step", ylabel="share that passes", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _draw_tracks(axes: Any, tracks: Sequence[Track]) -> None:
    """One bar per part: dark where it computed, light where it waited."""
    begin, _ = find_period(tracks)

    def shift(intervals: Sequence[Interval]) -> list[Interval]:
        return [(start - begin, end - start) for start, end in intervals]

    for row, track in enumerate(tracks):
        axes.broken_barh(shift(track.wait), (row - 0.35, 0.7), color=_WAIT)
        axes.broken_barh(shift(track.busy), (row - 0.35, 0.7), color=_BUSY)
        beside = [(span.start_s, span.end_s) for span in track.spans if span.lane and span.kind == "busy"]
        axes.broken_barh(shift(beside), (row + 0.35, 0.12), color=_LANE)
    axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
    axes.invert_yaxis()
    axes.set(xlabel="seconds; dark: busy, light: waiting, thin: publishing beside it", title="who was busy when")


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
