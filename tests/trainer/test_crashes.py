"""A trainer that dies at any point, and its successor that resumes to the same bits as `shoal train`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_swarm import CrashError, FakeSwarm, Life, assert_whole, make_config, run_life

POINTS = ("before hand-over", "after hand-over", "before announcement", "after announcement")
VERSIONS = [(0, 1), (1, 1), (4, 1), (1, 3), (4, 3)]
"""which version is being published, and the number of steps between checkpoints: either it has a checkpoint, or an
earlier version has (v0 always has one)"""


@pytest.mark.parametrize(("number", "every"), VERSIONS)
@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_that_dies_while_publishing_resumes_as_if_nothing_had_happened(
    tmp_path: Path, swarm: FakeSwarm, point: str, number: int, every: int
) -> None:
    config = make_config(tmp_path, f"checkpoint.every={every}")
    reach, met = swarm.reach, 0

    def die_at_version(name: str) -> None:
        nonlocal met
        if name == point:
            met += 1
            if met == number + 1:
                raise CrashError(name)
        reach(name)

    swarm.reach = die_at_version  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        run_life(config, swarm)
    run = run_life(config, swarm).run.path
    assert_whole(run, swarm)


@pytest.mark.parametrize("place", ["train_step", "write", "record", "save", "enqueue"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_trainer_that_dies_in_a_step_repeats_it_with_the_same_bits(
    tmp_path: Path, swarm: FakeSwarm, place: str, every: int
) -> None:
    config = make_config(tmp_path, f"checkpoint.every={every}")

    async def die() -> None:
        life = Life(config, swarm)
        owners: dict[str, tuple[Any, str]] = {
            "train_step": (life.trainer._state.learner, "train_step"),
            "write": (life.versions, "write"),
            "enqueue": (life.publisher, "enqueue"),
            "record": (life.trainer, "_record"),
            "save": (life.trainer, "_save"),
        }
        owner, name = owners[place]
        call = getattr(owner, name)

        def crash(*args: Any) -> Any:
            result = call(*args)
            if life.trainer.step >= 2:
                raise CrashError(place)
            return result

        object.__setattr__(owner, name, crash)
        await life.go()

    with pytest.raises(CrashError):
        asyncio.run(die())
    assert_whole(run_life(config, swarm).run.path, swarm)
