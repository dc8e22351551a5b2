"""`shoal run`, `prepare` and `demo`: checks before anything is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.launch.settings import load_launch
from shoal.redteam.registry import WORKER_FAMILIES, list_names


def test_a_dry_run_prints_settings_that_load_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--dry-run", "steps=5", 'swarm.cheats=["int8","stale"]']) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_launch(shown) == load_launch(None, ["steps=5", 'swarm.cheats=["int8","stale"]'])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shown.toml"]  # and nothing was created


def test_every_attack_of_a_worker_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    names = list_names(WORKER_FAMILIES)
    assert main(["demo", "--dry-run", f"swarm.cheats={json.dumps(names)}"]) == 0
    capsys.readouterr()
    for name in ("int9", "late"):
        assert main(["demo", "--dry-run", f'swarm.cheats=["{name}"]']) == 2
        assert f"swarm.cheats: '{name}' is not a worker attack" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "prepare"])
def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "nowhere.toml"]) == 2
    assert capsys.readouterr().err == "shoal: nowhere.toml: no such file\n"


def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "swarm.worker=3"]) == 2
    assert "did you mean swarm.workers?" in capsys.readouterr().err


def test_help_lists_the_settings_of_run_and_swarm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help", "all"])
    shown = capsys.readouterr().out
    assert "swarm.cheats" in shown and "learner.lr" in shown


def test_nothing_heavy_is_imported_before_a_swarm_is_started(tmp_path: Path) -> None:
    code = (
        "import sys; from shoal.cli import main; main(['demo', '--dry-run']); "
        "import shoal.launch.run; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
