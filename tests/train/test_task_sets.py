"""`shoal train` and `shoal eval` on a task set, with target lengths, a curriculum and user-defined rewards."""

import json
import random
from pathlib import Path
from typing import cast

import pytest
from tests.fixtures.paths import TINY

from shoal.cli import main
from shoal.config.run import TasksConfig, load_config
from shoal.errors import ConfigError
from shoal.tasks.adapters import RewardFamily
from shoal.tasks.open import open_family
from shoal.tasks.sets.sources import open_set
from shoal.train.loop import run_training
from shoal.train.report import read_metrics
from shoal.util.files import hash_file

FEW = ["sft.steps=4", "sft.eval_every=4", "sft.heldout=4", "steps=2", "eval.tasks=4"]
FAMILY = ["tasks.name=sort", "tasks.options={}"]
LENGTH = ["length.mode=exact", "length.targets=[3, 6]", "length.alpha=0.05", "length.template='{target}:{prompt}'"]


def train(out: Path, *overrides: str) -> Path:
    config = load_config(TINY, [f"out={out}", *FEW, *overrides])
    assert run_training(config) == 0
    return out / "tiny-seed0"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A set of 60 problems, half of them of another source."""
    path = tmp_path / "set.jsonl"
    open_set(["family:sort:30", "family:reverse:30"]).save(path)
    return path


def set_of(path: Path) -> list[str]:
    return ["tasks.options={}", f'tasks.set=["{path}"]']


def test_a_set_is_trained_and_named_by_its_hash(tmp_path: Path, tasks: Path) -> None:
    run = train(tmp_path, *set_of(tasks), "tasks.weights={sort = 1}", *LENGTH)
    kept = load_config(run / "config.toml")
    assert kept.tasks.hash == hash_file(tasks) and kept.tasks.set == [str(tasks)]
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in lines if "train/tokens" in line]
    assert len(steps) == 2 and all({"length/penalty", "length/error"} <= line.keys() for line in steps)
    assert all(0.0 <= line["length/penalty"] <= 0.5 for line in steps)
    assert any(name.startswith("eval/error_") for name in lines[0])
    stats = [json.loads(line) for line in (run / "tasks.jsonl").read_text().splitlines()]
    assert all(line["task"].startswith("sort-") and "@" not in line["task"] for line in stats)
    assert sum(line["attempts"] for line in stats) == 4 * sum(line["batch/drawn"] for line in steps)
    drawn, trained = sum(line["tokens"] for line in stats if line["step"] == 1), steps[0]["train/tokens"]
    expected = drawn / trained - 1 if trained else 0.0
    assert steps[0]["batch/extra_share"] == pytest.approx(expected)


def test_a_set_that_changed_on_disk_is_another_run(tmp_path: Path, tasks: Path) -> None:
    train(tmp_path, *set_of(tasks), "steps=1")
    open_set(["family:sort:31"]).save(tasks)
    with pytest.raises(ConfigError, match=r"tasks\.hash"):
        train(tmp_path, *set_of(tasks), "steps=1")


def test_a_run_with_a_curriculum_resumes_bit_for_bit(tmp_path: Path, tasks: Path) -> None:
    settings = [*set_of(tasks), "batch.curriculum=true", "steps=4", "checkpoint.every=2"]
    whole = train(tmp_path / "whole", *settings)
    cut = train(tmp_path / "cut", *settings, "steps=3")
    resumed = train(tmp_path / "cut", *settings)
    assert cut == resumed
    assert (whole / "tasks.jsonl").read_bytes() == (resumed / "tasks.jsonl").read_bytes()
    name = Path("checkpoints") / "step-000004" / "policy" / "model.safetensors"
    assert hash_file(whole / name) == hash_file(resumed / name)


def test_target_lengths_leave_the_tasks_of_a_family_as_they_are(tmp_path: Path) -> None:
    plain, aimed = train(tmp_path / "a", *FAMILY), train(tmp_path / "b", *FAMILY, *LENGTH)
    first, second = ((run / "tasks.jsonl").read_text().splitlines()[0] for run in (plain, aimed))
    assert json.loads(first)["task"] == json.loads(second)["task"]
    assert not any(key.startswith("length/") for line in read_metrics(plain / "metrics.jsonl") for key in line)


def test_eval_reports_the_error_by_target(tmp_path: Path, capsys) -> None:
    assert main(["eval", str(TINY), f"out={tmp_path}", *FEW, *FAMILY, *LENGTH, "eval.tasks=8"]) == 0
    assert "off the target of 3 (tokens)" in capsys.readouterr().out


def test_a_reward_function_scores_a_set(tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reward.py").write_text(
        "def length(prompts, completions, family, solution, **columns):\n"
        "    assert len(family) == len(solution) == len(prompts) == len(completions)\n"
        "    return [min(1.0, len(text) / 8) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = train(tmp_path, *set_of(tasks), "tasks.reward=own_reward:length")
    assert all(line["reward/mean"] > 0 for line in read_metrics(run / "metrics.jsonl") if "reward/mean" in line)


@pytest.mark.parametrize(
    "head", ["completions, **kwargs", "completions", "completions, family", "prompts, completions, solution, **kwargs"]
)
def test_a_reward_function_gets_the_arguments_it_declares(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    module = f"own_{abs(hash(head))}"
    (tmp_path / f"{module}.py").write_text(f"async def f({head}):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    family = open_family(TasksConfig(set=[str(tasks)], reward=f"{module}:f"))
    task = family.make_task(random.Random(1))
    assert [score.value for score in cast(RewardFamily, family).score_many(task, ["a", "b"])] == [1.0, 1.0]


def test_a_reward_function_with_an_unknown_argument_is_one_sentence(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_unknown.py").write_text("def f(texts, **kwargs):\n    return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    family = open_family(TasksConfig(set=[str(tasks)], reward="own_unknown:f"))
    with pytest.raises(ConfigError, match=r"missing a required argument: 'texts'.*arguments are completions, "):
        family.score(family.make_task(random.Random(1)), "a")


def test_a_run_is_not_resumed_with_an_edited_reward_function(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "own_edited.py"
    source.write_text("def f(completions, **kwargs):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = [*set_of(tasks), "tasks.reward=own_edited:f", "steps=1"]
    train(tmp_path, *settings)
    train(tmp_path, *settings)
    source.write_text(source.read_text().replace("0.5", "0.25"))
    with pytest.raises(ConfigError, match="source file of own_edited:f has changed"):
        train(tmp_path, *settings)


def test_an_environment_brings_tasks_and_rubric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_world.py").write_text(
        "from types import SimpleNamespace\n"
        "async def right(completion, answer): return float(completion == answer)\n"
        "def short(completion, **rest): return 1.0 if len(completion) < 4 else 0.0\n"
        "rows = [{'question': f'{n}=', 'answer': str(n)} for n in range(60)]\n"
        "world = SimpleNamespace(dataset=rows, rubric=SimpleNamespace(funcs=[right, short], weights=[3.0, 1.0]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from shoal.tasks.adapters import load_environment

    family = load_environment("own_world:world")
    task = family.make_task(random.Random(1))
    answer = family.demonstrate(task)
    assert [family.score(task, text).value for text in (answer, "x", "xxxxxx")] == [1.0, 0.25, 0.0]
    train(tmp_path, "tasks.options={}", "tasks.environment=own_world:world", "steps=1")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("tasks.reward=no_such_module:f", "cannot be imported"),
        ("tasks.reward=json", "must be package.module:name"),
        ("tasks.hash=" + "0" * 64, "tasks.hash"),
        ("tasks.filter.model=m", "keeps none"),
        ("tasks.weights={swim = 1}", "tasks.weights.swim"),
        ("tasks.set=['no/such.jsonl']", "cannot be read"),
        ("sft.options={min_length = 1}", "sft.options"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, tasks: Path, override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        train(tmp_path, *set_of(tasks), override)
