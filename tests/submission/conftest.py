"""Submissions to write and to spoil, and a jail that reads them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.redteam.footer import Footer
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.submission.bounds import Bounds
from shoal.submission.claims import Contents
from shoal.submission.jail import Jail, Limits
from shoal.submission.read import read_submission

BOUNDS = Bounds(max_rollouts=16, group_size=2, max_tokens=64, vocab_size=50, max_prompt_tokens=32, file_bytes=1 << 20)


@pytest.fixture(scope="session")
def bounds() -> Bounds:
    return BOUNDS


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """Builds a group of rollouts of given lengths."""

    def make(index: int, lengths: tuple[int, ...] = (3, 40), seed: int = 0) -> Group:
        rng = np.random.default_rng([index, seed])
        rollouts = tuple(
            Rollout(
                id=f"g{index}.{sample}",
                prompt_ids=np.array([1, 5, index % 50], dtype=np.int32),
                token_ids=rng.integers(0, 50, length, dtype=np.int32),
                logprobs=-rng.random(length, dtype=np.float32),
                finish=Finish.LENGTH if sample % 2 else Finish.STOP,
                versions=(VersionRange(4, 0, length),),
                temperature=0.7,
                seed=2**64 - 1 - sample,
            )
            for sample, length in enumerate(lengths)
        )
        scores = tuple(Score(sample % 4 / 3, f"reason {sample}") for sample in range(len(lengths)))
        return Group(index=index, task_id=f"sort-{index}", rollouts=rollouts, scores=scores)

    return make


@pytest.fixture(scope="session")
def make_proofs() -> Callable[..., dict[str, list[bytes]]]:
    """Builds bytes that could be the proofs of groups."""

    def make(groups: list[Group]) -> dict[str, list[bytes]]:
        rng = np.random.default_rng(1)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return {rollout.id: [rng.bytes(258) for _ in range(-(-rollout.num_tokens // 32))] for rollout in rollouts}

    return make


@pytest.fixture(scope="session")
def groups(make_group: Callable[..., Group]) -> list[Group]:
    return [make_group(3), make_group(5, (64, 1))]


@pytest.fixture(scope="session")
def good(groups: list[Group], make_proofs: Callable[..., dict[str, list[bytes]]]) -> bytes:
    """The bytes of an honest file."""
    from shoal.submission.write import encode_groups

    return encode_groups(groups, make_proofs(groups))


@dataclass(frozen=True)
class Desk:
    """A jail with a loop of its own."""

    jail: Jail
    runner: asyncio.Runner
    folder: Path

    def read(self, data: bytes, bounds: Bounds = BOUNDS) -> Contents:
        """What a file with these bytes claims."""
        path = self.folder / "file"
        path.write_bytes(data)
        return self.runner.run(read_submission(self.jail, path, bounds))


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Readers shared by all tests."""
    with asyncio.Runner() as runner:
        jail = Jail(limits=Limits(cpu_s=2, wall_s=60.0))
        yield Desk(jail, runner, tmp_path_factory.mktemp("desk"))
        runner.run(jail.close())


@pytest.fixture
def open_desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Opens a jail with limits or a boot of a test's own."""
    with asyncio.Runner() as runner:
        desks: list[Desk] = []

        def open_one(**options: Any) -> Desk:
            desks.append(Desk(Jail(**options), runner, tmp_path))
            return desks[-1]

        yield open_one
        for desk in desks:
            runner.run(desk.jail.close())


def same_contents(one: Contents, other: list[Group], proofs: dict[str, list[bytes]]) -> bool:
    """Whether a file says these groups and proofs, to the bit."""
    return [_spell_group(group) for group in one.groups] == [_spell_group(group) for group in other] and one.proofs == {
        name: tuple(own) for name, own in proofs.items()
    }


def _spell_group(group: Group) -> Any:
    return (
        group.index,
        group.task_id,
        group.scores,
        [
            replace(rollout, prompt_ids=np.zeros(0), token_ids=np.zeros(0), logprobs=np.zeros(0)).__repr__()
            + "".join(
                f"{array.dtype}{array.tobytes().hex()}"
                for array in (rollout.prompt_ids, rollout.token_ids, rollout.logprobs)
            )
            for rollout in group.rollouts
        ],
    )


@pytest.fixture
def footer(good: bytes) -> Footer:
    """An honest file, taken apart anew for each test."""
    return Footer(good)


@pytest.fixture(scope="session")
def take_apart() -> Callable[[bytes], Footer]:
    return Footer


@pytest.fixture(scope="session")
def is_same() -> Callable[..., bool]:
    return same_contents
