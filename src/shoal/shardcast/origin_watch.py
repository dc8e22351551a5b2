"""How a running origin receives versions: through a folder that it watches.

    <data>/versions/v<N>-<token>     a link to the folder or file to publish; `.taken` is added while it is published
    <data>/published.jsonl           one line for each, by the origin: digest and root, or why it was not published
    <data>/origin.json               how the origin was started, by the names of flags

Both sides belong to the owner of the folder, and trust its contents.

Invariants:
- a link is taken by a rename, so it is either withdrawn or published, never both;
- links from before the origin locked the folder are removed: nobody waits for them;
- any problem with a version becomes its line, and the origin continues. If the line cannot be written, neither line nor
  link is left, which the other side notices;
- nobody waits for an origin that takes nothing for `SILENCE_S`.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DiskError
from shoal.shardcast.store.lock import LOCK, find_owner
from shoal.shardcast.store.store import StoredVersion
from shoal.util.aio import run_blocking
from shoal.util.files import append_line, repair_jsonl, write_atomic

logger = logging.getLogger(__name__)

POLL_S = 0.1
SILENCE_S = 30.0
_TAKEN = ".taken"
_NAME = re.compile(r"v(0|[1-9][0-9]*)-[0-9a-f]{32}")

Publish = Callable[[Path, int], Awaitable[StoredVersion]]
"""Publishes a path as a version; its ConfigError, DiskError or OSError is recorded."""


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that can be fetched."""

    version: int
    root: str
    """root hash over the files"""
    manifest: str
    """digest of the signed manifest"""
    shard_bytes: int
    """shard size that the root was computed with"""


class VersionWatch:
    """The origin's side."""

    def __init__(self, data: Path, settings: Mapping[str, Any] | None = None) -> None:
        """Remove leftovers; `run` publishes the links that appear from now on. Blocking."""
        self._folder, self._log = data / "versions", data / "published.jsonl"
        _open_folder(self._folder)
        _remove_old(self._folder, data / LOCK)
        repair_jsonl(self._log)
        write_atomic(data / "origin.json", json.dumps(dict(settings or {})).encode())

    async def run(self, publish: Publish) -> None:
        """Publish what appears, one version after the other, forever."""
        while True:
            for link in await run_blocking(None, _list_links, self._folder):
                try:
                    taken = link.rename(_taken(link))
                except FileNotFoundError:
                    continue  # withdrawn
                await self._publish(taken, link.name, publish)
            await asyncio.sleep(POLL_S)

    async def _publish(self, taken: Path, name: str, publish: Publish) -> None:
        path, version = taken.readlink(), int(name[1:].partition("-")[0])
        await self._record(name, path, await _carry_out(publish, path, version))
        taken.unlink(missing_ok=True)

    async def record(self, path: Path, entry: StoredVersion) -> None:
        """Record a version that was published without a link."""
        await self._record("", path, _describe(entry))

    async def _record(self, name: str, path: Path, outcome: dict[str, Any]) -> None:
        line = {"name": name, "path": os.fspath(path), **outcome}
        try:
            await run_blocking(None, append_line, self._log, json.dumps(line))
        except OSError as error:
            logger.error(f"{self._log}: cannot be written ({error.strerror}): {json.dumps(outcome)}")


async def request_publish(
    data: Path,
    path: Path,
    version: int,
    *,
    given: Mapping[str, Any] | None = None,
    silence_s: float = SILENCE_S,
) -> PublishedVersion:
    """Make the origin that serves `data` publish a path. It is an error if that origin ends or does not react.

    `given` are settings that the origin must have been started with. The request is withdrawn if this is cancelled
    before the origin has begun.
    """
    _check_settings(data, given or {})
    folder = data / "versions"
    await run_blocking(None, _open_folder, folder)
    link = folder / f"v{version}-{uuid.uuid4().hex}"
    link.symlink_to(path.resolve())
    try:
        line = await _await_line(data, link, silence_s)
    except asyncio.CancelledError:
        if not withdraw(link):
            logger.info(f"the origin has already started publishing v{version} and continues")
        raise
    except ConfigError:
        withdraw(link)
        raise
    if "error" in line:
        raise (DiskError if line.get("kind") == "disk" else ConfigError)(line["error"])
    return PublishedVersion(version, line["root"], line["manifest"], line["shard_bytes"])


def withdraw(link: Path) -> bool:
    """Withdraw a link; False if the origin has already taken it."""
    try:
        link.unlink()
    except FileNotFoundError:
        return False
    return True


async def _await_line(data: Path, link: Path, silence_s: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    quiet_since = loop.time()
    while True:
        # Read in this order: a version that has its line is no longer pending.
        served, pending = find_owner(data) is not None, link.is_symlink() or _taken(link).is_symlink()
        if (line := await run_blocking(None, _find_line, data, link.name)) is not None:
            return line
        if not served:
            raise ConfigError(f"{data}: the origin serving this folder exited before publishing the version")
        if not pending:
            raise DiskError(f"{data}: the origin could not record the result; see its log for the reason")
        if any(link.parent.glob(f"*{_TAKEN}")):
            quiet_since = loop.time()
        elif loop.time() - quiet_since > silence_s:
            raise ConfigError(f"{data}: no response from the origin serving this folder for {silence_s:.0f} s")
        await asyncio.sleep(POLL_S)


async def _carry_out(publish: Publish, path: Path, version: int) -> dict[str, Any]:
    try:
        return _describe(await publish(path, version))
    except ConfigError as error:
        return {"error": str(error)}
    except DiskError as error:
        return {"error": str(error), "kind": "disk"}
    except OSError as error:
        return {"error": f"{path}: not published ({error.strerror or error})", "kind": "disk"}


def _describe(entry: StoredVersion) -> dict[str, Any]:
    assert entry.log.root is not None, "the version must be complete"
    return asdict(PublishedVersion(entry.version, entry.log.root, entry.digest, entry.log.head.shard_size))


def _check_settings(data: Path, given: Mapping[str, Any]) -> None:
    if not given:
        return
    settings = json.loads((data / "origin.json").read_bytes())
    for flag, value in given.items():
        if flag in settings and settings[flag] != value:
            raise ConfigError(
                f"{flag}: the origin serving this folder was started with a different value; omit the flag, or restart "
                "the origin"
            )


def _find_line(data: Path, name: str) -> dict[str, Any] | None:
    try:
        lines = (data / "published.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return None
    for text in reversed(lines):
        with contextlib.suppress(ValueError):  # an incomplete line that is being written
            line: dict[str, Any] = json.loads(text)
            if line["name"] == name:
                return line
    return None


def _taken(link: Path) -> Path:
    return link.with_name(link.name + _TAKEN)


def _open_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)  # a link names a path to read: nobody else may create one


def _remove_old(folder: Path, lock: Path) -> None:
    """Remove files from before this process locked the folder; the lock file's time is the limit."""
    try:
        since = lock.stat().st_mtime_ns
    except FileNotFoundError:
        return
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # withdrawn
            if path.lstat().st_mtime_ns < since:
                path.unlink()


def _list_links(folder: Path) -> list[Path]:
    """Links in order of arrival."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # withdrawn
            if _NAME.fullmatch(path.name) and path.is_symlink():
                found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]
