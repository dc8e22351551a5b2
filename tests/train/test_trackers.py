import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.config.run import RunConfig, load_config
from shoal.errors import ConfigError
from shoal.train.trackers import open_tracker


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture(params=["wandb", "trackio"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake of the tracker's package that records its runs."""
    module: Any = ModuleType(request.param)
    module.runs = []

    def init(**settings: Any) -> FakeRun:
        run = FakeRun(settings)
        module.runs.append(run)
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def track_with(name: str) -> RunConfig:
    return load_config(None, [f"track.name={name}", "track.project=fish", "name=test", "out=/home/someone/runs"])


def test_the_default_tracker_does_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(RunConfig(), tmp_path)
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_metrics_go_to_the_chosen_package(package: Any, tmp_path: Path) -> None:
    tracker = open_tracker(track_with(package.__name__), tmp_path)
    tracker.log(3, {"reward": 0.5, "unknown": None})
    tracker.close()
    (run,) = package.runs
    assert run.settings["project"] == "fish"
    assert run.settings["name"].startswith("test-seed0")
    assert run.logged == [(3, {"reward": 0.5})]
    assert run.is_finished


def test_a_resumed_run_continues_under_its_name_and_a_fresh_one_does_not(package: Any, tmp_path: Path) -> None:
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        open_tracker(track_with(package.__name__), tmp_path / folder)
    first, resumed, fresh = ((run.settings["name"], run.settings.get("id")) for run in package.runs)
    assert first == resumed
    assert first != fresh
    assert all(run.settings["resume"] == "allow" for run in package.runs)


def test_nothing_of_the_machine_or_environment_is_sent(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    open_tracker(track_with(package.__name__), tmp_path)
    sent = package.runs[0].settings["config"]
    assert "hunter2" not in repr(package.runs[0].settings)
    assert "someone" not in repr(sent)
    assert sent["learner.lr"] == 1e-4


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_wandb_is_told_to_collect_nothing_by_itself(package: Any, tmp_path: Path) -> None:
    open_tracker(track_with("wandb"), tmp_path)
    settings = package.runs[0].settings["settings"]
    assert settings["x_disable_machine_info"]
    assert settings["x_disable_meta"]
    assert settings["console"] == "off"


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_answered_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(ConfigError, match=rf"\.\[{name}\]"):
        open_tracker(track_with(name), tmp_path)


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker(track_with("tensorboard"), tmp_path)
    tracker.log(1, {"reward": 0.5, "unknown": None})
    tracker.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward" in events.read_bytes()
