"""A full blob that is made here: deltas applied to one that is held, every shard hashed before it counts.

Clients come from version to version by it, relays from anchor to anchor.

Invariants:
- room is taken before the first byte is written, and given back if nothing came of it;
- what is there is not touched before the files are whole: they are made aside, in `built`; what a kill leaves of that
  the next start removes.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal.shardcast.blob import Blob
from shoal.shardcast.entry import Entry
from shoal.shardcast.layout import is_single_pair
from shoal.shardcast.pool import run_blocking


async def make_full(chain: Sequence[Entry]) -> int:
    """Make the full blob of the last version of a chain from that of the first, by the deltas of all but the first; how
    many of its shards are not right.

    DeltaError, ShardError: the deltas do not lead there. Nobody else may write to the blob meanwhile.
    """
    base, *links = chain
    full, built = links[-1].full, links[-1].folder / "built"
    deltas = [link.delta.folder for link in links if link.delta is not None]
    assert len(deltas) == len(links), "all deltas are there"
    halt = threading.Event()
    try:
        async with full.reserve():
            await run_blocking(None, build_files, base.full, deltas, full, built, halt, halt=halt)
            return await full.take_over(built)
    finally:
        await run_blocking(None, shutil.rmtree, built, True)


def build_files(base: Blob, deltas: Sequence[Path], full: Blob, built: Path, halt: threading.Event) -> None:
    """Apply deltas to the files of `base` and leave the result in the folder `built`, under the names of `full`.

    Blocking. Between versions of one file each, the names do not matter.
    """
    from shoal.shardcast.delta import apply_chain  # numpy and pyarrow: dear at start, and not every client needs them

    shutil.rmtree(built, ignore_errors=True)
    limit = full.layout.total
    if not is_single_pair(base.layout, full.layout):
        apply_chain(base.folder, deltas, built, max_bytes=limit, sync=False, halt=halt)
        return
    built.mkdir()
    old, new = base.layout.files[0].name, full.layout.files[0].name
    apply_chain(base.path_of(old), deltas, built / new, max_bytes=limit, sync=False, halt=halt)
