"""`shoal train` and `shoal eval` on a task set, with target lengths, a curriculum and user-defined rewards."""

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import cast

import pytest
from tests.fixtures.paths import TINY

from shoal.cli import main
from shoal.config.run import FilterConfig, TasksConfig, load_config
from shoal.errors import ConfigError
from shoal.tasks.adapters import RewardFamily, hash_source, load_environment
from shoal.tasks.base import Task, score_texts
from shoal.tasks.open import check_tasks, open_family
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.tasks.split import Split, split_task
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


def write_reward(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str) -> str:
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return f"{module}:f"


def test_a_reward_function_with_an_unknown_argument_is_refused_by_a_dry_run(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_reward(tmp_path, monkeypatch, "own_unknown", "def f(texts, **kwargs):\n    return []\n")
    settings = [f"out={tmp_path}", *FEW, *set_of(tasks), f"tasks.reward={place}"]
    assert main(["train", str(TINY), *settings, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: tasks.reward: own_unknown:f: missing a required argument: 'texts'")
    assert "arguments are completions, " in error


def test_a_column_that_only_some_tasks_have_is_none_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set.jsonl").write_text('{"prompt": "1", "gold": "2"}\n{"prompt": "2", "level": 3}\n')
    text = (
        "def f(completions, gold, level):\n    return [float(gold[0] is None or level[0] is None)] * len(completions)\n"
    )
    place = write_reward(tmp_path, monkeypatch, "own_none", text)
    family = open_family(TasksConfig(set=[str(tmp_path / "set.jsonl")], reward=place))
    rng = random.Random(1)
    assert all(family.score(family.make_task(rng), "a").value == 1.0 for _ in range(8))


def test_a_reward_function_gets_messages_where_the_prompt_is_in_chat_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [{"role": "user", "content": "1+1="}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    text = (
        "def f(prompts, completions, answer):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': '1+1='}] and completions[0][0]['role'] == 'assistant'\n"
        "    return [float(message['content'] == gold) for [message], gold in zip(completions, answer)]\n"
    )
    place = write_reward(tmp_path, monkeypatch, "own_chat", text)
    family = cast(RewardFamily, open_family(TasksConfig(set=[str(tmp_path / "chat.jsonl")], reward=place)))
    scores = family.score_many(family.list_tasks()[0], ["2", "3"])
    assert [score.value for score in scores] == [1.0, 0.0]


def test_an_exception_of_a_reward_function_says_what_was_scored(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_reward(
        tmp_path, monkeypatch, "own_broken", "def f(completions, **rest):\n    return completions[9]\n"
    )
    family = cast(RewardFamily, open_family(TasksConfig(set=[str(tasks)], reward=place)))
    task = family.make_task(random.Random(1))
    with pytest.raises(IndexError) as caught:
        family.score_many(task, ["", "b"])
    text = f"tasks.reward: own_broken:f raised IndexError for task {task.id}, 2 completions such as '', 'b'"
    assert caught.value.__notes__ == [text]


@pytest.mark.parametrize(("result", "found"), [("[1.0]", "1 reward"), ("1.0", "1.0"), ("[]", "0 rewards")])
def test_a_reward_function_that_does_not_return_one_reward_per_completion_is_told_so(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, result: str, found: str
) -> None:
    module = f"own_count{abs(hash(result))}"
    place = write_reward(tmp_path, monkeypatch, module, f"def f(completions, **rest):\n    return {result}\n")
    family = cast(RewardFamily, open_family(TasksConfig(set=[str(tasks)], reward=place)))
    with pytest.raises(ConfigError, match=rf"returned {found} for 2 completions; return a list with one number per"):
        family.score_many(family.make_task(random.Random(1)), ["a", "b"])


def write_tasks(path: Path, count: int) -> Path:
    """A set as one has it for another framework."""
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_small_set_with_other_columns_trains_with_a_reward_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tasks(tmp_path / "small.jsonl", 64)
    text = "def f(completions, answer, **rest):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"
    place = write_reward(tmp_path, monkeypatch, "own_small", text)
    settings = ["tasks.options={}", f"tasks.set={path}", f"tasks.reward={place}", "sft.steps=0", "steps=1"]
    config = load_config(None, [f"out={tmp_path}", "name=tiny", *settings, "engine.max_tokens=4", "batch.groups=2"])
    assert run_training(config) == 0
    kept = load_config(tmp_path / "tiny-seed0" / "config.toml")
    count = sum(split_task(task) is Split.HELDOUT for task in open_family(kept.tasks).list_tasks())  # type: ignore[attr-defined]
    assert kept.eval.tasks == count < 64
    text = f"eval.tasks: only {count} of the 64 tasks are held out (one in 8, by a hash of the prompt), so {count} are"
    assert any(text in message for message in caplog.messages)
    assert run_training(config) == 0  # which is the same run, and not one with other settings


@pytest.mark.parametrize("key", ["eval.tasks", "sft.heldout"])
def test_more_heldout_tasks_than_a_set_has_are_refused_by_a_dry_run(
    tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    settings = [f"out={tmp_path}", *FEW, *set_of(tasks), f"{key}=256"]
    assert main(["train", str(TINY), *settings, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shoal: {key}: is 256, but only ") and "of the 60 tasks are held out (one in 8" in error
    assert f"; set {key}=" in error


def test_a_set_without_heldout_tasks_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}=", "answer": "1", "task_type": "math"} for number in range(20)]
    family = open_set_of(tmp_path, rows)
    kept = [row for row in rows if split_task(family[row["prompt"]]) is Split.TRAIN]
    with pytest.raises(ConfigError, match=r"eval\.tasks: is 256, but none of the \d+ tasks .*; add tasks"):
        check_tasks(load_config(None, ["tasks.options={}", f"tasks.set={write_rows(tmp_path, kept)}"]))
    kept = [row for row in rows if split_task(family[row["prompt"]]) is Split.HELDOUT]
    with pytest.raises(ConfigError, match=r"tasks\.set: .* was a train task; add tasks"):
        check_tasks(load_config(None, ["tasks.options={}", f"tasks.set={write_rows(tmp_path, kept)}"]))


def write_rows(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_set_of(folder: Path, rows: list[dict[str, str]]) -> dict[str, Task]:
    """Tasks by prompt."""
    family = SetFamily(open_set([str(write_rows(folder, rows))]), FilterConfig(), {})
    return {task.prompt: task for task in family.list_tasks()}


def test_sft_on_a_set_without_solutions_is_refused_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{number}=", "answer": "1", "task_type": "math"} for number in range(60)]
    settings = [f"out={tmp_path}", *FEW, *set_of(write_rows(tmp_path, rows)), "eval.tasks=1", "sft.heldout=1"]
    assert main(["train", str(TINY), *settings, "--dry-run"]) == 2
    assert "has no metadata.solution to train on; set sft.steps=0" in capsys.readouterr().err


def test_a_dry_run_warns_of_a_model_that_is_no_folder(tmp_path: Path, tasks: Path, caplog) -> None:
    settings = [f"out={tmp_path}", *FEW, *set_of(tasks), "policy.path=models/nosuch"]
    assert main(["train", str(TINY), *settings, "--dry-run"]) == 0
    assert "policy.path: there is no folder 'models/nosuch'; a dry run does not ask the hub for it" in caplog.messages


def test_runs_that_differ_in_their_reward_share_one_sft(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def f(completions, **rest):\n    return [{}] * len(completions)\n"
    for module, value in (("own_half", "0.5"), ("own_zero", "0.0")):
        place = write_reward(tmp_path, monkeypatch, module, body.format(value))
        train(tmp_path, *set_of(tasks), f"tasks.reward={place}", "steps=0")
        (tmp_path / "tiny-seed0").rename(tmp_path / module)
    assert len(list((tmp_path / "sft").iterdir())) == 1


def test_a_failed_start_leaves_no_run_directory(tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_reward(
        tmp_path, monkeypatch, "own_bad", "def f(completions, **rest):\n    return [2.0] * len(completions)\n"
    )
    with pytest.raises(ConfigError, match="rewards must be between 0 and 1"):
        train(tmp_path / "runs", *set_of(tasks), f"tasks.reward={place}")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sft"]


def test_a_run_ends_with_the_folder_of_its_model(tmp_path: Path, tasks: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train(tmp_path, *set_of(tasks), "steps=1")
    folder = run / "checkpoints" / "step-000001" / "policy"
    assert caplog.messages[-2] == f"model: {folder}" and (folder / "config.json").exists()


@pytest.mark.parametrize(
    "value",
    [
        *("[1.5, 0.5]", "[-0.1, 0.5]", "[float('nan'), 0.5]", "[float('inf'), 0.5]", "[None, 0.5]", "[0.5]", "None"),
        *(
            "0.5",
            "'11'",
            "['1', '0']",
            "{0: 0.9, 1: 0.8}",
            "{0.25, 0.5}",
            "[10**400, 0.5]",
            "[1j, 0.5]",
            "[[1, 0], 0.5]",
        ),
        *("torch.tensor(0.5)", "torch.ones(2, 2)", "torch.tensor([0.5, float('nan')])", "(x for x in (1, 0))"),
    ],
)
def test_a_reward_that_is_no_number_from_0_to_1_ends_the_run_with_a_sentence(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    family = open_reward(tmp_path, tasks, monkeypatch, value)
    with pytest.raises(
        ConfigError, match=r"tasks\.reward: own_\w+:f returned .* for (the completion 'a'|the completion 'b'|2 compl)"
    ):
        family.score_many(family.make_task(random.Random(1)), ["a", "b"])


@pytest.mark.parametrize(
    "value", ["[True, False]", "(1, 0)", "torch.tensor([1.0, 0.0])", "torch.tensor([[1.0], [0.0]])"]
)
def test_a_reward_may_be_any_number(tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    family = open_reward(tmp_path, tasks, monkeypatch, value)
    found = family.score_many(family.make_task(random.Random(1)), ["a", "b"])
    assert [score.value for score in found] == [1.0, 0.0]


def open_reward(folder: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> RewardFamily:
    """A set with a reward function that returns a constant."""
    name = f"own_{hashlib.sha256(value.encode()).hexdigest()[:9]}"
    (folder / f"{name}.py").write_text(f"import torch\ndef f(completions):\n    return {value}\n")
    monkeypatch.syspath_prepend(str(folder))
    return cast(RewardFamily, open_family(TasksConfig(set=[str(tasks)], reward=f"{name}:f")))


@pytest.mark.parametrize(
    ("weights", "values", "reason"),
    [
        ("[1.0, -0.5]", "1.0, 1.0", "weights"),  # a penalty that was left out trained the opposite of what was meant
        ("[1.0, float('nan')]", "1.0, 1.0", "weights"),
        ("[1.0, 1.0]", "2.0, 0.0", "returned 2"),  # hidden by the mean
        ("[1.0, 1.0]", "None, 0.0", "returned 'None'"),
    ],
)
def test_no_reward_or_weight_of_a_rubric_is_changed_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, values: str, reason: str
) -> None:
    name = f"own_{hashlib.sha256((weights + values).encode()).hexdigest()[:9]}"
    (tmp_path / f"{name}.py").write_text(
        f"from types import SimpleNamespace\nfirst, second = {values}\n"
        "funcs = [lambda completion: first, lambda completion: second]\n"
        f"rubric = SimpleNamespace(funcs=funcs, weights={weights})\n"
        "world = SimpleNamespace(dataset=[{'question': '1', 'answer': '1'}], rubric=rubric)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        score_first(f"{name}:world")


def score_first(place: str) -> None:
    family = load_environment(place)
    score_texts(family, family.make_task(random.Random(1)), ["1"])


def test_an_exception_of_an_environment_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from types import SimpleNamespace\nrubric = SimpleNamespace(funcs=[lambda completion: float(completion)])\n"
        "f = SimpleNamespace(dataset=[{'question': '1', 'answer': '1'}], rubric=rubric)\n"
    )
    place = write_reward(tmp_path, monkeypatch, "own_raising_world", text)
    family = load_environment(place)
    task = family.make_task(random.Random(1))
    with pytest.raises(ValueError, match="could not convert") as caught:
        score_texts(family, task, ["1", "x"])
    what = f"tasks.environment: {place} raised ValueError for task {task.id}"
    assert caught.value.__notes__ == [f"{what}, 2 completions such as '1', 'x'"]


@pytest.mark.parametrize("use", ["import own_core as core\nf = core.f", "from own_core import f"])
def test_code_that_a_reward_function_uses_belongs_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_core", raising=False)
    name = f"own_user_{len(use)}"
    core, user = tmp_path / "own_core.py", tmp_path / f"{name}.py"
    core.write_text("def f(completions):\n    return [0.5] * len(completions)\n")
    user.write_text(use + "\n")
    before = hash_source("tasks.reward", f"{name}:f")
    core.write_text(core.read_text().replace("0.5", "0.25"))
    assert hash_source("tasks.reward", f"{name}:f") != before


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
        ("tasks.reward=json:close", r"^tasks\.reward: 'json:close' cannot be imported"),
        ("tasks.reward=rewards.py:close", r"^tasks\.reward: 'rewards.py:close' names a file; write rewards:close"),
        ("tasks.reward=./own/rewards.py:close", "write own.rewards:close"),
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
