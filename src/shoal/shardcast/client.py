"""A client: versions appear as folders in its output folder, complete and verified or not at all.

    <out>/v<version>/...      the files of a version; appears by a rename
    <out>/latest              link to the newest of them
    <out>/.shardcast/         the store, and the list of the folders that are ours

Invariants:

- the files are hard links to the store's files (copies if the file system has no hard links), so a version is on disk
  once;
- only folders on our own list are replaced or removed; anything else at that path is an error that names it;
- a version that is an adapter appears after version 0, its base, which stays as long as there are adapters;
- one process per output folder: the store's lock.

A power cut can lose the last bytes of a version that was just published: the store detects that at the next start and
fetches them into the same files again. It can also lose the newest line of the list; then the folder is reported as an
obstacle.
"""

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from shoal.errors import ConfigError
from shoal.shardcast.fetch.pull import FetchOptions, Puller, PullProgress
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.shardcast.format.layout import BASE_VERSION, holds_adapter
from shoal.shardcast.store.store import MAX_CHAIN, StoredVersion, VersionStore
from shoal.util.aio import run_blocking
from shoal.util.disk import guard_disk
from shoal.util.files import LATEST, check_latest, link_latest, write_atomic

HIDDEN = ".shardcast"
DEFAULT_KEEP = 2
"""Versions kept: the newest, and the previous one, which another process may still be reading."""
BASE_RETRY_S = 1.0
_ASIDE = "old-"
_OURS = re.compile(r"v(0|[1-9][0-9]{0,18})")
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class OutputFolder:
    """The output folders that users see. Blocking; one process at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._list = folder / HIDDEN / "published.json"
        check_latest(folder / "any")
        self._ours = self._read_list()
        for path in self._list.parent.glob(f"{_ASIDE}*"):  # killed between moving a version aside and removing it
            shutil.rmtree(path)

    def publish(self, entry: StoredVersion) -> Path:
        """Publish a complete version and remove those beyond the newest `keep`; returns its folder."""
        target = self._folder / f"v{entry.version}"
        if self._ours.get(target.name) != entry.digest or not target.is_dir():
            self._place(entry, target)
        if not self._is_newer(target.name):
            link_latest(target)
        self._remove_old(target.name)
        if not (self._folder / LATEST).exists():  # it pointed to a removed version
            link_latest(target)
        return target

    def _is_newer(self, name: str) -> bool:
        """Whether `latest` points to a newer version than this one."""
        link = self._folder / LATEST
        if not link.is_symlink() or not link.exists():
            return False
        current = str(link.readlink())
        return current in self._ours and _number(current) > _number(name)

    def _place(self, entry: StoredVersion, target: Path) -> None:
        if os.path.lexists(target) and target.name not in self._ours:
            raise ConfigError(f"{target}: not created by shoal; move it away to make room for version {entry.version}")
        built, aside = entry.folder / "built-out", entry.folder / "built-old"
        for path in (built, aside):
            shutil.rmtree(path, ignore_errors=True)
        built.mkdir()
        for file in entry.full.layout.files:
            _link_file(entry.full.path_of(file.name), built / file.name)
        # List the folder before it exists: a kill in between must not leave a folder that nobody owns.
        self._write_list({**self._ours, target.name: entry.digest})
        if target.exists():
            target.rename(aside)
        built.rename(target)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_old(self, newest: str) -> None:
        """Remove excess versions. The version requested last counts as the newest, whatever its number."""
        names = [name for name in self._ours if name != newest and (self._folder / name).is_dir()]
        names = [*sorted(names, key=_number), newest]
        bases = [name for name in names if self._is_base(name, names)]
        names = [name for name in names if name not in bases]
        for name in names[: -self._keep]:
            aside = self._list.parent / f"{_ASIDE}{name}"
            shutil.rmtree(aside, ignore_errors=True)
            (self._folder / name).rename(aside)
            shutil.rmtree(aside)
        kept = names[-self._keep :] + bases
        self._write_list({name: digest for name, digest in self._ours.items() if name in kept})

    def _is_base(self, name: str, names: Iterable[str]) -> bool:
        """Whether a folder is the base of an adapter among these folders."""
        if _number(name) != BASE_VERSION:
            return False
        return any(holds_adapter(path.name for path in (self._folder / other).iterdir()) for other in names)

    def _read_list(self) -> dict[str, str]:
        try:
            found = json.loads(self._list.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(_OURS.fullmatch(name) for name in found):
            raise ConfigError(
                f"{self._list}: invalid list of published versions; move it away, and the v<N> folders next to {HIDDEN}"
            )
        return {name: str(digest) for name, digest in found.items()}

    def _write_list(self, ours: dict[str, str]) -> None:
        if ours != self._ours:
            # No fsync while the version itself is still being written to disk: it would take a second per gigabyte.
            write_atomic(self._list, json.dumps(ours).encode() + b"\n", sync=False)
            self._ours = ours


@dataclass(eq=False, repr=False)
class ShardcastClient:
    """Pulls versions into an output folder. Use it as `async with await ShardcastClient.open(...) as client`."""

    _out: Path
    store: VersionStore
    _output: OutputFolder
    puller: Puller
    _keep: int
    _with_base: bool

    @classmethod
    async def open(
        cls,
        out: Path,
        urls: Iterable[str],
        *,
        run: str,
        publisher: str,
        keep: int = DEFAULT_KEEP,
        only: int | None = None,
        with_base: bool = True,
        **options: Unpack[FetchOptions],
    ) -> "ShardcastClient":
        """Open or create an output folder. ConfigError if another process uses it.

        `only`: the one version that will be pulled, which may be far behind the newest. Without `with_base` an adapter
        is pulled alone, for callers that have its base.
        """
        if keep < 1:
            raise ConfigError(f"keep = {keep}: must be at least 1")
        with guard_disk(out):
            # One more: a version that its publisher never finishes must not evict the previous one.
            num_heads = keep + 1 if only is None else MAX_CHAIN
            store = await VersionStore.open(
                out / HIDDEN, run=run, publisher=publisher, keep=num_heads, newest=only, serves=False, role="client"
            )
            try:
                output = OutputFolder(out, keep)
                puller = Puller(store, urls, **options)
            except BaseException:
                await store.close()
                raise
        return cls(out, store, output, puller, keep, with_base)

    async def __aenter__(self) -> "ShardcastClient":
        try:
            await self.puller.__aenter__()
        except BaseException:
            await self.store.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and release the folder. Closing twice is harmless."""
        await self.puller.close()
        await self.store.close()

    @property
    def progress(self) -> PullProgress:
        return self.puller.progress

    async def pull(self, version: int | None = None) -> Path:
        """Pull that version, or the newest, into a folder. DiskError if the disk is full; existing versions stay."""
        with guard_disk(self._out):
            return await self._publish(await self.puller.pull(version))

    async def follow(self) -> AsyncGenerator[Path, None]:
        """Yield the folders of versions as they become complete, always the newest."""
        with guard_disk(self._out):
            async for entry in self.puller.follow():
                if entry.is_adapter and self._with_base:
                    await self._await_base()
                yield await self._publish(entry)

    async def _await_base(self) -> None:
        """Pull version 0, and wait for a source that has it: followers are not told that a version is gone."""
        while True:
            try:
                await self.puller.pull(BASE_VERSION)
                return
            except GoneError as error:
                with self.puller.upstreams.wait_for(f"the base of the newest version: {error}"):
                    await asyncio.sleep(BASE_RETRY_S)

    async def _publish(self, entry: StoredVersion) -> Path:
        with entry.hold():
            if entry.is_adapter and self._with_base:
                base = await self.puller.pull(BASE_VERSION)
                with base.hold():
                    await run_blocking(None, self._output.publish, base)
            folder = await run_blocking(None, self._output.publish, entry)
        await self._drop_old()
        return folder

    async def _drop_old(self) -> None:
        """Drop the blobs of versions older than those to be kept; they were needed only as bases of deltas."""
        others = [entry for entry in self.store.entries() if not self.store.is_base(entry.version)]
        complete = [entry.version for entry in others if entry.complete]
        oldest = min(complete[-self._keep :], default=0)
        for entry in others:
            if entry.version < oldest and entry.disk_bytes and not entry.held:
                await self.store.drop(entry)


def _link_file(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def _number(name: str) -> int:
    return int(name.removeprefix("v"))
