"""A client: versions appear as folders below its output folder, whole and verified or not at all.

    <out>/v<version>/...      the files of a version; appears by a rename
    <out>/latest              link to the newest of them
    <out>/.shardcast/         the store, and the list of the folders that are ours

Invariants:
- the files are hard links to the store's (copies where the file system has none): a version is on disk once;
- only folders on our own list are replaced or removed; whatever else is in the way is an error that names it;
- one process per output folder: the store's lock.

A power cut can cost the last bytes of a version that was just published: the store finds that at the next start, and
fetches them into the same files again. It can also cost the newest line of the list; then the folder is in the way, and
the error says so.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from types import TracebackType

from shoal.disk import guard_disk
from shoal.errors import ConfigError
from shoal.files import LATEST, check_latest, link_latest, write_atomic
from shoal.shardcast.link import Deadlines
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.progress import Progress
from shoal.shardcast.pull import Puller
from shoal.shardcast.store import Entry, Store

HIDDEN = ".shardcast"
DEFAULT_KEEP = 2
"""Versions kept: the newest, and the one before, which somebody may still be reading."""
_ASIDE = "old-"
_OURS = re.compile(r"v(0|[1-9][0-9]{0,18})")
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class Output:
    """The folders that users see. Blocking; one process at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._list = folder / HIDDEN / "published.json"
        check_latest(folder / "any")
        self._ours = self._read_list()
        for path in self._list.parent.glob(f"{_ASIDE}*"):  # a kill between moving a version aside and removing it
            shutil.rmtree(path)

    def publish(self, entry: Entry) -> Path:
        """Make a complete version appear, remove those beyond the newest `keep`; where it is."""
        target = self._folder / f"v{entry.version}"
        if self._ours.get(target.name) != entry.digest or not target.is_dir():
            self._place(entry, target)
        if not self._is_newer(target.name):
            link_latest(target)
        self._remove_old(target.name)
        if not (self._folder / LATEST).exists():  # it was at one of those
            link_latest(target)
        return target

    def _is_newer(self, name: str) -> bool:
        """Whether `latest` is at a newer version than this one."""
        link = self._folder / LATEST
        if not link.is_symlink() or not link.exists():
            return False
        current = str(link.readlink())
        return current in self._ours and _number(current) > _number(name)

    def _place(self, entry: Entry, target: Path) -> None:
        if os.path.lexists(target) and target.name not in self._ours:
            raise ConfigError(f"{target}: is in the way of version {entry.version}; move it away")
        built, aside = entry.folder / "built-out", entry.folder / "built-old"
        for path in (built, aside):
            shutil.rmtree(path, ignore_errors=True)
        built.mkdir()
        for file in entry.full.layout.files:
            _link_file(entry.full.path_of(file.name), built / file.name)
        # On the list before it is there: a kill in between must not leave a folder that nobody owns.
        self._write_list({**self._ours, target.name: entry.digest})
        if target.exists():
            target.rename(aside)
        built.rename(target)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_old(self, newest: str) -> None:
        """Remove what is too much. The one that was asked for last counts as the newest, whatever its number is."""
        names = [name for name in self._ours if name != newest and (self._folder / name).is_dir()]
        names = [*sorted(names, key=_number), newest]
        for name in names[: -self._keep]:
            aside = self._list.parent / f"{_ASIDE}{name}"
            shutil.rmtree(aside, ignore_errors=True)
            (self._folder / name).rename(aside)
            shutil.rmtree(aside)
        kept = names[-self._keep :]
        self._write_list({name: digest for name, digest in self._ours.items() if name in kept})

    def _read_list(self) -> dict[str, str]:
        try:
            found = json.loads(self._list.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(_OURS.fullmatch(name) for name in found):
            raise ConfigError(
                f"{self._list}: is no list of published versions; move it away, and the v<N> folders beside {HIDDEN}"
            )
        return {name: str(digest) for name, digest in found.items()}

    def _write_list(self, ours: dict[str, str]) -> None:
        if ours != self._ours:
            # Without waiting for the disk, where the version itself is on its way: a second for every gigabyte.
            write_atomic(self._list, json.dumps(ours).encode() + b"\n", sync=False)
            self._ours = ours


class Client:
    """Pulls versions into an output folder. Use it as `async with await Client.open(...) as client`."""

    def __init__(self, out: Path, store: Store, output: Output, puller: Puller, keep: int) -> None:
        self._out = out
        self._output = output
        self._keep = keep
        self.store = store
        self.puller = puller

    @classmethod
    async def open(
        cls,
        out: Path,
        urls: Iterable[str],
        *,
        run: str,
        publisher: str,
        keep: int = DEFAULT_KEEP,
        in_flight: int = 4,
        deltas: bool = True,
        ticket: str | None = None,
        deadlines: Deadlines | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> "Client":
        """Open an output folder, or make it. ConfigError if another process has it."""
        if keep < 1:
            raise ConfigError(f"keep = {keep}: at least one version has to be kept")
        with guard_disk(out):
            # One more: a version that its publisher never finishes must not push out the one before.
            store = await Store.open(
                out / HIDDEN, run=run, publisher=publisher, keep=keep + 1, serves=False, role="client", note=note
            )
            try:
                output = Output(out, keep)
                puller = Puller(
                    store, urls, in_flight=in_flight, deltas=deltas, deadlines=deadlines, ticket=ticket, note=note
                )
            except BaseException:
                await store.close()
                raise
        return cls(out, store, output, puller, keep)

    async def __aenter__(self) -> "Client":
        try:
            await self.puller.__aenter__()
        except BaseException:
            await self.store.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and let others use the folder. Closing twice is harmless."""
        await self.puller.close()
        await self.store.close()

    @property
    def progress(self) -> Progress:
        return self.puller.progress

    async def pull(self, version: int | None = None) -> Path:
        """That version, or the newest there is, as a folder. DiskError if the disk is full; what is there stays."""
        with guard_disk(self._out):
            return await self._publish(await self.puller.pull(version))

    async def follow(self) -> AsyncGenerator[Path, None]:
        """Folders of versions as they become complete, always the newest."""
        with guard_disk(self._out):
            async for entry in self.puller.follow():
                yield await self._publish(entry)

    async def _publish(self, entry: Entry) -> Path:
        with entry.hold():
            folder = await run_blocking(None, self._output.publish, entry)
        await self._drop_old()
        return folder

    async def _drop_old(self) -> None:
        """Let the bytes of versions go that are older than those to be kept; they were there to be built on."""
        complete = [entry.version for entry in self.store.entries() if entry.complete]
        oldest = min(complete[-self._keep :], default=0)
        for entry in self.store.entries():
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
