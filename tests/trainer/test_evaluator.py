"""The evaluator of a trainer: each version that is due is evaluated once, from the versions written."""

import asyncio
import signal
from pathlib import Path

import pytest
from fake_swarm import FakeSwarm, make_config, run_life

from shoal.errors import ConfigError
from shoal.train.report import read_metrics
from shoal.train.rundir import lock_dir
from shoal.trainer.evaluator import Evaluator, find_next, list_awaited, read_evals, run_evaluator
from shoal.trainer.versions import list_due


@pytest.mark.parametrize(
    ("steps", "every", "due"),
    [(0, 10, [0]), (1, 0, [0, 1]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 10, [0, 3]), (2, 1, [0, 1, 2])],
)
def test_the_first_every_nth_and_the_last_version_are_due(
    tmp_path: Path, steps: int, every: int, due: list[int]
) -> None:
    assert list_due(make_config(tmp_path, f"steps={steps}", f"eval.every={every}")) == due


def test_an_evaluator_finds_what_shoal_train_finds_and_evaluates_nothing_twice(
    tmp_path: Path, swarm: FakeSwarm
) -> None:
    config = make_config(tmp_path, "eval.every=2")
    run = run_life(config, swarm).run.path
    seen: list[int] = []
    # Killed after the first: what it wrote stays, except for a torn line.
    first = Evaluator(config, run)
    assert first.evaluate_next() is not None and not first.is_done
    with (run / "eval.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert asyncio.run(run_evaluator(config, run, report=lambda version, _: seen.append(version))) == 0
    assert seen == [2, 4]
    lines = read_evals(run)
    assert [line["step"] for line in lines] == [0, 2, 4]
    theirs = {line["step"]: line for line in read_metrics(swarm.reference / "metrics.jsonl") if "eval/greedy" in line}
    for line in (lines[0], lines[2]):
        names = [name for name in line if name.startswith("eval/")]
        assert names and [line[name] for name in names] == [theirs[line["step"]][name] for name in names]
    before = (run / "eval.jsonl").read_bytes()
    assert asyncio.run(run_evaluator(config, run)) == 0
    assert (run / "eval.jsonl").read_bytes() == before


def test_a_version_that_is_due_stays_until_it_is_evaluated(tmp_path: Path, swarm: FakeSwarm) -> None:
    config = make_config(tmp_path, "eval.every=1")
    swarm.served_keep = 0
    run = run_life(config, swarm).run.path
    assert list_awaited(config, run) == [0, 1, 2, 3, 4]
    assert find_next(config, run) == 0
    assert all((run / "versions" / f"v{version:06d}").is_dir() for version in range(5))


def test_an_evaluator_that_is_stopped_says_how_to_resume(tmp_path: Path, log) -> None:
    async def stop_soon() -> None:
        evaluating = asyncio.create_task(run_evaluator(make_config(tmp_path), tmp_path / "run"))
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        assert await evaluating == 0

    asyncio.run(stop_soon())
    assert log.messages[-1] == "stopped; the same command resumes"


def test_one_evaluator_at_a_time(tmp_path: Path) -> None:
    lock = lock_dir(tmp_path / "evaluator")
    assert lock >= 0
    with pytest.raises(ConfigError, match="in use by process"):
        asyncio.run(run_evaluator(make_config(tmp_path), tmp_path))
