"""Figure of `bench/diloco.py`: loss over steps, and final loss over the bytes that a worker sends."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common import mean, open_plots, save_picture

_SHOWN = ("one worker", "data parallel", "data parallel tuned", "diloco int4", "diloco tuned int4")
_COLOURS = {
    "one worker": "C0",
    "data parallel": "C1",
    "data parallel tuned": "C2",
    "diloco": "C3",
    "diloco tuned": "C4",
}
"""by kind of arm, as in the curves"""
_PLAIN = re.compile(r"data parallel( tuned)?|diloco( tuned)? (fp32|fp16|int8|int4|topk|H=\d+)")
"""arms that differ only in what they send, and in tuning"""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def draw_curves(runs: Runs, name: str) -> None:
    """Curves use an eighth of the held-out windows, points all of them; means over the seeds."""
    figure, (left, right) = open_plots().subplots(1, 2, figsize=(10, 3.8), dpi=120)
    for colour, arm in enumerate(_SHOWN):
        for run in runs[arm]:
            left.plot(*zip(*run["curve"], strict=True), color=f"C{colour}", alpha=0.3, linewidth=0.7)
        steps = [step for step, _ in runs[arm][0]["curve"]]
        losses = [
            mean(column) for column in zip(*([loss for _, loss in run["curve"]] for run in runs[arm]), strict=True)
        ]
        left.plot(steps, losses, color=f"C{colour}", linewidth=1.8, label=arm)
    left.set(xlabel="step after the warm start", ylabel="loss on an eighth of the held-out windows")
    left.legend(frameon=False, fontsize="small")
    _draw_bytes(right, runs)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    save_picture(figure, name)


def _draw_bytes(panel: Any, runs: Runs) -> None:
    for arm in (arm for arm in runs if _PLAIN.fullmatch(arm)):
        megabytes, loss = runs[arm][0]["bytes"] / 1e6, mean([run["loss"] for run in runs[arm]])
        kind = re.sub(r" (fp32|fp16|int8|int4|topk|H=\d+)$", "", arm)
        panel.plot(megabytes, loss, "o", color=_COLOURS[kind], markersize=4)
        offset = (0, -9) if "tuned" in kind else (0, 5)  # below and above, so that neighbours do not overlap
        place = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
        panel.annotate(arm.removeprefix(kind).strip(), (megabytes, loss), offset, **place)
    alone = mean([run["loss"] for run in runs["one worker"]])
    panel.axhline(alone, color=_COLOURS["one worker"], linewidth=1.2, linestyle=":")
    for kind, colour in _COLOURS.items():
        style = ":" if kind == "one worker" else "o"
        panel.plot([], [], style, color=colour, markersize=4, label=kind)
    panel.set(xscale="log", xlabel="MB sent per worker", ylabel="final held-out loss", ylim=(None, alone + 0.02))
    panel.margins(x=0.1, y=0.1)
    panel.legend(frameon=False, fontsize="small", loc="center right", bbox_to_anchor=(1.0, 0.72))
