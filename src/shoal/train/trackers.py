"""Trackers: where metrics go in addition to metrics.jsonl.

- The default sends nothing anywhere; each other tracker is a separate package, imported only when chosen.
- Only the metrics and the settings of the run leave the process. No environment, command line, code, machine data or
  output folder: trackers that collect these by default are configured not to.
- A run keeps its identity at the tracker in `tracker.id`, so a resumed run continues there and a fresh one starts a new
  one.
"""

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.config.run import RunConfig, flatten_config
from shoal.util.extras import import_extra
from shoal.util.files import write_atomic

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
        """Send the metrics of a step; values of None are left out."""

    def close(self) -> None:
        """Send everything pending."""


def open_tracker(config: RunConfig, folder: Path) -> Tracker:
    """The tracker that the settings name, for the run in `folder`."""
    name, own = f"{config.name}-seed{config.seed}", dict[str, Any]()
    match config.track.name:
        case "none":
            return NullTracker()
        case "tensorboard":
            return TensorboardTracker(folder)
        case "wandb":
            own = {"id": _run_identity(folder), "dir": str(folder), "settings": dict(_WANDB_PRIVACY)}
        case "trackio":  # identifies runs only by name, so the identity is part of it
            name = f"{name}-{_run_identity(folder)[:8]}"
            own = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    package, settings = _import_package(config.track.name), _public_settings(config)
    return PackageTracker(package.init(project=config.track.project, name=name, resume="allow", config=settings, **own))


class NullTracker:
    """Sends nothing."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        pass

    def close(self) -> None:
        pass


class PackageTracker:
    """A run of Weights & Biases, or of the server its login points to, or of Trackio, which keeps its data on this
    machine by default; both have the same methods."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._run.log(_known_values(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """Event files in the run directory, under `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        _import_package("tensorboard")  # torch's writer needs it, with a less clear error
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        for name, value in _known_values(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _import_package(name: str) -> Any:
    return import_extra(name, "track.name", hint=", or choose track.name=none")


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
