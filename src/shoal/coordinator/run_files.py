"""Files that the coordinator serves besides its descriptor: recipe, calibration of the checks, task set.

All are the operator's files and never change. The recipe's hash is in the genesis and in the descriptor, those of the
calibration and the task set are in the recipe, so their source does not matter. A task set of more than
`MAX_TASKS_BYTES` is not served: nodes get its file in another way (`--tasks`).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.protocol.params import MAX_CALIBRATION_BYTES, MAX_TASKS_BYTES, RunParams
from shoal.recipe import MAX_RECIPE_BYTES, RecipeError, load_recipe


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The bytes that are served; empty for files that the run does not have."""

    recipe: bytes = b""
    calibration: bytes = b""
    tasks: bytes = b""
    """canonical form of the task set"""

    @property
    def recipe_hash(self) -> str:
        """The hash in the genesis; empty without a recipe."""
        return hashlib.sha256(self.recipe).hexdigest() if self.recipe else ""


def load_run_files(recipe: str, calibration: str, params: RunParams, tasks: str = "") -> RunFiles:
    """Load the files that the settings name; ConfigError if they do not match each other."""
    if not recipe:
        if calibration or tasks:
            key = "calibration" if calibration else "tasks"
            raise ConfigError(f"{key}: needs the recipe that names it")
        return RunFiles()
    files = RunFiles(
        _read_file(Path(recipe), MAX_RECIPE_BYTES),
        _read_file(Path(calibration), MAX_CALIBRATION_BYTES) if calibration else b"",
        _read_file(Path(tasks), MAX_TASKS_BYTES) if tasks else b"",
    )
    try:
        found = load_recipe(files.recipe)
    except RecipeError as error:
        raise ConfigError(f"{recipe}: {error}") from None
    if (found.group_size, found.max_tokens) != (params.group_size, params.max_tokens):
        raise ConfigError(
            f"{recipe}: has {found.group_size} rollouts of {found.max_tokens} tokens, but the run's parameters have "
            f"{params.group_size} of {params.max_tokens}"
        )
    if files.calibration and hashlib.sha256(files.calibration).hexdigest() != found.calibration:
        raise ConfigError(f"{calibration}: not the calibration that the recipe names")
    if files.tasks and hashlib.sha256(files.tasks).hexdigest() != found.set.hash:
        raise ConfigError(f"{tasks}: not the task set that the recipe names")
    return files


def _read_file(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise ConfigError(f"{path}: file is larger than the {most} bytes allowed")
    return data
