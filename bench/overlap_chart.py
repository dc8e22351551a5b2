"""Figures of asynchrony: which role was busy when, and what was learned over steps and over seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from common import mean, open_plots, save_picture
from swarms import Summary

_BUSY, _WAIT = "C0", "0.85"
_KINDS = {"trainer": "C0", "workers": "C1", "validators": "C2"}

Runs = Mapping[int, Sequence[Summary]]


def draw_overlap(runs: Runs, name: str) -> None:
    """For each level, the parts of its first run on one time axis, and busy shares over all runs."""
    levels = [level for level in runs if level <= 2]
    end_s = max(runs[level][0].window[1] for level in levels)
    figure, axes = open_plots().subplots(
        len(levels) + 1, 1, figsize=(9, 1.9 * len(levels) + 2.6), dpi=120, height_ratios=[*[1.9] * len(levels), 2.2]
    )
    for panel, level in zip(axes, levels, strict=False):
        _draw_tracks(panel, runs[level][0])
        panel.set(xlim=(0, end_s), title=f"k = {level}")
    axes[len(levels) - 1].set_xlabel("seconds since v0; dark: busy, light: waiting")
    _draw_shares(axes[-1], runs)
    save_picture(figure, name)


def draw_curves(runs: Runs, name: str) -> None:
    """Held-out pass rates, sampled; each seed thin and the mean thick."""
    figure, axes = open_plots().subplots(1, 2, figsize=(9, 3.6), dpi=120, sharey=True)
    for colour, (level, seeds) in enumerate(runs.items()):
        for run in seeds:
            times = [0.0, *run.written]
            rates = [rate for _, rate, _ in run.evals]
            axes[0].plot([version for version, _, _ in run.evals], rates, color=f"C{colour}", alpha=0.35, linewidth=0.8)
            axes[1].plot([times[version] for version, _, _ in run.evals], rates, color=f"C{colour}", alpha=0.6)
        versions = [version for version, _, _ in seeds[0].evals]
        rates = [mean(column) for column in zip(*([rate for _, rate, _ in run.evals] for run in seeds), strict=True)]
        axes[0].plot(versions, rates, color=f"C{colour}", linewidth=2, label=f"k = {level}")
    for panel, label in zip(axes, ("step", "seconds since v0"), strict=True):
        panel.set(xlabel=label, ylim=(0, 1))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("held-out pass rate, sampled")
    axes[0].legend(frameon=False)
    save_picture(figure, name)


def _draw_tracks(panel: Any, run: Summary) -> None:
    names = [part for part in run.busy if part.startswith(("trainer", "worker", "validator"))]
    for row, part in enumerate(names):
        panel.broken_barh([(start, end - start) for start, end in run.waits[part]], (row - 0.4, 0.8), color=_WAIT)
        panel.broken_barh([(start, end - start) for start, end in run.busy[part]], (row - 0.4, 0.8), color=_BUSY)
    panel.set_yticks(range(len(names)), names, fontsize="small")
    panel.invert_yaxis()


def _draw_shares(panel: Any, runs: Runs) -> None:
    width = 0.8 / len(_KINDS)
    for number, (kind, colour) in enumerate(_KINDS.items()):
        shares = [_mean_share(seeds, kind.removesuffix("s")) for seeds in runs.values()]
        places = [row + (number - 1) * width for row in range(len(shares))]
        bars = panel.bar(places, shares, width * 0.92, color=colour, label=kind)
        panel.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize="x-small")
    panel.set_xticks(range(len(runs)), [f"k = {level}" for level in runs])
    panel.set(ylim=(0, 1.1), ylabel="busy share")
    panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _mean_share(seeds: Sequence[Summary], kind: str) -> float:
    return mean([run.share_of(part) for run in seeds for part in run.busy if part.startswith(kind)])
