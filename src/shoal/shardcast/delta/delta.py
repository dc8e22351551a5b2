"""Lossless deltas between checkpoints: one file that turns the old one into the new one, bit for bit.

    with path.open("wb") as out:
        stats = encode_delta(old, new, out)
    apply_chain(old, [path], rebuilt)       # or the deltas of several versions, in order

A checkpoint is a folder of files or a single file. Elements are compared as bit patterns, so the meaning of the numbers
does not matter (codec.py); the file format is in format.py. A few threads encode and apply blocks.

Invariants:
- the same checkpoints give the same delta: results are written in the order of the blocks, whatever the threads do;
- memory is bounded by the number of threads, whatever the size of the files. Buffers are allocated once, since the
  first touch of fresh memory is expensive;
- when `run_jobs` returns or raises, no job is running: files may be closed;
- applying never touches the old checkpoint, and leaves nothing behind if it fails;
- whatever a delta contains, applying it ends, in a new checkpoint or in a `DeltaError`. Only a disk error raises
  something else (`OSError`). The caller must check the result by its hash: the checksums here detect a wrong parent
  early, but do not withstand a forger.
"""

import io
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.shardcast.delta import codec
from shoal.shardcast.delta import format as delta_format
from shoal.shardcast.delta.codec import Elements, EncodedBlock
from shoal.shardcast.delta.format import Block, BlockRecord, FileEntry, Header, count_blocks, list_blocks
from shoal.shardcast.delta.stream import Bytes, count_bytes
from shoal.shardcast.delta.tensors import ElementSpan, plan_spans
from shoal.shardcast.errors import DeltaError
from shoal.shardcast.format.layout import check_name
from shoal.shardcast.store.writer import write_at

MAX_THREADS = 4
"""Default maximum number of threads: enough for any disk, and less than 150 MB in the worst case."""
_AHEAD = 2
"""Jobs in addition to one per thread that may wait to be run or collected."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class Scratch:
    """Buffers for one block."""

    def __init__(self) -> None:
        self.base: Bytes = np.zeros(codec.BLOCK_BYTES, dtype=np.uint8)
        self.block: Bytes = np.zeros(codec.BLOCK_BYTES, dtype=np.uint8)
        self.changed: NDArray[np.bool_] = np.zeros(codec.BLOCK_ELEMENTS, dtype=np.bool_)


class BlockWorkers:
    """Threads that run jobs on blocks, each with its own scratch buffers."""

    def __init__(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._idle = [Scratch() for _ in range(self._threads)]
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="shoal-delta")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def run_jobs(
        self, work: Callable[[Scratch, Job], Result], jobs: Iterable[Job], emit: Callable[[Result], object]
    ) -> None:
        """Run jobs in order, several at a time, and return their results in order."""
        pending: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                pending.append(self._pool.submit(self._run_job, work, job))
                if len(pending) == self._threads + _AHEAD:
                    emit(pending.popleft().result())
            while pending:
                emit(pending.popleft().result())
        finally:
            for future in pending:
                future.cancel()
            wait(pending)

    def _run_job(self, work: Callable[[Scratch, Job], Result], job: Job) -> Result:
        scratch = self._idle.pop()  # there are as many as threads
        try:
            return work(scratch, job)
        finally:
            self._idle.append(scratch)


def read_range(descriptor: int, offset: int, size: int, buffer: Bytes) -> Bytes:
    """Fill the front of a buffer from a file, and return that much of it, zero-padded to a multiple of 8 bytes."""
    done = 0
    while done < size:
        count = os.preadv(descriptor, [buffer.data[done:size]], offset + done)
        if count == 0:
            raise DeltaError("a file of the checkpoint became shorter while it was read")
        done += count
    padded = buffer[: pad_size(size)]
    padded[size:] = 0
    return padded


def pad_size(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // 8) * 8


Sources = dict[str, tuple[Path | None, Path]]
"""Files of the new checkpoint by name, each with the file of the old checkpoint that it replaces."""
_ONLY_FILE = "checkpoint"
"""Name, inside a delta, of a checkpoint that is a single file."""
_SAMPLE_BLOCKS = 16
"""Number of blocks, spread over the checkpoint, for estimating the size of a delta."""
_SAMPLED_FROM = 64
"""Checkpoints with fewer blocks are encoded without an estimate."""


@dataclass(frozen=True, slots=True)
class BlockPatch:
    """The change of a block by one delta."""

    delta: int
    """descriptor of its file"""
    block: Block
    record: BlockRecord


@dataclass(slots=True)
class DeltaWriter:
    """Writes the blocks of a delta, and counts the savings."""

    out: BinaryIO = field(compare=False, repr=False)
    delta_bytes: int = 0
    full_bytes: int = 0
    num_elements: int = 0
    num_changed: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller than the checkpoint the delta is."""
        return self.full_bytes / self.delta_bytes

    def add_block(self, result: tuple[Block, int, EncodedBlock]) -> None:
        block, checksum, encoded = result
        length = count_bytes(encoded.parts)
        head = delta_format.pack_block(encoded.form, checksum, length)
        for part in (head, *encoded.parts):
            self.out.write(part)
        self.delta_bytes += len(head) + length
        self.full_bytes += block.size
        self.num_elements += block.count
        self.num_changed += encoded.num_changed


class UselessDeltaError(DeltaError):
    """The delta would not be small enough to be useful."""


def encode_delta(
    old: Path, new: Path, out: BinaryIO, *, threads: int | None = None, max_share: float | None = None
) -> DeltaWriter:
    """Write the delta that turns `old` into `new`. Neither may change meanwhile. Threads: by default one per core, at
    most 4.

    With `max_share`, raises `UselessDeltaError` before anything is written if a sample of blocks predicts a delta
    larger than that share of the checkpoint. The prediction is not a guarantee: a caller that needs a hard limit must
    count bytes, too.
    """
    sources = _list_sources(old, new)
    header = Header(new.is_dir(), tuple(_plan_file(name, *paths) for name, paths in sources.items()))
    with BlockWorkers(threads) as workers:
        num_blocks = sum(count_blocks(file.spans) for file in header.files)
        if max_share is not None and num_blocks >= _SAMPLED_FROM:
            sample = DeltaWriter(io.BytesIO())
            _encode_blocks(workers, header, sources, sample, step=num_blocks // _SAMPLE_BLOCKS)
            if sample.delta_bytes > max_share * sample.full_bytes:
                raise UselessDeltaError(f"the delta would be {1 / sample.ratio:.0%} of the checkpoint")
        writer = DeltaWriter(out, delta_format.write_header(out, header))
        _encode_blocks(workers, header, sources, writer)
    return writer


def apply_chain(
    old: Path,
    deltas: Sequence[Path],
    out: Path,
    *,
    threads: int | None = None,
    max_bytes: int | None = None,
    halt: threading.Event | None = None,
) -> None:
    """Write the new checkpoint to `out`, which must not exist, by deltas of which each applies to the previous result.

    A delta that would produce more than `max_bytes` is refused before anything is written. Syncing the result to disk
    is left to the caller.

    One pass: every block goes through all deltas in memory, and intermediate results are never written. So all deltas
    must cut the checkpoint into the same blocks, as those of one model do; otherwise it is a `DeltaError`. Setting
    `halt` ends it early, also with a `DeltaError`.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(delta.open("rb")) for delta in deltas]
        headers = [delta_format.read_header(source) for source in sources]
        header = headers[0]
        if max_bytes is not None and header.size > max_bytes:
            raise DeltaError(f"the delta would produce {header.size} bytes, the maximum is {max_bytes}")
        _check_parent(old, header)
        for later in headers[1:]:
            alike = header.folder == later.folder and len(header.files) == len(later.files)
            if not alike or not all(map(_continues, header.files, later.files)):
                raise DeltaError("the deltas use different blocks and cannot be applied together")
        with BlockWorkers(threads) as workers, _new_target(out, header):
            for number, file in enumerate(header.files):
                base_path = None if file.parent is None else _path_in(old, header, file)
                with _open_file(base_path) as base, _open_file(_path_in(out, header, file), write=True) as target:
                    spans = [other.files[number].spans for other in headers]
                    workers.run_jobs(
                        partial(_apply_job, base, target), _list_links(sources, spans, halt), lambda _: None
                    )
            if any(source.read(1) for source in sources):
                raise DeltaError("the delta is damaged: extra data after its last block")


def _continues(first: FileEntry, later: FileEntry) -> bool:
    """Whether the blocks of the later file are, one by one, made from the blocks of the first."""
    if (first.name, first.size) != (later.name, later.size) or later.parent not in (None, first.size):
        return False
    cuts = [[(block.offset, block.width, block.count) for block in list_blocks(file.spans)] for file in (first, later)]
    return cuts[0] == cuts[1] and all(block.base in (None, block.offset) for block in list_blocks(later.spans))


def _list_links(
    sources: Sequence[BinaryIO], spans: Sequence[tuple[ElementSpan, ...]], halt: threading.Event | None
) -> Iterator[list[BlockPatch]]:
    """For every block of a file, the changes by the deltas in order."""
    for blocks in zip(*map(list_blocks, spans), strict=True):
        if halt is not None and halt.is_set():
            raise DeltaError("stopped")
        yield [
            BlockPatch(source.fileno(), block, delta_format.read_block(source))
            for source, block in zip(sources, blocks, strict=True)
        ]


def _encode_blocks(workers: BlockWorkers, header: Header, sources: Sources, writer: DeltaWriter, step: int = 1) -> None:
    """Encode every block, or one in `step`."""
    skip = 0
    for file, (old_path, new_path) in zip(header.files, sources.values(), strict=True):
        with _open_file(old_path if file.parent is not None else None) as base, _open_file(new_path) as source:
            blocks = islice(list_blocks(file.spans), skip, None, step)
            workers.run_jobs(partial(_encode_job, base, source), blocks, writer.add_block)
        skip = (skip - count_blocks(file.spans)) % step


def _encode_job(base: int, source: int, scratch: Scratch, block: Block) -> tuple[Block, int, EncodedBlock]:
    new = _as_elements(read_range(source, block.offset, block.size, scratch.block), block)
    if block.base is None:
        return block, 0, codec.encode_fresh(new)
    padded = read_range(base, block.base, block.size, scratch.base)
    changed = scratch.changed[: pad_size(block.count)]
    return block, codec.sum_block(padded), codec.encode_block(_as_elements(padded, block), new, changed)


def _apply_job(base: int, target: int, scratch: Scratch, links: Sequence[BlockPatch]) -> None:
    block = links[0].block
    if block.base is not None:
        read_range(base, block.base, block.size, scratch.base)
    for link in links:
        _apply_link(scratch, link)
    write_at(target, scratch.base[: block.size].data, block.offset)


def _apply_link(scratch: Scratch, link: BlockPatch) -> None:
    """Apply a delta to the block in `scratch.base`."""
    block, record = link.block, link.record
    padded = scratch.base[: pad_size(block.size)]
    padded[block.size :] = 0
    if block.base is not None:
        if codec.sum_block(padded) != record.checksum:
            raise DeltaError("the delta is for a different parent, or the parent is damaged")
    elif record.form != codec.BlockEncoding.FRESH or record.checksum:
        raise DeltaError("the delta is damaged: a block needs a parent that does not exist")
    codec.decode_block(record.form, delta_format.read_payload(link.delta, record), _as_elements(scratch.base, block))


def _as_elements(padded: Bytes, block: Block) -> Elements:
    return padded[: block.size].view(f"<u{block.width}")


def _list_sources(old: Path, new: Path) -> Sources:
    for path in (old, new):
        if not path.exists():
            raise DeltaError(f"{path}: no such checkpoint")
    if old.is_dir() != new.is_dir():
        raise DeltaError(f"{old} and {new}: one is a folder and one a file")
    if not new.is_dir():
        return {_ONLY_FILE: (old, new)}
    sources: Sources = {}
    for path in sorted(new.iterdir(), key=lambda path: path.name):
        if not path.is_file():
            raise DeltaError(f"{path}: not a file; a checkpoint may contain only files")
        try:
            parent = old / check_name(path.name)
        except ValueError as error:
            raise DeltaError(f"{path}: {error}") from error
        sources[path.name] = (parent if parent.is_file() else None, path)
    return sources


def _plan_file(name: str, old: Path | None, new: Path) -> FileEntry:
    with _open_file(old) as base, _open_file(new) as source:
        spans = tuple(plan_spans(None if old is None else base, source))
        needed = any(span.base is not None for span in spans)
        return FileEntry(name, os.fstat(source).st_size, os.fstat(base).st_size if needed else None, spans)


def _check_parent(old: Path, header: Header) -> None:
    for file in header.files:
        if file.parent is None:
            continue
        path = _path_in(old, header, file)
        if not path.is_file():
            raise DeltaError(f"{path}: missing, but the parent that the delta was made for has this file")
        if path.stat().st_size != file.parent:
            raise DeltaError(f"{path}: the parent that the delta was made for has {file.parent} bytes here")


def _path_in(root: Path, header: Header, file: FileEntry) -> Path:
    return root / file.name if header.folder else root


@contextmanager
def _new_target(out: Path, header: Header) -> Iterator[None]:
    """Create the folder or file to be filled; it is removed again if the block raises."""
    if header.folder:
        out.mkdir()
    else:
        out.touch(exist_ok=False)
    try:
        yield
    except BaseException:
        if header.folder:
            shutil.rmtree(out)
        else:
            out.unlink()
        raise


@contextmanager
def _open_file(path: Path | None, *, write: bool = False) -> Iterator[int]:
    """A descriptor of a file; -1, which every call rejects, if there is no file."""
    if path is None:
        yield -1
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
