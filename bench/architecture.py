"""Draws docs/img/architecture.png: the packages of shoal by layer, from the import-linter table in `pyproject.toml`.

    python bench/architecture.py

An import only goes down. A package without a label below is an error, so the picture cannot become outdated.
"""

import tomllib
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/img/architecture.png"
WIDTH, HEIGHT, GAP = 15.0, 0.86, 0.16
LINE, TEXT = "#34495e", "#1c2833"
LABELS = {
    "cli": "arguments, exit codes",
    "commands": "one file per group of commands",
    "redteam": "attacks and the swarm they run in",
    "plan": "what a run needs",
    "launch": "a whole swarm",
    "worker": "leases to submissions",
    "validator": "submissions to verdicts",
    "trainer": "batches to versions",
    "diloco": "training across sites",
    "audit": "a ledger checked again",
    "coordinator": "decisions, state, API",
    "node": "client side of every role",
    "train": "sampling and training, SFT",
    "submission": "the file a worker hands in",
    "protocol": "messages, parameters, beacon",
    "calibrate": "thresholds from honest work",
    "ledger": "events, Merkle tree, heads",
    "shardcast": "weights to everybody",
    "toploc": "proofs of inference",
    "group": "tasks and seeds of a group",
    "identity": "keys, signatures, delegation",
    "engine": "sampling",
    "learner": "losses, optimizer step",
    "recipe": "how rollouts are made",
    "net": "HTTP server, client, limits",
    "policy": "model, tokenizer, attention",
    "tasks": "families, sets, verifiers",
    "util": "files, waits, logs, metrics",
    "config": "typed settings",
    "sandbox": "processes for hostile input",
    "errors": "by the boundary they crossed",
    "rollout": "records that travel",
    "seeds": "named randomness",
}
BANDS = (
    ("command line", {"cli", "commands"}, "#f3e9dc"),
    ("whole swarms", {"redteam", "plan", "launch"}, "#f3e9dc"),
    ("roles", {"worker", "validator", "trainer", "diloco", "audit"}, "#dfe7ef"),
    ("services", {"coordinator", "node", "train", "submission", "protocol", "calibrate"}, "#dfe7ef"),
    ("libraries", set(LABELS), "#e6efe0"),
)
"""name, packages, colour; the first band that contains a package applies"""


def main() -> None:
    """Draw the picture."""
    rows = read_layers()
    figure, axes = pyplot.subplots(figsize=(12.5, 0.62 * len(rows) + 0.4))
    seen = ""
    for number, row in enumerate(rows):
        top = -number * (HEIGHT + GAP)
        width = (WIDTH - GAP * (len(row) - 1)) / len(row)
        for place, package in enumerate(row):
            draw_package(axes, package, place * (width + GAP), top, width)
        band = find_band(row[0])[0]
        if band != seen:
            axes.text(-0.25, top + HEIGHT / 2, band, ha="right", va="center", fontsize=10, style="italic", color=TEXT)
        seen = band
    axes.set_xlim(-3.6, WIDTH + 0.1)
    axes.set_ylim(-(len(rows) - 1) * (HEIGHT + GAP) - 0.1, HEIGHT + 0.1)
    axes.axis("off")
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight")
    print(f"drew {PICTURE.relative_to(ROOT)}")


def read_layers() -> list[list[str]]:
    """Packages by layer, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = [[name.strip() for name in layer.split("|")] for layer in layers]
    return [row for row in rows if row != ["__main__"]]


def find_band(package: str) -> tuple[str, set[str], str]:
    """The band of a package."""
    return next(band for band in BANDS if package in band[1])


def draw_package(axes: Axes, package: str, x: float, y: float, width: float) -> None:
    """A box with the package's name and its purpose."""
    style = "round,pad=0,rounding_size=0.1"
    colour = find_band(package)[2]
    axes.add_patch(FancyBboxPatch((x, y), width, HEIGHT, boxstyle=style, fc=colour, ec=LINE, lw=1.2))
    middle = x + width / 2
    axes.text(middle, y + 0.56, package, ha="center", va="center", fontsize=11, weight="bold", color=TEXT)
    axes.text(middle, y + 0.22, LABELS[package], ha="center", va="center", fontsize=8.5, color=TEXT)


if __name__ == "__main__":
    main()
