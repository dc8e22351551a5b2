"""The offline filter: pass rates by model, the same however often it was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config.run import PolicyConfig, TinyConfig
from shoal.errors import ConfigError
from shoal.policy.model import load_policy, save_policy
from shoal.tasks.families.sort import Sort
from shoal.tasks.sets.sources import open_set
from shoal.tasks.verify.family import FamilyVerifier
from shoal.train.offline_filter import FilterPlan, FilterProgress, FilterReport, run_filter

PLACE = "family:sort:24"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy; it sorts some single digits by luck."""
    folder = tmp_path_factory.mktemp("model") / "lucky"
    tiny = TinyConfig(layers=1, width=16, heads=1, kv_heads=1, context=48)
    save_policy(load_policy(PolicyConfig(tiny=tiny), alphabet=Sort().alphabet, seed=1), folder)
    return folder


@pytest.fixture
def make_plan(model: Path, tmp_path: Path) -> Callable[..., FilterPlan]:
    def make(name: str = "out.jsonl", **changes: object) -> FilterPlan:
        (tmp_path / "tasks.jsonl").write_text("".join(_spell_task(number) for number in range(20)))
        fields: dict[str, object] = {"k": 4, "max_tokens": 3, "slots": 16}
        return FilterPlan(
            places=(str(tmp_path / "tasks.jsonl"),), model=str(model), out=tmp_path / name, **fields | changes
        )

    return make


def _spell_task(number: int) -> str:
    """For even tasks any completion without a second `=` is right, for odd tasks none."""
    rules = {"answer": "x"} if number % 2 else {"answer": ""}
    info = {"family": "sort", "info": rules}
    prompt = "1" * (80 if number == 19 else 1 + number) + "="
    return json.dumps({"id": f"t{number:02d}", "task_type": "family", "prompt": prompt, "info": info}) + "\n"


def test_every_task_gets_a_rate_and_keeps_its_place(make_plan) -> None:
    plan = make_plan()
    progress: list[FilterProgress] = []
    report = run_filter(plan, progress.append)
    before, after = open_set(plan.places), open_set([str(plan.out)])
    assert [record.id for record in after.records] == [record.id for record in before.records]
    rates = {record.id: record.difficulty.get("lucky") for record in after.records}
    assert rates.pop("t19") is None and report.num_skipped == 1, "its prompt leaves no room in the context"
    assert all(rate is not None and rate * 4 == int(rate * 4) for rate in rates.values())
    assert report.hash == after.hash and sum(report.counts) == 19
    assert progress[-1].done == progress[-1].total == 19 and report.num_tokens > 0
    assert (plan.out.with_name("out.jsonl.report.txt")).read_text() == report.to_text()
    assert plan.out.with_name("out.jsonl.report.png").read_bytes().startswith(b"\x89PNG")


def test_the_result_does_not_depend_on_slots_or_on_where_it_was_cut(make_plan) -> None:
    whole = run_filter(make_plan("whole.jsonl", slots=64))

    class CutError(Exception):
        pass

    def cut(progress: FilterProgress) -> None:
        if progress.done >= 8:
            raise CutError

    plan = make_plan("cut.jsonl", slots=8)
    with pytest.raises(CutError):
        run_filter(plan, cut)
    with plan.work.open("ab") as file:
        file.write(b'{"id": "t1')  # killed in the middle of a line
    progress: list[FilterProgress] = []
    assert run_filter(plan, progress.append) == whole
    assert progress[0].done > 8 and plan.out.read_bytes() == plan.out.with_name("whole.jsonl").read_bytes()
    assert run_filter(plan, lambda _: pytest.fail("nothing is measured twice")) == whole


def test_a_work_file_of_something_else_is_refused(make_plan) -> None:
    run_filter(make_plan())
    for changes, key in (({"k": 2}, "k"), ({"seed": 1}, "seed"), ({"max_tokens": 2}, "max_tokens")):
        with pytest.raises(ConfigError, match=f"started with another {key}"):
            run_filter(make_plan(**changes))
    make_plan().work.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="not a work file"):
        run_filter(make_plan())


def test_scores_of_another_verifier_are_not_mixed_in(make_plan, monkeypatch) -> None:
    run_filter(make_plan())
    monkeypatch.setattr(FamilyVerifier, "version", FamilyVerifier.version + 1)
    with pytest.raises(ConfigError, match="started with another verifiers"):
        run_filter(make_plan())


def test_rates_of_other_models_stay(make_plan) -> None:
    first = make_plan()
    run_filter(first)
    second = FilterPlan(
        places=(str(first.out),),
        model=first.model,
        out=first.out.with_name("two.jsonl"),
        name="other",
        k=2,
        max_tokens=3,
    )
    run_filter(second)
    assert all(set(record.difficulty) == {"lucky", "other"} for record in open_set([str(second.out)]).records[:19])


def test_the_report_counts_what_the_bounds_keep() -> None:
    report = FilterReport(
        column="m", k=8, low=0.125, high=0.5, counts=(5, 1, 2, 0, 3, 4, 0, 0, 9), num_skipped=0, num_tokens=7, hash="h"
    )
    assert report.num_kept == 1 + 2 + 0 + 3
    text = report.to_text()
    assert "kept (*): 6 of 24 tasks, 25.0%, from 0.125 to 0.5" in text
    assert " 0.000         5  " in text and " 0.125 *       1  " in text


def test_a_killed_command_resumes_where_it_stopped(make_plan, tmp_path: Path) -> None:
    plan = make_plan()
    flags = ["filter", *plan.places, "--model", plan.model, "--k", "4", "--max-tokens", "3", "--slots", "4"]
    child = subprocess.Popen(
        [sys.executable, "-m", "shoal", *flags, "--out", str(plan.out), "--threads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (plan.work.exists() and plan.work.read_bytes().count(b"\n") > 2):
        assert child.poll() is None or plan.out.exists(), "it failed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    again = ["--slots", "16", "--out", str(plan.out), "--threads", "1"]
    assert main([*flags[:-2], *again]) == 0
    whole = make_plan("whole.jsonl")
    run_filter(whole)
    assert plan.out.read_bytes() == whole.out.read_bytes()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--k", "0"], "--k: must be 1 or more"),
        (["--min", "0.9"], "--min, --max"),
        (["--temperature", "0"], "--temperature"),
        (["--name", "a b"], "--name"),
        (["--out", "/"], "cannot be written"),
    ],
)
def test_a_mistake_is_reported_before_any_work(flags: list[str], reason: str, tmp_path: Path, capsys) -> None:
    out = [] if "--out" in flags else ["--out", str(tmp_path / "out.jsonl")]
    assert main(["filter", PLACE, "--model", "nowhere", *out, *flags]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
