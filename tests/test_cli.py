import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shoal import __version__
from shoal.cli import HEADINGS, list_commands, main
from shoal.commands.common import CommandResult
from shoal.config.run import RunConfig, load_config
from shoal.train.rundir import RunDir

Call = dict[str, Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # So that the subprocesses find the package from here, however the tests themselves found it.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "src"))
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the commands would have started, with stand-ins for the modules that need torch."""
    seen: list[Call] = []

    def run_training(config: RunConfig, *, fresh: bool, ranks: object) -> int:
        seen.append({"config": config, "fresh": fresh})
        return 0

    def run_sft(config: RunConfig, ranks: object) -> Path:
        seen.append({"config": config})
        return Path("warm")

    def run_eval(config: RunConfig, run: Path | None, *, json_path: Path | None, markdown_path: Path | None) -> int:
        seen.append({"config": config, "run": run, "json": json_path, "markdown": markdown_path})
        return 0

    def run_as_rank(device: str, work: Callable[[object], int]) -> int:
        return work(SimpleNamespace(announce=lambda name, **values: None))  # there are no other ranks

    stands = {"loop": [run_training], "sft": [run_sft], "eval": [run_eval], "resume": [run_as_rank]}
    for name, functions in stands.items():
        module = ModuleType(f"shoal.train.{name}")
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, f"shoal.train.{name}", module)
    return seen


def run_shell(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"


def test_without_a_command_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_help_fits_one_screen_and_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    named = [name for names in HEADINGS.values() for name in names]
    assert sorted(named) == sorted(command.name for command in list_commands())


def test_help_describes_every_command_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert "  train        train a policy on one machine, or resume the run\n" in shown
    assert "(publish, pull, tree, ticket)\n" in shown
    assert "..." not in shown and shown.count("unbond") == 1
    with pytest.raises(SystemExit):
        main(["help", "weights", "pull"])
    assert "usage: shoal weights pull" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["trian"], "did you mean `shoal train`?"),
        (["publish"], "did you mean `shoal weights publish`?"),
        (["ledger", "verfy"], "did you mean `shoal ledger verify`?"),
        (["export"], "already is a Hugging Face folder: runs/NAME/checkpoints/step-N/policy"),
        (["train", "--use_vllm", "true"], "use_vllm: not needed; rollouts come from shoal's own engine"),
        (["train", "--batch_size", "8"], "write batch.groups=8 (prompts per step; completions = groups x"),
        (["train", "--steps", "3"], "unknown flag --steps; write steps=3\n"),
        (["train", "--learner.lr=1"], "write learner.lr=1"),
        (["train", "--learning_rate", "1e-4", "--max-steps", "5"], "write learner.lr=1e-4, write steps=5"),
        (["train", "--config", "a.toml"], "write a.toml without --config"),
        (["train", "--dryrun"], "did you mean --dry-run?"),
        (["run", "a.toml", "--workers", "3"], "unknown flag --workers; write swarm.workers=3\n"),
        (["run", "a.toml", "--foo", "x"], "unknown flag --foo; no setting has a name like 'foo'\n"),
        (["run"], "the following arguments are required: CONFIG\n"),
        (["admin", "params"], "the following arguments are required: URL\n"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_right_one(
    args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and hint in capsys.readouterr().err


def test_settings_come_from_the_environment_and_the_command_line_wins(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_LEARNER__LR", "3e-4")
    monkeypatch.setenv("SHOAL_STEPS", "7")
    Path("a.toml").write_text("steps = 5\n[learner]\nlr = 1e-5\n[engine]\nmax_tokens = 9\n")
    assert main(["train", "a.toml", "steps=9"]) == 0
    config = calls[0]["config"]
    assert (config.steps, config.learner.lr, config.engine.max_tokens) == (9, 3e-4, 9)


def test_a_mistyped_variable_is_reported(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_LEARNER_LR", "3e-4")
    assert main(["train", "--dry-run"]) == 0
    assert (
        "SHOAL_LEARNER_LR is not a setting and is ignored; did you mean SHOAL_LEARNER__LR?" in capsys.readouterr().err
    )


def test_a_dry_run_of_a_finished_run_on_a_task_set_is_no_conflict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"prompt": f"{number}+1=", "task_type": "text_exact", "answer": str(number + 1)} for number in range(64)]
    Path("own.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    settings = ["train", 'tasks.set=["own.jsonl"]', "--dry-run"]
    assert main(settings) == 0
    printed = RunConfig.model_validate(tomllib.loads(capsys.readouterr().out))
    run = RunDir.open(printed)
    run.append_metrics(1, {})
    run.close()
    assert main(settings) == 0


def test_a_bad_value_in_the_environment_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_LEARNER__LR", "much")
    assert main(["train", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("shoal: learner.lr: must be a number")


def test_a_password_is_refused_on_the_command_line_and_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://shoal:hunter2@db/run"
    assert main(["coordinator", "--run", "r", "--database", url, "--dry-run"]) == 2
    assert "PGPASSWORD" in capsys.readouterr().err
    monkeypatch.setenv("SHOAL_DATABASE", url)
    assert main(["coordinator", "--run", "r", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "postgresql://shoal:***@db/run" in shown and "hunter2" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "leaderboard" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["tasks"], ["train", "--dry-run"]])
def test_what_needs_no_model_does_not_import_torch(args: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from shoal.cli import HEADINGS, list_commands, main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({args!r})
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def read_help(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_of_train_ends_with_the_groups_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    shown = read_help(capsys, "train", "--help")
    assert "shoal train --help GROUP" in shown and "learner.lr" not in shown.partition("settings:")[2]
    assert len(shown.splitlines()) < 50
    groups = {name for name, value in RunConfig().model_dump().items() if isinstance(value, dict)}
    assert {"general", *groups} <= {line.split()[0] for line in shown.splitlines() if line.strip()}


@pytest.mark.parametrize("args", [("train", "--help", "learner"), ("help", "train", "learner")])
def test_help_lists_the_settings_of_one_group(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    keys = [line.split()[0] for line in read_help(capsys, *args).splitlines()[1:] if not line.startswith(" ")]
    assert {"learner.lr", "learner.loss.name"} <= set(keys)
    assert all(key.startswith("learner.") for key in keys)


def test_help_lists_the_settings_of_a_subcommand_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_help(capsys, "help", "diloco", "train", "data").splitlines()[1].startswith("data.")


def test_help_explains_one_setting_and_those_without_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read_help(capsys, "train", "--help", "learner.lr").splitlines()) == 2
    assert "\nsteps " in read_help(capsys, "train", "--help", "general")


def test_an_unknown_group_of_settings_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help", "lerner"])
    assert ended.value.code == 2 and "did you mean learner? groups: general, policy," in capsys.readouterr().err


def test_settings_may_stand_on_both_sides_of_a_flag(calls: list[Call], folder: Path) -> None:
    (folder / "a.toml").write_text("seed = 3\n")
    assert main(["train", "a.toml", "steps=5", "--fresh", "learner.lr=0.5"]) == 0
    (call,) = calls
    assert (call["config"].seed, call["config"].steps, call["config"].learner.lr) == (3, 5, 0.5)
    assert call["fresh"]


def test_without_a_file_the_defaults_are_trained(calls: list[Call]) -> None:
    assert main(["train"]) == 0
    assert calls == [{"config": RunConfig(), "fresh": False}]


def test_the_exit_code_of_training_is_passed_on(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["shoal.train.loop"], "run_training", lambda config, fresh, ranks: 3)
    assert main(["train"]) == 3


def test_sft_prints_where_its_policy_is(calls: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "sft.steps=3"]) == 0
    assert calls[0]["config"].sft.steps == 3
    assert capsys.readouterr().out == "warm\n"


NO_RUN = "is not a run directory, it has no config.toml; to evaluate a checkpoint or model: shoal"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["train", "none.toml"], "shoal: none.toml: no such file\n"),
        (["train", "."], "shoal: .: is a directory, expected a TOML file\n"),
        (["train", "learner.lr=-3"], "shoal: learner.lr: must be greater than 0 and at most 1, got -3\n"),
        (["train", "seed=1", "oops"], "shoal: oops: expected key=value, for example learner.lr=1e-4\n"),
        (["eval", "--run", "none"], "shoal: none: no such run directory or config file\n"),
        (["eval", "seed=1", "--run", "none"], "shoal: none: no such run directory or config file\n"),
        (["eval", "runs/none"], "shoal: runs/none: no such run directory or config file\n"),
        (["eval", "."], f"shoal: .: {NO_RUN} eval RUN --models .\n"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(
    args: list[str], sentence: str, calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", sentence)
    assert calls == []


@pytest.mark.parametrize(
    "args",
    [["swim"], ["train", "--frsh"], ["train", "--dry"], ["tasks", "sort", "extra"], ["tasks", "--fresh"], ["--seed=1"]],
)
def test_a_wrong_flag_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "shoal" in capsys.readouterr().err


def test_an_unknown_family_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "swim"]) == 2
    assert "sort" in capsys.readouterr().err


def test_families_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    assert "\nsort " in capsys.readouterr().out
    assert main(["tasks", "sort"]) == 0
    assert "example prompt:" in capsys.readouterr().out


def test_a_dry_run_prints_settings_that_load_and_writes_nothing(
    calls: list[Call], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "sft", "eval"):
        assert main([command, "seed=4", "--dry-run"]) == 0
        printed = RunConfig.model_validate(tomllib.loads(capsys.readouterr().out))
        assert printed == RunConfig(seed=4)
    assert calls == [] and list(folder.iterdir()) == []


def test_a_dry_run_checks_task_and_sft_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tasks.options.fins=2", "--dry-run"]) == 2
    assert main(["train", "sft.options.fins=2", "--dry-run"]) == 2
    assert main(["train", "tasks.name=swim", "--dry-run"]) == 2
    assert capsys.readouterr().out == ""


def test_a_dry_run_is_refused_where_the_run_would_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.open(RunConfig())
    run.append_metrics(1, {})
    run.close()
    assert main(["train", "learner.lr=0.5", "--dry-run"]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    assert main(["train", "learner.lr=0.5", "--dry-run", "--fresh"]) == 0
    assert load_config(folder / "runs" / "sort-seed0" / "config.toml") == RunConfig()


def test_eval_of_a_run_directory_takes_its_settings(calls: list[Call]) -> None:
    run = RunDir.open(RunConfig(seed=6))
    run.append_metrics(1, {})
    run.close()
    same = str(run.path)
    for args in ([same], ["--run", same], ["seed=6"], ["seed=6", "--run", same]):
        assert main(["eval", *args, "--json", "out.json", "--markdown", "out.md"]) == 0
    assert (
        calls
        == [{"config": RunConfig(seed=6), "run": run.path, "json": Path("out.json"), "markdown": Path("out.md")}] * 4
    )


def test_eval_of_nothing_says_what_it_needs(calls: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    assert calls == [] and "shoal eval runs/latest" in capsys.readouterr().err


def test_eval_without_a_run_means_the_starting_policy(calls: list[Call]) -> None:
    assert main(["eval", "seed=0"]) == 0
    assert calls[0]["run"] is None


def test_an_interrupt_is_one_line_and_exit_code_130(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: RunConfig, fresh: bool, ranks: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["shoal.train.loop"], "run_training", interrupt)
    resumes = "\nshoal: interrupted; the same command resumes from the last checkpoint"
    assert main(["train", "-q"]) == 130
    assert capsys.readouterr().err == f"{resumes}\n"
    assert main(["train", "-q", "--fresh"]) == 130
    assert capsys.readouterr().err == f"{resumes}, without --fresh\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["node", "join", "http://a:1"], "; the node may not have joined yet, run the same command again"),
        (["node", "leave"], ""),
        (["status", "http://a:1"], ""),
    ],
)
def test_an_interrupted_command_says_what_holds_for_it_and_not_for_another(
    args: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(work: Coroutine[None, None, CommandResult], *, as_json: bool) -> int:
        work.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.commands.common.run_query", interrupt)
    assert main(args) == 130
    assert capsys.readouterr().err == f"\nshoal: interrupted{text}\n"


def test_our_own_bugs_are_not_dressed_up_as_mistakes(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig, fresh: bool, ranks: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(sys.modules["shoal.train.loop"], "run_training", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])


@pytest.mark.parametrize("args", [["tasks"], ["train", "--help"]])
def test_a_reader_that_goes_away_causes_no_traceback(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "shoal", *args],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert process.returncode in (0, 128 + signal.SIGPIPE)  # argparse takes no notice when it prints help
    assert process.stderr == ""


def test_the_command_works_in_a_shell() -> None:
    process = run_shell("train", "learner.lr=-3")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "shoal: learner.lr: must be greater than 0 and at most 1, got -3\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full here")
def test_a_full_disk_behind_what_is_printed_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "shoal", "tasks"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr.count("\n")) == (1, 1)
    assert process.stderr.startswith("shoal: cannot write the output (")


def test_a_sign_that_cannot_be_shown_costs_the_sign_alone() -> None:
    done = run_shell("train", "out=\u2603", "--dry-run", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and 'out = "\\u2603"' in done.stdout
