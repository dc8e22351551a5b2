import errno
import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from shoal.config.run import RunConfig, flatten_config, load_config
from shoal.errors import ConfigError
from shoal.train.rundir import RESUMABLE, RunDir, check_config, find_conflict, lock_dir, run_path


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(None, [f"out={tmp_path}/runs", "name=test", "seed=7"])


def change(config: RunConfig, *overrides: str) -> RunConfig:
    return load_config(None, [f"out={config.out}", "name=test", "seed=7", *overrides])


def begin_run(config: RunConfig) -> Path:
    """A run directory that holds one step's metrics and is no longer open."""
    run = RunDir.open(config)
    run.append_metrics(1, {"reward": 0.5})
    run.close()
    return run.path


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").open()]


def test_a_new_run_directory_holds_its_parts(config: RunConfig) -> None:
    run = RunDir.open(config)
    names = sorted(entry.name for entry in run.path.iterdir())
    assert names == [".lock", "checkpoints", "config.toml", "log.txt", "metrics.jsonl", "rollouts"]
    assert run.path == Path(config.out) / "test-seed7"
    assert load_config(run.path / "config.toml") == config
    assert not (Path(config.out) / "latest").exists()
    run.link()
    assert (Path(config.out) / "latest").resolve() == run.path.resolve()
    run.close()


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_path(RunConfig(out="~/r")) == tmp_path / "r" / "sort-seed0"


def test_the_same_configuration_opens_the_directory_again(config: RunConfig) -> None:
    path = begin_run(config)
    RunDir.open(config).close()
    assert len(read_metrics(path)) == 1


def test_another_configuration_is_refused_and_the_sentence_says_what_to_do(config: RunConfig) -> None:
    begin_run(config)
    with pytest.raises(ConfigError) as caught:
        RunDir.open(change(config, "learner.lr=0.5"))
    assert "other settings (learner.lr = 0.0001)" in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_many_differences_are_counted_not_listed(config: RunConfig) -> None:
    path = begin_run(config)
    other = change(config, "learner.lr=0.5", "batch.groups=2", "engine.slots=2", "eval.tasks=2", "tasks.options.x=1")
    assert "and 2 more" in (find_conflict(path, other) or "")


def test_a_refused_directory_can_be_opened_by_its_owner_at_once(config: RunConfig) -> None:
    begin_run(config)
    with pytest.raises(ConfigError):
        RunDir.open(change(config, "learner.lr=0.5"))
    RunDir.open(config).close()


def test_keys_that_change_no_step_may_change_on_resume(config: RunConfig) -> None:
    path = begin_run(config)
    longer = change(config, "steps=99", "eval.every=1", "checkpoint.every=3", "rollouts=false", "track.name=wandb")
    RunDir.open(longer).close()
    assert load_config(path / "config.toml") == longer


def test_every_resumable_key_exists() -> None:
    assert set(RESUMABLE) <= flatten_config(RunConfig()).keys()


def test_a_directory_without_results_takes_any_configuration(config: RunConfig) -> None:
    RunDir.open(config).close()
    other = change(config, "learner.lr=0.5")
    run = RunDir.open(other)
    assert load_config(run.path / "config.toml") == other
    run.close()


def test_results_without_a_configuration_are_refused(config: RunConfig) -> None:
    path = begin_run(config)
    (path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"a run but no config\.toml"):
        RunDir.open(config)


def test_a_configuration_of_another_version_is_refused(config: RunConfig) -> None:
    path = begin_run(config)
    (path / "config.toml").write_text("no_longer_known = 1\n")
    with pytest.raises(ConfigError, match="this version cannot read"):
        RunDir.open(config)


def test_fresh_moves_the_old_directory_aside_and_deletes_nothing(config: RunConfig) -> None:
    path = begin_run(config)
    for expected in ("test-seed7.old-1", "test-seed7.old-2"):
        run = RunDir.open(change(config, "learner.lr=0.5"), fresh=True)
        assert read_metrics(run.path) == []
        run.append_metrics(1, {})
        run.close()
        assert read_metrics(path.with_name(expected))[0]["step"] == 1


def test_fresh_on_nothing_moves_nothing(config: RunConfig) -> None:
    run = RunDir.open(config, fresh=True)
    assert sorted(entry.name for entry in run.path.parent.iterdir()) == ["test-seed7"]
    run.close()


def test_fresh_keeps_the_new_directory_locked(config: RunConfig) -> None:
    begin_run(config)
    run = RunDir.open(config, fresh=True)
    with pytest.raises(ConfigError, match="in use"):
        RunDir.open(config)
    run.close()


def test_a_directory_open_in_a_live_process_is_refused_with_its_pid_until_that_dies(config: RunConfig) -> None:
    code = """
        import sys, time
        from shoal.config.run import load_config
        from shoal.train.rundir import RunDir
        run = RunDir.open(load_config(None, sys.argv[1:]))
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), f"out={config.out}", "name=test", "seed=7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for fresh in (False, True):
            with pytest.raises(ConfigError, match=f"in use by process {process.pid};"):
                RunDir.open(config, fresh=fresh)
        process.send_signal(signal.SIGKILL)
    RunDir.open(config).close()


def test_closing_twice_is_harmless(config: RunConfig) -> None:
    run = RunDir.open(config)
    run.close()
    run.close()


def test_metrics_lines_carry_step_and_time(config: RunConfig) -> None:
    run = RunDir.open(config, clock=lambda: 1234.56789)
    run.append_metrics(3, {"reward": 0.25, "tokens": 12})
    assert read_metrics(run.path) == [{"step": 3, "time": 1234.568, "reward": 0.25, "tokens": 12}]
    run.close()


def test_values_json_lacks_become_null_and_are_counted(config: RunConfig) -> None:
    run = RunDir.open(config, clock=lambda: 0.0)
    run.append_metrics(1, {"a": math.nan, "b": -math.inf, "c": None, "d": cast(float, np.float32(0.5))})
    assert read_metrics(run.path) == [
        {"step": 1, "time": 0.0, "a": None, "b": None, "c": None, "d": 0.5, "nonfinite": 2}
    ]
    run.close()


def test_a_torn_metrics_line_is_cut_when_the_run_is_opened(config: RunConfig) -> None:
    path = begin_run(config)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    RunDir.open(config).close()
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_nothing_of_later_steps_remains_after_truncation(config: RunConfig) -> None:
    run = RunDir.open(config)
    for step in (0, 1, 2, 2, 3):
        run.append_metrics(step, {})
        run.rollouts_path(step).touch()
    (run.path / "rollouts" / "notes.txt").touch()
    run.truncate_after(2)
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1, 2, 2]
    names = sorted(file.name for file in (run.path / "rollouts").iterdir())
    assert names == ["notes.txt", "step-000000.parquet", "step-000001.parquet", "step-000002.parquet"]
    run.truncate_after(-1)
    assert read_metrics(run.path) == []
    run.close()


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"time": 1}', '{"step": null}'])
def test_a_foreign_line_among_the_metrics_is_named(config: RunConfig, line: str) -> None:
    path = begin_run(config)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    run = RunDir.open(config)
    with pytest.raises(ConfigError, match="line 2 is not a metrics line"):
        run.truncate_after(5)
    run.close()


def test_an_output_folder_that_is_a_file_is_refused(config: RunConfig) -> None:
    Path(config.out).write_text("")
    with pytest.raises(ConfigError, match="cannot be used for the run"):
        RunDir.open(config)


def test_checking_settings_writes_nothing(config: RunConfig) -> None:
    check_config(config)
    assert not Path(config.out).exists()
    path = begin_run(config)
    check_config(change(config, "steps=99"))
    assert load_config(path / "config.toml") == config
    with pytest.raises(ConfigError, match="other settings"):
        check_config(change(config, "learner.lr=0.5"))


def test_zero_threads_of_a_dry_run_fit_any_number(config: RunConfig) -> None:
    run = RunDir.open(config.model_copy(update={"threads": 2}))
    run.append_metrics(1, {})
    run.close()
    assert find_conflict(run.path, config.model_copy(update={"threads": 0})) is None
    assert "threads = 2" in str(find_conflict(run.path, config.model_copy(update={"threads": 1})))


def test_metrics_that_are_not_text_are_refused_with_a_sentence(config: RunConfig) -> None:
    run = RunDir.open(config)
    run.metrics_path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 1 is not a metrics line"):
        run.truncate_after(0)
    run.close()


def test_a_folder_that_cannot_be_created_is_a_mistake_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError) as caught:
        lock_dir(tmp_path / "worker")
    monkeypatch.undo()
    assert str(caught.value) == f"cannot create {tmp_path}/worker/: Permission denied"


def test_a_name_that_no_folder_can_have_is_a_mistake_of_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used as a folder"):
        lock_dir(tmp_path / ("a" * 300))
