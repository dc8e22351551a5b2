"""What a run's coordinator hands to everybody beside its descriptor: recipe, calibration of the checks, task set.

All are files of the operator's that never change. The recipe's hash stands in the genesis and in the descriptor, those
of the calibration and the task set in the recipe, so it does not matter from where somebody has them. A task set of
more than `MAX_TASKS_BYTES` is not handed out here: nodes are given its file in another way (`--tasks`).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.recipe import MAX_RECIPE_BYTES, RecipeError, load_recipe
from shoal.swarm.params import RunParams

MAX_CALIBRATION_BYTES = 4 << 20
MAX_TASKS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Papers:
    """The bytes that are handed out; empty for a run without."""

    recipe: bytes = b""
    calibration: bytes = b""
    tasks: bytes = b""
    """canonical form of the task set"""

    @property
    def recipe_hash(self) -> str:
        """As in the genesis; empty without a recipe."""
        return hashlib.sha256(self.recipe).hexdigest() if self.recipe else ""


def load_papers(recipe: str, calibration: str, params: RunParams, tasks: str = "") -> Papers:
    """The papers of a run from the files that its settings name; ConfigError where they do not belong together."""
    if not recipe:
        if calibration or tasks:
            key = "calibration" if calibration else "tasks"
            raise ConfigError(f"{key}: is of use only with the recipe that names it")
        return Papers()
    papers = Papers(
        _read_file(Path(recipe), MAX_RECIPE_BYTES),
        _read_file(Path(calibration), MAX_CALIBRATION_BYTES) if calibration else b"",
        _read_file(Path(tasks), MAX_TASKS_BYTES) if tasks else b"",
    )
    try:
        found = load_recipe(papers.recipe)
    except RecipeError as error:
        raise ConfigError(f"{recipe}: {error}") from None
    if (found.group_size, found.max_tokens) != (params.group_size, params.max_tokens):
        raise ConfigError(
            f"{recipe}: says {found.group_size} rollouts of {found.max_tokens} tokens, the run's parameters say "
            f"{params.group_size} of {params.max_tokens}"
        )
    if papers.calibration and hashlib.sha256(papers.calibration).hexdigest() != found.calibration:
        raise ConfigError(f"{calibration}: is not the calibration that the recipe names")
    if papers.tasks and hashlib.sha256(papers.tasks).hexdigest() != found.set.hash:
        raise ConfigError(f"{tasks}: is not the task set that the recipe names")
    return papers


def _read_file(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise ConfigError(f"{path}: has more than the {most} bytes allowed")
    return data
