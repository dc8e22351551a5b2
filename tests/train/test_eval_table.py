"""A table of models and kinds of tasks."""

import json
import shutil
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config.run import PolicyConfig, TinyConfig, load_config
from shoal.engine.torch import TorchEngine
from shoal.policy.model import load_policy, open_policy, save_policy
from shoal.tasks.families.sort import Sort
from shoal.tasks.registry import load_family
from shoal.train.eval import evaluate

FLAGS = ["eval.tasks=4", "eval.samples=2", "eval.k=2", "engine.max_tokens=4", "threads=1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    tiny = TinyConfig(layers=1, width=16, heads=1, kv_heads=1, context=64)
    for seed, name in enumerate(("first", "second")):
        save_policy(load_policy(PolicyConfig(tiny=tiny), alphabet=Sort().alphabet, seed=seed), folder / name)
    return [folder / "first", folder / "second"]


def test_rows_are_models_and_columns_are_tasks(models: list[Path], tmp_path: Path, capsys) -> None:
    figures, page = tmp_path / "table.json", tmp_path / "table.md"
    names = [str(model) for model in models]
    columns = ["sort", "reverse", "family:sort:100"]
    code = main(
        ["eval", *FLAGS, "--models", *names, "--tasks", *columns, "--json", str(figures), "--markdown", str(page)]
    )
    assert code == 0
    shown = capsys.readouterr().out
    assert shown == page.read_text() and shown.startswith(
        "| model | sort | reverse | family:sort:100 |\n|---|---|---|---|\n"
    )
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:4]] == ["| first", "| second"]
    cells = json.loads(figures.read_text())
    assert set(cells) == {"first", "second"} and set(cells["first"]) == set(columns)
    config = load_config(None, FLAGS)
    policy = open_policy(models[1])
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=8, version=0)
    alone = evaluate(engine, load_family("sort", {}), policy, config)
    assert cells["second"]["sort"]["pass_1"] == {
        "value": alone.pass_1.value,
        "low": alone.pass_1.low,
        "high": alone.pass_1.high,
    }


def test_two_checkpoints_of_a_run_are_compared_on_its_tasks(models: list[Path], tmp_path: Path, capsys) -> None:
    checkpoints = [tmp_path / f"step-{step:06d}" for step in (1, 2)]
    for model, checkpoint in zip(models, checkpoints, strict=True):
        shutil.copytree(model, checkpoint / "policy")
    for shown, places in (
        (["step-000001", "step-000002"], list(map(str, checkpoints))),
        (
            [f"{checkpoint}/policy" for checkpoint in checkpoints],
            [f"{checkpoint}/policy" for checkpoint in checkpoints],
        ),
    ):
        assert main(["eval", *FLAGS, "tasks.name=reverse", "--models", *places]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "| model | reverse |"
        assert [line.split(" | ")[0] for line in lines[2:4]] == [f"| {name}" for name in shown]


def test_a_folder_that_is_no_run_is_answered_with_how_to_evaluate_it(models: list[Path], capsys) -> None:
    assert main(["eval", str(models[0])]) == 2
    assert f"to evaluate a checkpoint or model: shoal eval RUN --models {models[0]}" in capsys.readouterr().err


def test_a_table_needs_rows_and_known_columns(models: list[Path], capsys) -> None:
    assert main(["eval", *FLAGS, "--tasks", "sort"]) == 2
    assert "--tasks: name the models of the table with --models" in capsys.readouterr().err
    assert main(["eval", *FLAGS, "--models", str(models[0]), "--tasks", "swim"]) == 2
    assert "no such family" in capsys.readouterr().err
