"""Publishing a version that is larger than the memory of every process that touches it.

    python bench/publish.py [--quick] [--json]

A synthetic version of 8 GiB in bf16 (quick: 256 MiB; 8 files) and one step after it (3 % of the elements changed by one
bit) go through real processes over loopback: two writers that write their rows of every tensor, the process that gives
complete files their names (a trainer's rank 0), an origin that publishes the growing folder, a relay, a client that
pulls through the relay, and a reader that compares every row of the pulled files with what was to be written, slice by
slice. Every process limits itself to 1 GB (10^9 bytes) of private writable memory (RLIMIT_DATA, which the kernel
enforces for heap and anonymous mappings; pages of files that are only read are not in it). Folders are on the disk of
TMPDIR, about five times the version's size.
    publish_peak_gb             largest resident memory of a process, GB; includes libraries and file pages
    main_peak_gb, writer_peak_gb, ...   the same by process
    write_s, write_next_s       from the first row to the last file's name, both versions
    announce_s, announce_next_s from there until the origin's manifest is complete
    overlap_share               share of the first version that the client had verified when its last file was complete
    pull_s, pull_next_s         from the last file's name until the client has the version
    delta_ratio                 second version / its delta in bytes
"""

import asyncio
import multiprocessing as mp
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import finish, parse_flags
from shoal.identity.keys import Key
from shoal.policy.weights import (
    RowRange,
    TensorSpec,
    WeightsLayout,
    WeightsReader,
    WeightsWriter,
    create_files,
    finish_file,
    plan_layout,
)
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.growing import open_growing
from shoal.shardcast.origin_service import open_origin
from shoal.shardcast.origin_watch import request_publish
from shoal.shardcast.relay import Relay

CAP_BYTES = 10**9
RUN = "publish"
NUM_RANKS = 2
CHANGED = 0.03
SCALE = 0.02
SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """Tensors of one shape."""

    num: int
    rows: int
    width: int
    per_file: int = 8

    @property
    def layout(self) -> WeightsLayout:
        shape = (self.rows, self.width)
        specs = [TensorSpec(f"model.layers.{number:03d}.weight", torch.bfloat16, shape) for number in range(self.num)]
        return plan_layout(specs, self.per_file * specs[0].size)

    @property
    def block_rows(self) -> int:
        """Rows that are made at once; never of two ranks."""
        return min(self.rows // NUM_RANKS, (1 << 22) // self.width)


FULL, QUICK = Size(64, 8192, 8192), Size(16, 8192, 1024, per_file=2)


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    size = QUICK if flags.quick else FULL
    with TemporaryDirectory(prefix="shoal-publish-") as name:
        figures = measure(size, Path(name))
    finish(flags, format_table(size, figures), figures)


def measure(size: Size, folder: Path, cap_bytes: int = CAP_BYTES) -> dict[str, float]:
    """Publish two versions, and measure."""
    limit_memory(cap_bytes)
    key = Key.generate()
    key.save(folder / "key")
    with Swarm(size, folder, cap_bytes) as swarm:
        first = swarm.publish(0)
        second = swarm.publish(1)
        swarm.check(0)
        swarm.check(1)
        peaks = swarm.stop()
    peaks = {f"{name}_peak_gb": value for name, value in (peaks | {"main": read_peak()}).items()}
    return {
        "publish_peak_gb": max(peaks.values()),
        "version_gb": sum(size.layout.sizes.values()) / 1e9,
        **peaks,
        "write_s": first["write_s"],
        "write_next_s": second["write_s"],
        "announce_s": first["announce_s"],
        "announce_next_s": second["announce_s"],
        "overlap_share": first["overlap_share"],
        "pull_s": first["pull_s"],
        "pull_next_s": second["pull_s"],
        "delta_ratio": second["ratio"],
    }


# Values


@cache
def make_base(count: int) -> tuple[Tensor, Tensor]:
    """Bits of bf16 weights, and which of them a step changes."""
    rng = np.random.Generator(np.random.SFC64(0))
    values = torch.from_numpy(rng.standard_normal(count, dtype=np.float32) * np.float32(SCALE))
    changed = torch.from_numpy(rng.random(count, dtype=np.float32) < CHANGED)
    return values.bfloat16().view(torch.int16), changed.to(torch.int16)


def make_rows(size: Size, name: str, first: int, version: int) -> Tensor:
    """A block of rows of a tensor."""
    number, block = int(name.split(".")[2]), first // size.block_rows
    values, changed = make_base(size.block_rows * size.width)
    values = values.roll(number * 7919 + block * 104729)
    if version:
        values ^= changed.roll(number * 6151 + block * 15485)
    return values.view(torch.bfloat16).reshape(size.block_rows, size.width)


# Processes


def limit_memory(cap_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes))


def read_peak() -> float:
    """Largest resident memory of this process so far, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM:"))


def run_process(pipe: Connection, cap_bytes: int, work: Callable[..., None], *args: Any) -> None:
    """A process: answers the pipe until None arrives, then reports its peak."""
    try:
        limit_memory(cap_bytes)
        torch.set_num_threads(1)
        work(pipe, *args)
        pipe.send(read_peak())
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))
        raise


def run_writer(pipe: Connection, size: Size, folder: Path, rank: int) -> None:
    """A rank: writes its rows of every tensor of a file."""
    layout, share = size.layout, size.rows // NUM_RANKS
    files = {file.name: file for file in layout.files}
    writer, current = None, -1
    while (order := pipe.recv()) is not None:
        version, name = order
        if version != current:
            writer, current = WeightsWriter(folder / f"v{version}", layout), version
        assert writer is not None
        for tensor in files[name].tensors:
            for first in range(rank * share, (rank + 1) * share, size.block_rows):
                rows = make_rows(size, tensor.spec.name, first, version)
                writer.write_rows(tensor.spec.name, first, rows)
        pipe.send(writer.close_file(name))


def run_origin(pipe: Connection, folder: Path) -> None:
    async def serve() -> None:
        key = Key.load(folder / "key")
        async with open_origin(folder / "origin", run=RUN, key=key) as service:
            watching = asyncio.create_task(service.run())
            pipe.send(str(service.server.url))
            await asyncio.to_thread(pipe.recv)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(serve())


def run_relay(pipe: Connection, folder: Path, url: str) -> None:
    async def serve() -> None:
        publisher = Key.load(folder / "key").public
        async with await Relay.open(folder / "relay", [url], run=RUN, publisher=publisher) as relay:
            pipe.send(str(relay.server.url))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def run_client(pipe: Connection, folder: Path, url: str) -> None:
    """Pulls the versions it is asked for; answers with the time and the bytes it held over time."""

    async def pull(client: ShardcastClient, version: int) -> dict[str, Any]:
        samples: list[tuple[float, int]] = []

        async def sample() -> None:
            while True:
                if (entry := client.store.find(version)) is not None:
                    samples.append((time.monotonic(), entry.full.have_bytes))
                await asyncio.sleep(SAMPLE_S)

        sampling = asyncio.create_task(sample())
        await client.pull(version)
        done = time.monotonic()
        sampling.cancel()
        entry = client.store.find(version)
        assert entry is not None
        delta = entry.full.layout.total if entry.delta is None else entry.delta.layout.total
        return {"done": done, "samples": samples, "ratio": entry.full.layout.total / delta}

    async def serve() -> None:
        publisher = Key.load(folder / "key").public
        async with await ShardcastClient.open(folder / "pulled", [url], run=RUN, publisher=publisher, keep=2) as client:
            while (version := await asyncio.to_thread(pipe.recv)) is not None:
                pipe.send(await pull(client, version))

    asyncio.run(serve())


def run_reader(pipe: Connection, size: Size, folder: Path) -> None:
    """Compares pulled versions with what was to be written, slice by slice."""
    while (version := pipe.recv()) is not None:
        with WeightsReader(folder / "pulled" / f"v{version}") as reader:
            assert reader.tensors == size.layout.tensors, "other tensors than were to be written"
            for name in reader.tensors:
                for first in range(0, size.rows, size.block_rows):
                    rows = reader.read_rows(name, first, first + size.block_rows)
                    wanted = make_rows(size, name, first, version)
                    assert torch.equal(rows.view(torch.int16), wanted.view(torch.int16)), f"{name}: other values"
        pipe.send(True)


class Swarm:
    """The processes."""

    def __init__(self, size: Size, folder: Path, cap_bytes: int) -> None:
        self._size, self._folder, self._cap = size, folder, cap_bytes
        self._processes: dict[str, tuple[Any, Connection]] = {}

    def __enter__(self) -> "Swarm":
        for rank in range(NUM_RANKS):
            self._start(f"writer_{rank}", run_writer, self._size, self._folder, rank)
        self._start("origin", run_origin, self._folder)
        self._start("relay", run_relay, self._folder, self._hear("origin"))
        self._start("client", run_client, self._folder, self._hear("relay"))
        self._start("reader", run_reader, self._size, self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self._processes.values():
            process.kill()
            process.join()

    def stop(self) -> dict[str, float]:
        """End all processes in the order opposite to that of their start; returns their peaks."""
        peaks = {}
        for name in reversed(self._processes):
            self._tell(name, None)
            peaks[name] = self._hear(name)
        return peaks

    def publish(self, version: int) -> dict[str, float]:
        """Write a version while it is published and pulled."""
        return asyncio.run(self._publish(version))

    def check(self, version: int) -> None:
        """Have every row of a pulled version compared."""
        self._tell("reader", version)
        self._hear("reader")

    async def _publish(self, version: int) -> dict[str, float]:
        self._tell("client", version)
        path, started = self._folder / f"v{version}", time.monotonic()
        with open_growing(path) as announce:
            announce(self._size.layout.sizes)
            publishing = asyncio.create_task(request_publish(self._folder / "origin", path, version))
            await asyncio.to_thread(self._write, path, version)
        written = time.monotonic()
        await publishing
        announced = time.monotonic()
        pulled = await asyncio.to_thread(self._hear, "client")
        held = [count for at, count in pulled["samples"] if at <= written]
        total = sum(self._size.layout.sizes.values())
        return {
            "write_s": written - started,
            "announce_s": announced - written,
            "pull_s": pulled["done"] - written,
            "overlap_share": max(held, default=0) / total,
            "ratio": pulled["ratio"],
        }

    def _write(self, path: Path, version: int) -> None:
        layout = self._size.layout
        create_files(path, layout)
        for file in layout.files:
            for rank in range(NUM_RANKS):
                self._tell(f"writer_{rank}", (version, file.name))
            ranges: list[RowRange] = [each for rank in range(NUM_RANKS) for each in self._hear(f"writer_{rank}")]
            finish_file(path, file, ranges)

    def _start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        here, there = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(target=run_process, args=(there, self._cap, work, *args), name=name)
        process.start()
        there.close()
        self._processes[name] = process, here

    def _tell(self, name: str, word: object) -> None:
        self._processes[name][1].send(word)

    def _hear(self, name: str) -> Any:
        answer = self._processes[name][1].recv()
        if isinstance(answer, RuntimeError):
            raise SystemExit(f"{name}: {answer}")
        return answer


def format_table(size: Size, figures: dict[str, float]) -> str:
    rows = [f"a version of {figures['version_gb']:.2f} GB in {len(size.layout.files)} files", ""]
    rows += ["| process | peak memory, GB |", "|---|---|"]
    peaks = {name.removesuffix("_peak_gb"): value for name, value in figures.items() if name.endswith("_peak_gb")}
    rows += [f"| {name} | {value:.2f} |" for name, value in peaks.items() if name != "publish"]
    rows += ["", "| | first version | the next, by delta |", "|---|---|---|"]
    for name, words in (("write", "written"), ("announce", "announced after that"), ("pull", "pulled after that")):
        rows.append(f"| {words}, s | {figures[f'{name}_s']:.1f} | {figures[f'{name}_next_s']:.1f} |")
    rows.append(f"\nThe client had {figures['overlap_share']:.0%} when the last file was complete; ")
    return "\n".join(rows) + f"the delta is 1/{figures['delta_ratio']:.1f} of the version."


if __name__ == "__main__":
    main()
