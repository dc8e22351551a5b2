"""A swarm whose last version is trained and evaluated: it says so, starts nothing, and can be reported on again."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config.run import dump_config
from shoal.coordinator.run import load_service
from shoal.coordinator.service import open_service
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.run import start_swarm
from shoal.launch.view import EVALS, METRICS


def finish(prepared: PreparedSwarm) -> None:
    """Leave what the last step leaves, and the ledger of a coordinator that has stopped."""

    async def serve_once() -> None:
        async with open_service(load_service(prepared.layout.service, (), {}), prepared.layout.coordinator):
            pass

    asyncio.run(serve_once())
    for name in (METRICS, EVALS):
        line = {"step": prepared.config.steps, "eval/pass_at_1": 0.5}
        (prepared.layout.root / name).write_text(json.dumps(line) + "\n")


def test_a_finished_swarm_is_reported_and_not_started(prepared: PreparedSwarm, log) -> None:
    finish(prepared)
    code, report = start_swarm(prepared.config)
    steps = prepared.config.steps
    said = f"run {prepared.config.run} is already finished ({steps} of {steps} steps); nothing was started. "
    assert code == 0 and [text for text in log.messages if text.startswith(said)]
    assert str(prepared.layout.root / "report.html") in report and not prepared.layout.logs.exists()


def test_prepare_of_a_finished_swarm_prints_what_serves_it_again(
    prepared: PreparedSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(prepared)
    path = tmp_path / "run.toml"
    path.write_text(dump_config(prepared.config))
    assert main(["prepare", str(path)]) == 0
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()] == ["coordinator", "origin", "relay"]
    assert "is already finished" in shown.err and "is ready" not in shown.err


def test_a_swarm_whose_ledger_is_elsewhere_is_reported_from_a_copy(
    prepared: PreparedSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(prepared)
    root, copy = prepared.layout.root, tmp_path / "run.db"
    shutil.copy(prepared.layout.ledger, copy)
    shutil.rmtree(prepared.layout.coordinator)
    assert main(["report", str(root)]) == 2
    assert "--copy run.db` and give --ledger run.db" in capsys.readouterr().err
    assert main(["report", str(root), "--ledger", str(copy)]) == 0
    assert str(root / "report.html") in capsys.readouterr().out
    assert f"shoal ledger verify {copy}" in (root / "report.txt").read_text()


def test_the_keys_of_the_parts_are_in_a_file(prepared: PreparedSwarm) -> None:
    keys = json.loads(prepared.layout.keys.read_text())
    assert keys["worker-1"]["owner"] == prepared.identities["worker-1"].owner
    assert keys["cheat-1"]["node"] == prepared.identities["cheat-1"].key.public
