"""Draws docs/img/flow.png: what the roles of a swarm send to each other.

    python bench/flow.py

Boxes are roles, arrows show what passes between them. Shaded boxes belong to the run, white ones can belong to anyone.
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE = Path("docs/img/flow.png")
OWN, OPEN, LINE, TEXT = "#dfe7ef", "#ffffff", "#34495e", "#1c2833"


@dataclass(frozen=True)
class Box:
    """A role: its position and its task."""

    name: str
    words: str
    x: float
    y: float
    colour: str
    height: float = 1.3
    width: float = 3.0


BOXES = {
    "trainer": Box("trainer", "trains on batch n,\nwrites v{n}", 0.4, 5.2, OWN),
    "origin": Box("origin", "signs the manifest, serves\nshards and deltas", 4.4, 5.2, OWN),
    "relay": Box("relays", "pass on bytes as they arrive,\nverify every shard", 8.4, 5.2, OPEN),
    "worker": Box("workers", "generate, prove, score", 8.4, 2.6, OPEN),
    "coordinator": Box("coordinator", "leases, receipts, batches,\ncredit, signed ledger", 0.4, 2.6, OWN),
    "validator": Box("validators", "check form, consistency\nand proof", 8.4, 0.0, OPEN),
    "auditor": Box("anyone", "verifies the ledger", 0.4, 0.0, OPEN),
}
ARROWS = (
    ("v{n}", (3.4, 5.85), (4.4, 5.85), (3.9, 6.05), 0.0),
    ("shards", (7.4, 5.85), (8.4, 5.85), (7.9, 6.05), 0.0),
    ("weights", (9.9, 5.2), (9.9, 3.9), (10.75, 4.45), 0.0),
    ("", (11.4, 5.6), (11.4, 0.7), (11.75, 4.45), -0.18),
    ("batch n", (1.6, 3.9), (1.6, 5.2), (1.05, 4.45), 0.0),
    ("hash of v{n}", (2.3, 5.2), (2.3, 3.9), (3.05, 4.45), 0.0),
    ("lease: tasks and seeds from the step's beacon", (3.4, 3.6), (8.4, 3.6), (5.9, 3.7), 0.0),
    ("submission: signed manifest, then rollouts with proofs", (8.4, 3.0), (3.4, 3.0), (5.9, 3.1), 0.0),
    ("verdict with evidence", (8.4, 1.0), (3.4, 2.75), (6.95, 1.95), 0.0),
    ("job: which rollouts to replay,\ndrawn after the manifest is signed", (2.9, 2.6), (8.4, 0.5), (5.2, 0.75), 0.0),
    ("events,\nsigned heads", (1.2, 2.6), (1.2, 1.3), (0.5, 1.75), 0.0),
)
"""label, from, to, position of the label, bend"""


def main() -> None:
    """Draw the picture."""
    figure, axes = pyplot.subplots(figsize=(11.8, 6.9))
    for box in BOXES.values():
        draw_box(axes, box)
    for words, start, end, place, bend in ARROWS:
        axes.add_patch(draw_arrow(start, end, bend))
        axes.text(*place, words, ha="center", va="bottom", fontsize=9, color=TEXT)
    axes.text(4.1, 6.85, "shaded: belongs to the run    white: can belong to anyone", fontsize=9, color=TEXT)
    axes.set_xlim(-0.2, 12.2)
    axes.set_ylim(-0.2, 7.1)
    axes.axis("off")
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight")
    print(f"drew {PICTURE}")


def draw_box(axes: Axes, box: Box) -> None:
    """A role."""
    shape = FancyBboxPatch(
        (box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.12", fc=box.colour, ec=LINE, lw=1.4
    )
    axes.add_patch(shape)
    middle = box.x + box.width / 2
    axes.text(middle, box.y + box.height - 0.32, box.name, ha="center", va="center", fontsize=12, weight="bold")
    axes.text(middle, box.y + 0.45, box.words, ha="center", va="center", fontsize=9.5, color=TEXT)


def draw_arrow(start: tuple[float, float], end: tuple[float, float], bend: float) -> FancyArrowPatch:
    """An arrow from one role to another."""
    style = f"arc3,rad={bend}"
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=LINE, lw=1.3, connectionstyle=style)


if __name__ == "__main__":
    main()
