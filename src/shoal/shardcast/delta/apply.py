"""Builds a full blob locally: deltas are applied to a held blob, and every shard is hashed before it counts.

Clients use it to get from version to version, relays from anchor to anchor.

Invariants:
- disk space is reserved before the first byte is written, and released if the build fails;
- existing files are not touched before the new ones are complete: these are written to a separate folder, `built`. If
  the process is killed, the next start removes that folder.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal.shardcast.format.layout import is_single_pair
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.store import StoredVersion
from shoal.util.aio import run_blocking


async def make_full(chain: Sequence[StoredVersion]) -> int:
    """Build the full blob of the last version of a chain from that of the first, by the deltas of all but the first.

    Returns how many of its shards are wrong. DeltaError, ShardError: the deltas do not lead there. Nobody else may
    write to the blob meanwhile.
    """
    base, *links = chain
    full, built = links[-1].full, links[-1].folder / "built"
    deltas = [link.delta.folder for link in links if link.delta is not None]
    assert len(deltas) == len(links), "all deltas must be present"
    halt = threading.Event()
    try:
        async with full.reserve():
            await run_blocking(None, build_files, base.full, deltas, full, built, halt, halt=halt)
            return await full.adopt_files(built)
    finally:
        await run_blocking(None, shutil.rmtree, built, True)


def build_files(base: Blob, deltas: Sequence[Path], full: Blob, built: Path, halt: threading.Event) -> None:
    """Apply deltas to the files of `base` and leave the result in the folder `built`, under the names of `full`.

    Blocking. Between versions of a single file each, the names do not matter.
    """
    from shoal.shardcast.delta.delta import (
        apply_chain,  # numpy and pyarrow are slow to import, and not every client needs them
    )

    shutil.rmtree(built, ignore_errors=True)
    limit = full.layout.total
    if not is_single_pair(base.layout, full.layout):
        apply_chain(base.folder, deltas, built, max_bytes=limit, halt=halt)
        return
    built.mkdir()
    old, new = base.layout.files[0].name, full.layout.files[0].name
    apply_chain(base.path_of(old), deltas, built / new, max_bytes=limit, halt=halt)
