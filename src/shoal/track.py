"""Trackers: where metrics go beside metrics.jsonl.

- The default sends nothing anywhere; each other tracker is a package of its own, imported only when chosen.
- What leaves the process is the metrics and the settings of the run. No environment, no command line, no code, no
  machine data, no output folder: trackers that collect these by themselves are told not to.
- A run keeps its identity at the tracker in `tracker.id`, so a resumed run goes on there and a fresh one starts anew.
"""

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.config import RunConfig, flatten_config
from shoal.errors import ConfigError
from shoal.files import write_atomic

_WANDB_PRIVACY = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send what is known of a step; values of None are left out."""

    def close(self) -> None:
        """Send what is still waiting."""


def open_tracker(config: RunConfig, folder: Path) -> Tracker:
    """The tracker the settings name, for the run in `folder`."""
    match config.track.name:
        case "none":
            return NullTracker()
        case "wandb":
            return WandbTracker(config, folder)
        case "trackio":
            return TrackioTracker(config, folder)
        case "tensorboard":
            return TensorboardTracker(folder)


class NullTracker:
    """Sends nothing."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbTracker:
    """Weights & Biases, or whatever server its own login points to."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        identity = _run_identity(folder)
        self._run = _import_package("wandb").init(
            project=config.track.project,
            name=f"{config.name}-seed{config.seed}",
            id=identity,
            resume="allow",
            dir=str(folder),
            config=_public_settings(config),
            settings=dict(_WANDB_PRIVACY),
        )

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._run.log(_known_values(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """Trackio, which keeps its data on this machine unless its user says otherwise."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        # Trackio knows runs by name alone, so the identity is part of it.
        name = f"{config.name}-seed{config.seed}-{_run_identity(folder)[:8]}"
        self._run = _import_package("trackio").init(
            project=config.track.project,
            name=name,
            resume="allow",
            config=_public_settings(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._run.log(_known_values(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """Event files in the run directory, under `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        _import_package("tensorboard")  # torch's writer needs it, and would say so less clearly
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        for name, value in _known_values(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f'track.name: {name} is not installed; pip install "shoal[{name}]", or choose track.name=none'
        ) from None


def _run_identity(folder: Path) -> str:
    path = folder / "tracker.id"
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex.encode())
    return path.read_text()


def _public_settings(config: RunConfig) -> dict[str, Any]:
    settings: dict[str, Any] = dict(flatten_config(config))
    for key in ("out", "tasks.set"):  # paths of this machine
        del settings[key]
    if Path(str(settings["policy.path"])).is_dir():
        del settings["policy.path"]
    return settings


def _known_values(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
