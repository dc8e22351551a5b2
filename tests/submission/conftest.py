"""Submissions to write and to corrupt, and parsers that read them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.redteam.behaviours.bad_files import ParquetFooter
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.submission.limits import SubmissionLimits
from shoal.submission.read import ParserPool, SubmissionContents, read_submission

BOUNDS = SubmissionLimits(
    max_rollouts=16, group_size=2, max_tokens=64, vocab_size=50, max_prompt_tokens=32, file_bytes=1 << 20
)


@pytest.fixture(scope="session")
def bounds() -> SubmissionLimits:
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
class Reader:
    """Parsers with their own event loop."""

    parsers: ParserPool
    runner: asyncio.Runner
    folder: Path

    @property
    def num_started(self) -> int:
        """Number of fork servers started so far."""
        return sum(process.num_started for process in self.parsers.sandboxes.processes)

    def read(self, data: bytes, bounds: SubmissionLimits = BOUNDS, **options: Any) -> SubmissionContents:
        """Read the claims of a file with these bytes."""
        path = self.folder / "file"
        path.write_bytes(data)
        return self.runner.run(read_submission(self.parsers, path, bounds, **options))


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Parsers shared by all tests."""
    with asyncio.Runner() as runner:
        parsers = ParserPool(cpu_s=2, wall_s=60.0)
        yield Reader(parsers, runner, tmp_path_factory.mktemp("reader"))
        runner.run(parsers.close())


@pytest.fixture
def open_reader(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    """Opens parsers with test-specific limits or programs."""
    with asyncio.Runner() as runner:
        readers: list[Reader] = []

        def open_one(**options: Any) -> Reader:
            readers.append(Reader(ParserPool(**options), runner, tmp_path))
            return readers[-1]

        yield open_one
        for reader in readers:
            runner.run(reader.parsers.close())


def same_contents(one: SubmissionContents, other: list[Group], proofs: dict[str, list[bytes]]) -> bool:
    """Whether a file contains exactly these groups and proofs."""
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
def footer(good: bytes) -> ParquetFooter:
    """An honest file, parsed again for each test."""
    return ParquetFooter(good)


@pytest.fixture(scope="session")
def take_apart() -> Callable[[bytes], ParquetFooter]:
    return ParquetFooter


@pytest.fixture(scope="session")
def is_same() -> Callable[..., bool]:
    return same_contents
