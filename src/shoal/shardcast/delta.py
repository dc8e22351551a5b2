"""Lossless deltas between checkpoints: one file that turns the old one into the new one, bit for bit.

    with path.open("wb") as out:
        stats = encode_delta(old, new, out)
    apply_delta(old, path, rebuilt)         # or, over several versions: apply_chain(oldest, paths, rebuilt)

A checkpoint is a folder of files or a single file. Elements are compared as bit patterns, so it does not matter what
the numbers mean (codec.py); what is stored where is in delta_format.py.

Invariants:
- the same checkpoints give the same delta, whatever the number of threads;
- memory is bounded by the number of threads, whatever the size of the files;
- applying never touches the old checkpoint, and leaves nothing behind if it fails;
- whatever a delta contains, applying it ends, in a new checkpoint or in a `DeltaError`. Only a disk that refuses
  raises something else (`OSError`). Whether the result is the right one is for the caller to say, by its hash: the
  checksums here are there to name a wrong parent early, not to withstand a forger.
"""

import io
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from shoal.files import sync_dir
from shoal.shardcast.codec import Elements, Encoded, Form, decode_block, encode_block, encode_fresh, sum_block
from shoal.shardcast.delta_format import (
    Block,
    BlockRecord,
    FileEntry,
    Header,
    count_blocks,
    list_blocks,
    pack_block,
    read_block,
    read_header,
    read_payload,
    write_header,
)
from shoal.shardcast.delta_stream import Bytes, count_bytes
from shoal.shardcast.delta_work import Scratch, Workers, pad_size, read_range, write_range
from shoal.shardcast.errors import DeltaError
from shoal.shardcast.names import check_name
from shoal.shardcast.tensors import Span, plan_spans

__all__ = ["DeltaError", "DeltaStats", "PoorError", "apply_chain", "apply_delta", "encode_delta"]

Sources = dict[str, tuple[Path | None, Path]]
"""Files of the new checkpoint by name, each with the one of the old checkpoint that it replaces."""
_ONLY_FILE = "checkpoint"
"""What a checkpoint that is a single file is called inside of a delta."""
_SAMPLE_BLOCKS = 16
"""Blocks, spread over the checkpoint, by which a delta's size is foretold."""
_SAMPLED_FROM = 64
"""Blocks of a checkpoint that is small enough to be encoded to its end before anyone notices."""


@dataclass(frozen=True, slots=True)
class DeltaStats:
    """What a delta saves."""

    full_bytes: int
    delta_bytes: int
    num_elements: int
    num_changed: int

    @property
    def ratio(self) -> float:
        """How many times smaller than the checkpoint the delta is."""
        return self.full_bytes / self.delta_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """What one delta makes of a block."""

    delta: int
    """descriptor of its file"""
    block: Block
    record: BlockRecord


class PoorError(DeltaError):
    """A delta that would not be small enough to be of use."""


def encode_delta(
    old: Path, new: Path, out: BinaryIO, *, threads: int | None = None, max_share: float | None = None
) -> DeltaStats:
    """Write what turns `old` into `new`. Neither may change meanwhile. Threads: by default one per core, at most 4.

    With `max_share`, a delta that a sample of blocks says would be larger than that share of the checkpoint is a
    `PoorError`, before anything is written. The sample is no promise: whoever must not have a larger one counts, too.
    """
    sources = _list_sources(old, new)
    header = Header(new.is_dir(), tuple(_plan_file(name, *paths) for name, paths in sources.items()))
    with Workers(threads) as workers:
        num_blocks = sum(count_blocks(file.spans) for file in header.files)
        if max_share is not None and num_blocks >= _SAMPLED_FROM:
            sample = _Tally(io.BytesIO(), 0)
            _encode_blocks(workers, header, sources, sample, step=num_blocks // _SAMPLE_BLOCKS)
            if sample.written > max_share * sample.num_bytes:
                raise PoorError(f"the delta would be {sample.written / sample.num_bytes:.0%} of the checkpoint")
        tally = _Tally(out, write_header(out, header))
        _encode_blocks(workers, header, sources, tally)
    return DeltaStats(header.size, tally.written, tally.num_elements, tally.num_changed)


def apply_delta(
    old: Path,
    delta: Path,
    out: Path,
    *,
    threads: int | None = None,
    max_bytes: int | None = None,
    sync: bool = True,
) -> None:
    """Write the new checkpoint to `out`, which must not exist.

    A delta that would make more than `max_bytes` is refused before anything is written. The result is on disk when this
    returns, unless `sync` is off; its name is for the caller to make durable.
    """
    apply_chain(old, [delta], out, threads=threads, max_bytes=max_bytes, sync=sync)


def apply_chain(
    old: Path,
    deltas: Sequence[Path],
    out: Path,
    *,
    threads: int | None = None,
    max_bytes: int | None = None,
    sync: bool = True,
    halt: threading.Event | None = None,
) -> None:
    """Like `apply_delta`, by several deltas, each made from what the one before makes.

    One pass: every block goes through all deltas in memory, and what lies between is never written. So all of them must
    cut the checkpoint alike, as those of one model do; others are a `DeltaError`. `halt` ends it early with one, too.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(delta.open("rb")) for delta in deltas]
        headers = [read_header(source) for source in sources]
        header = headers[0]
        if max_bytes is not None and header.size > max_bytes:
            raise DeltaError(f"the delta would make {header.size} bytes, {max_bytes} are allowed")
        _check_parent(old, header)
        for later in headers[1:]:
            _check_alike(header, later)
        with Workers(threads) as workers, _new_target(out, header):
            for number, file in enumerate(header.files):
                base_path = None if file.parent is None else _path_in(old, header, file)
                with _open_file(base_path) as base, _open_file(_path_in(out, header, file), write=True) as target:
                    spans = [other.files[number].spans for other in headers]
                    workers.run_jobs(
                        partial(_apply_job, base, target), _list_links(sources, spans, halt), lambda _: None
                    )
                    if sync:
                        os.fsync(target)
            if any(source.read(1) for source in sources):
                raise DeltaError("the delta is damaged: something follows its last block")
            if sync and header.folder:
                sync_dir(out)


def _check_alike(first: Header, later: Header) -> None:
    """Refuse a delta whose blocks are not, one by one, made from the blocks of the first."""
    alike = first.folder == later.folder and len(first.files) == len(later.files)
    if not alike or not all(map(_continues, first.files, later.files)):
        raise DeltaError("the deltas cut the checkpoint differently, they cannot be applied together")


def _continues(first: FileEntry, later: FileEntry) -> bool:
    if (first.name, first.size) != (later.name, later.size) or later.parent not in (None, first.size):
        return False
    cuts = [[(block.offset, block.width, block.count) for block in list_blocks(file.spans)] for file in (first, later)]
    return cuts[0] == cuts[1] and all(block.base in (None, block.offset) for block in list_blocks(later.spans))


def _list_links(
    sources: Sequence[BinaryIO], spans: Sequence[tuple[Span, ...]], halt: threading.Event | None
) -> Iterator[list[Link]]:
    """For every block of a file what the deltas, one after the other, make of it."""
    for blocks in zip(*map(list_blocks, spans), strict=True):
        if halt is not None and halt.is_set():
            raise DeltaError("stopped")
        yield [Link(source.fileno(), block, read_block(source)) for source, block in zip(sources, blocks, strict=True)]


def _encode_blocks(workers: Workers, header: Header, sources: Sources, tally: "_Tally", step: int = 1) -> None:
    """Encode every block, or one in `step`."""
    skip = 0
    for file, (old_path, new_path) in zip(header.files, sources.values(), strict=True):
        with _open_file(old_path if file.parent is not None else None) as base, _open_file(new_path) as source:
            blocks = islice(list_blocks(file.spans), skip, None, step)
            workers.run_jobs(partial(_encode_job, base, source), blocks, tally.add_block)
        skip = (skip - count_blocks(file.spans)) % step


class _Tally:
    """Writes blocks and counts."""

    def __init__(self, out: BinaryIO, written: int) -> None:
        self._out = out
        self.written = written
        self.num_bytes = 0
        self.num_elements = 0
        self.num_changed = 0

    def add_block(self, result: tuple[Block, int, Encoded]) -> None:
        block, checksum, encoded = result
        length = count_bytes(encoded.parts)
        head = pack_block(encoded.form, checksum, length)
        for part in (head, *encoded.parts):
            self._out.write(part)
        self.written += len(head) + length
        self.num_bytes += block.size
        self.num_elements += block.count
        self.num_changed += encoded.num_changed


def _encode_job(base: int, source: int, scratch: Scratch, block: Block) -> tuple[Block, int, Encoded]:
    new = _as_elements(read_range(source, block.offset, block.size, scratch.block), block)
    if block.base is None:
        return block, 0, encode_fresh(new)
    padded = read_range(base, block.base, block.size, scratch.base)
    changed = scratch.changed[: pad_size(block.count)]
    return block, sum_block(padded), encode_block(_as_elements(padded, block), new, changed)


def _apply_job(base: int, target: int, scratch: Scratch, links: Sequence[Link]) -> None:
    block = links[0].block
    if block.base is not None:
        read_range(base, block.base, block.size, scratch.base)
    for link in links:
        _apply_link(scratch, link)
    write_range(target, block.offset, scratch.base[: block.size])


def _apply_link(scratch: Scratch, link: Link) -> None:
    """Turn the block in `scratch.base` into what a delta makes of it."""
    block, record = link.block, link.record
    padded = scratch.base[: pad_size(block.size)]
    padded[block.size :] = 0
    if block.base is not None:
        if sum_block(padded) != record.checksum:
            raise DeltaError("the delta is for another parent, or the parent is damaged")
    elif record.form != Form.FRESH or record.checksum:
        raise DeltaError("the delta is damaged: a block needs a parent that it does not have")
    decode_block(record.form, read_payload(link.delta, record), _as_elements(scratch.base, block))


def _as_elements(padded: Bytes, block: Block) -> Elements:
    return padded[: block.size].view(f"<u{block.width}")


def _list_sources(old: Path, new: Path) -> Sources:
    for path in (old, new):
        if not path.exists():
            raise DeltaError(f"{path}: there is no checkpoint")
    if old.is_dir() != new.is_dir():
        raise DeltaError(f"{old} and {new}: one is a folder and one a file")
    if not new.is_dir():
        return {_ONLY_FILE: (old, new)}
    sources: Sources = {}
    for path in sorted(new.iterdir(), key=lambda path: path.name):
        if not path.is_file():
            raise DeltaError(f"{path}: a checkpoint holds only files")
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
            raise DeltaError(f"{path}: the parent that the delta was made for has this file")
        if path.stat().st_size != file.parent:
            raise DeltaError(f"{path}: the parent that the delta was made for has {file.parent} bytes here")


def _path_in(root: Path, header: Header, file: FileEntry) -> Path:
    return root / file.name if header.folder else root


@contextmanager
def _new_target(out: Path, header: Header) -> Iterator[None]:
    """Make the folder or file that is to be filled; it is removed again if the block raises."""
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
    """A descriptor of a file; -1, which every call refuses, where there is none."""
    if path is None:
        yield -1
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
