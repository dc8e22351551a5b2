"""Lossless deltas between checkpoints: size, speed, memory.

    python bench/delta.py [--quick] [--json]

Synthetic: 10^9 bf16 weights (quick: 2^26), N(0, 0.02), before and after one AdamW step. The step of an element is
lr m / sqrt(v), where the running mean m has the noise of beta1 = 0.9 and a signal of 0.6 of a gradient's noise: 0.55 lr
root mean square. Both are rounded once, from fp32 masters. Files are in the page cache; rates are bytes of the new
checkpoint per second, medians of rounds, alternating in one process. For comparison: the xor of the two files, and the
new file alone, both compressed by zstd at the same level, with the same blocks and threads.
    delta_ratio, delta_ratio_3e7, _3e6, _1e5    new checkpoint / delta in bytes; lr 1e-6 unless stated
    changed, changed_3e7, ...                   share of elements that the step changed
    xor_ratio, xor_ratio_3e7, ..., zstd_ratio   the same by xor + zstd and by zstd alone
    encode_gbs, xor_gbs, zstd_gbs               rates of encoding at lr 1e-6
    apply_gbs, copy_gbs                         applying until it is on disk, and a plain copy; lr 1e-6
    encode_cpu_gbs, apply_cpu_gbs, ...          the same by CPU time, independent of other load
    anon_mb                                     peak anonymous memory of the process while encoding and applying

Real: the demo of examples/sort.toml trained by this package, consecutive versions as trained (fp32) and cast to bf16,
at the demo's lr of 1e-4 and at 1e-6:
    real_fp32_ratio, real_bf16_ratio, real_bf16_changed, and the same with _1e6
"""

import filecmp
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common import OUT, ROOT, finish, mean, parse_flags
from shoal.shardcast.delta.delta import BlockWorkers, DeltaWriter, Scratch, apply_chain, encode_delta, read_range
from shoal.shardcast.delta.format import Block, list_blocks
from shoal.shardcast.delta.stream import ZSTD_LEVEL
from shoal.shardcast.delta.tensors import ElementSpan
from shoal.util.tensors import read_tensors

RATES = {"_3e7": 3e-7, "": 1e-6, "_3e6": 3e-6, "_1e5": 1e-5}
"""Learning rates by the suffix of their figures."""
REAL_RATES = {"": 1e-4, "_1e6": 1e-6}
SIGNAL, BETA, DECAY, SCALE = 0.6, 0.9, 0.01, 0.02
UPDATE_RMS = math.sqrt((SIGNAL**2 + (1 - BETA) / (1 + BETA)) / (1 + SIGNAL**2))
_CHUNK = 1 << 22
_STEPS = 6
_CODEC = pa.Codec("zstd", compression_level=ZSTD_LEVEL)


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    count = 1 << 26 if flags.quick else 10**9
    figures: dict[str, float] = {}
    with TemporaryDirectory(prefix="shoal-delta-") as name:
        folder = Path(name)
        write_weights(folder / "old", count, lr=0.0)
        for suffix, lr in RATES.items():
            write_weights(folder / "new", count, lr=lr)
            figures |= measure_step(folder, suffix)
            if lr == 1e-6:
                figures |= measure_rates(folder, rounds=3)
    for suffix, lr in REAL_RATES.items():
        figures |= measure_training(lr, suffix)
    finish(flags, format_table(figures), figures)


def write_weights(path: Path, count: int, *, lr: float) -> None:
    """A file of bf16 weights after a step; the same weights before it if the learning rate is 0."""
    with path.open("wb") as file:
        file.write(write_head({"w": ("BF16", [count], 2 * count)}))
        for index in range(-(-count // _CHUNK)):
            size = min(_CHUNK, count - index * _CHUNK)
            file.write(round_bf16(draw_weights(size, seed=index, lr=lr)))
        os.fsync(file.fileno())


def draw_weights(count: int, *, seed: int, lr: float) -> NDArray[np.float32]:
    """Weights after a step, in fp32."""
    rng = np.random.Generator(np.random.SFC64(seed))
    weights = rng.standard_normal(count, dtype=np.float32)
    weights *= SCALE
    if lr:
        step = rng.standard_normal(count, dtype=np.float32)
        step *= UPDATE_RMS
        step += DECAY * weights
        step *= lr
        weights -= step
    return weights


def round_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; for finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_head(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """The beginning of a safetensors file: tensors by name with type, shape and bytes."""
    head, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text


def measure_step(folder: Path, suffix: str) -> dict[str, float]:
    """Ratios of one step."""
    old, new, delta = (folder / name for name in ("old", "new", "delta"))
    stats = encode_file(old, new, delta)
    return {
        f"delta_ratio{suffix}": stats.ratio,
        f"changed{suffix}": stats.num_changed / stats.num_elements,
        f"xor_ratio{suffix}": stats.full_bytes / compress_file(old, new, _xor_block),
    }


def measure_rates(folder: Path, rounds: int) -> dict[str, float]:
    """Rates of all jobs in turn, medians over rounds, and peak memory."""
    old, new, delta, out = (folder / name for name in ("old", "new", "delta", "out"))
    jobs: dict[str, Callable[[], object]] = {
        "encode": partial(encode_file, old, new, delta),
        "xor": partial(compress_file, old, new, _xor_block),
        "zstd": partial(compress_file, old, new, _pack_block),
        "apply": partial(apply_chain, old, [delta], out),
        "copy": partial(shutil.copyfile, new, out),
    }
    seconds: dict[str, list[float]] = {name: [] for job in jobs for name in (job, f"{job}_cpu")}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            _recycle_memory(new, out)
            started = time.perf_counter(), time.process_time()
            job()
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - started[0])
                seconds[f"{name}_cpu"].append(time.process_time() - started[1])
    size = new.stat().st_size
    figures = {f"{name}_gbs": size / 1e9 / median(times) for name, times in seconds.items()}
    figures["zstd_ratio"] = size / compress_file(old, new, _pack_block)
    out.unlink()
    with watch_memory() as peak:
        jobs["encode"]()
        jobs["apply"]()
    figures["anon_mb"] = peak[0]
    assert filecmp.cmp(new, out, shallow=False), "the result is not bit-identical"
    out.unlink()
    return figures


def _recycle_memory(source: Path, out: Path) -> None:
    """Write and remove a file, so that every job finds free memory that was touched before.

    The first touch of memory is expensive on a virtual machine, and would affect whichever job comes first."""
    shutil.copyfile(source, out)
    out.unlink()


def encode_file(old: Path, new: Path, delta: Path) -> DeltaWriter:
    """Write a delta to a file."""
    with delta.open("wb") as file:
        return encode_delta(old, new, file)


def compress_file(old: Path, new: Path, work: Callable[[int, int, Scratch, Block], int]) -> int:
    """Compressed size of a whole file, with the blocks and threads of deltas."""
    sizes: list[int] = []
    with old.open("rb") as base, new.open("rb") as source, BlockWorkers(None) as workers:
        blocks = list_blocks((ElementSpan(1, new.stat().st_size, 0),))
        workers.run_jobs(partial(work, base.fileno(), source.fileno()), blocks, sizes.append)
    return sum(sizes)


def _xor_block(base: int, source: int, scratch: Scratch, block: Block) -> int:
    new = read_range(source, block.offset, block.size, scratch.block)
    new ^= read_range(base, block.offset, block.size, scratch.base)
    return int(_CODEC.compress(new[: block.size]).size)


def _pack_block(_: int, source: int, scratch: Scratch, block: Block) -> int:
    return int(_CODEC.compress(read_range(source, block.offset, block.size, scratch.block)[: block.size]).size)


@contextmanager
def watch_memory() -> Iterator[list[float]]:
    """Peak anonymous memory of this process in MB while the block runs, as a list of one number."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _read_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _read_anon() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))


def measure_training(lr: float, suffix: str) -> dict[str, float]:
    """Mean ratios over consecutive versions of a short run of the demo."""
    name = f"delta-lr{lr:g}"
    run = OUT / f"{name}-seed0"
    shutil.rmtree(run, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        str(ROOT / "examples" / "sort.toml"),
        f"name={name}",
        f"out={OUT}",
    ]
    command += [f"steps={_STEPS}", f"learner.lr={lr}", "checkpoint.every=1", f"checkpoint.keep={_STEPS}", "threads=1"]
    command += ["rollouts=false", "eval.every=0", "eval.tasks=16"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    versions = [path / "policy" / "model.safetensors" for path in sorted((run / "checkpoints").iterdir())]
    pairs = list(pairwise(versions))
    assert len(pairs) == _STEPS - 1, "a version is missing"
    exact = [encode_delta(old, new, io.BytesIO()) for old, new in pairs]
    for path in versions:
        cast_file(path)
    cast = [encode_delta(old, new, io.BytesIO()) for old, new in pairs]
    shutil.rmtree(run)
    return {
        f"real_fp32_ratio{suffix}": mean([stats.ratio for stats in exact]),
        f"real_bf16_ratio{suffix}": mean([stats.ratio for stats in cast]),
        f"real_bf16_changed{suffix}": mean([stats.num_changed / stats.num_elements for stats in cast]),
    }


def cast_file(path: Path) -> None:
    """Convert a safetensors file of fp32 tensors to bf16."""
    with path.open("rb") as file:
        tensors = read_tensors(file.fileno())
    assert tensors and all(tensor.dtype == "F32" for tensor in tensors), f"{path} is not a file of fp32 tensors"
    data = path.read_bytes()
    head = write_head({tensor.name: ("BF16", list(tensor.shape), tensor.size // 2) for tensor in tensors})
    path.write_bytes(head + round_bf16(np.frombuffer(data[tensors[0].offset :], dtype=np.float32)).tobytes())


def format_table(figures: dict[str, float]) -> str:
    rows = ["| lr | changed | full / delta | full / (xor + zstd) |", "|---|---|---|---|"]
    for suffix, lr in RATES.items():
        changed, ratio, xor = (figures[f"{name}{suffix}"] for name in ("changed", "delta_ratio", "xor_ratio"))
        rows.append(f"| {lr:g} | {changed:.2%} | {ratio:.1f} | {xor:.1f} |")
    rows += ["", "| job at lr 1e-6 | GB/s of full size | GB per CPU second |", "|---|---|---|"]
    for job in (name.removesuffix("_cpu_gbs") for name in figures if name.endswith("_cpu_gbs")):
        rows.append(f"| {job} | {figures[f'{job}_gbs']:.2f} | {figures[f'{job}_cpu_gbs']:.2f} |")
    rows += ["", "| trained here | changed, bf16 | full / delta, bf16 | full / delta, fp32 |", "|---|---|---|---|"]
    for suffix, lr in REAL_RATES.items():
        changed, ratio, exact = (
            figures[f"real_{name}{suffix}"] for name in ("bf16_changed", "bf16_ratio", "fp32_ratio")
        )
        rows.append(f"| lr {lr:g} | {changed:.2%} | {ratio:.1f} | {exact:.2f} |")
    return "\n".join([*rows, "", f"peak anonymous memory {figures['anon_mb']:.0f} MB"])


if __name__ == "__main__":
    main()
