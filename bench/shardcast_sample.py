"""The payload of bench/shardcast.py: a file of random bytes, and repeated runs with it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from blake3 import blake3

from common import OUT
from shardcast_processes import Reading

Runs = dict[str, list[Reading]]
Job = Callable[[Path], Reading]


@dataclass(frozen=True)
class Sample:
    """A file of random bytes in its own folder, and its hashes."""

    file: Path
    blake3: str
    sha256: str

    @property
    def num_bytes(self) -> int:
        return self.file.stat().st_size

    @property
    def scratch(self) -> Path:
        """Scratch folder of a run; removed after each run."""
        return self.file.parent.parent / "run"

    def check(self, copy: Path) -> None:
        """End the benchmark if a received file differs."""
        if hash_blake3(copy) != self.blake3:
            raise SystemExit(f"{copy}: wrong bytes")


@contextmanager
def make_sample(num_bytes: int) -> Iterator[Sample]:
    """Random bytes in a temporary folder on the disk of this repository; all runs use the same disk."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cast-", dir=OUT) as folder:
        file = Path(folder, "source", "file")
        file.parent.mkdir()
        with file.open("wb") as out:
            for _ in range(num_bytes >> 20):
                out.write(os.urandom(1 << 20))
        yield Sample(file, hash_blake3(file), hash_sha256(file))


def interleave(jobs: Mapping[str, Job], sample: Sample, rounds: int) -> Runs:
    """Readings of each job: all once, then all once more. Dirty pages of the previous job are flushed first."""
    runs: Runs = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            os.sync()
            runs[name].append(job(sample.scratch))
            shutil.rmtree(sample.scratch)
    return runs


def hash_blake3(path: Path) -> str:
    """BLAKE3 of a file, on all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def hash_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
