"""Figure of bench/shardcast.py: shoal and its peers, depth, and unequal relays."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from common import open_plots, save_picture
from shardcast_sample import Runs


def draw_picture(results: Mapping[str, Runs], *, link_s: float, mixed_bytes: int) -> None:
    """Three panels: seconds of each path, time to the leaf by depth, rate with unequal relays.

    `link_s` is the time that one link needs for the file of the chain.
    """
    figure, axes = open_plots().subplots(1, 3, figsize=(13, 3.8), dpi=120)
    _draw_path(axes[0], results["path"])
    _draw_chain(axes[1], results["chain"], link_s)
    _draw_mixed(axes[2], results["mixed"], mixed_bytes)
    for panel in axes:
        panel.grid(alpha=0.3)
    save_picture(figure, "shardcast.png")


def _draw_path(panel: Any, runs: Runs) -> None:
    names = sorted(runs, key=lambda name: -_middle(runs, name))
    times = [_middle(runs, name) for name in names]
    colours = ["C0" if name.startswith("shoal") else "C7" for name in names]
    panel.bar_label(panel.barh(names, times, color=colours), fmt=" %.2f", fontsize=8)
    panel.set(title="1 GiB, publish to verified", xlabel="seconds", xlim=(0, 1.15 * max(times)))
    panel.tick_params(axis="y", labelsize=8)


def _draw_chain(panel: Any, runs: Runs, link_s: float) -> None:
    depths = range(1, len(runs) + 1)
    times = [_middle(runs, name) for name in runs]
    panel.plot(depths, times, "o-", color="C0", label="shoal, measured")
    panel.plot(depths, [link_s * depth for depth in depths], "--", color="C7", label="whole file per hop, computed")
    panel.axhline(link_s, color="C2", alpha=0.6, label="rate of one link")
    panel.set(title="links of 200 Mbit/s and 20 ms each way", xlabel="depth (links)", ylabel="seconds to the leaf")
    panel.set(xticks=list(depths), ylim=(0, None))
    panel.legend(frameon=False, fontsize=8)


def _draw_mixed(panel: Any, runs: Runs, num_bytes: int) -> None:
    rates = [num_bytes / 1e6 / _middle(runs, name) for name in runs]
    panel.bar_label(panel.barh(list(runs), rates, color=["C7", "C7", "C0"]), fmt=" %.1f", fontsize=8)
    panel.set(title="relays 1x, 1/4x, 1x failing half", xlabel="MB/s at the client", xlim=(0, 1.2 * max(rates)))
    panel.tick_params(axis="y", labelsize=8)


def _middle(runs: Runs, name: str) -> float:
    return median(run.seconds for run in runs[name])
