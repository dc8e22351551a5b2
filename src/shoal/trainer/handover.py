"""The trainer's side of the origin: which serves a SHARDCAST store in a folder of this machine.

What a version is called in the ledger is read from the manifest that the origin signed: its digest, and the root that
follows from the hashes in it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import ConfigError, DiskError
from shoal.shardcast.entry import MANIFEST
from shoal.shardcast.errors import ManifestError
from shoal.shardcast.inbox import Request, ask_publish, wait_answer, withdraw_request
from shoal.shardcast.lock import find_owner
from shoal.shardcast.manifest import ManifestLog
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.records import MAX_LINE_BYTES
from shoal.swarm.asking import UnreachableError
from shoal.trainer.errors import TrainerError

MAX_REFUSALS = 5
"""in a row, after which an origin that runs and says no is believed"""
_ENTRY = re.compile(r"v(0|[1-9][0-9]*)-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Published:
    """A version that can be fetched."""

    version: int
    root: str
    """hash over the weights"""
    manifest: str
    """digest of the signed manifest"""


class HandOver(Protocol):
    """Takes versions and makes them known to the network."""

    async def hand_over(self, path: Path, version: int) -> Published:
        """Publish a folder, or find it published; `UnreachableError` if nobody is there to do it now."""
        ...

    def list_served(self) -> set[int]:
        """Versions whose folders are still needed."""
        ...


class OriginFolder:
    """The origin that has the store in `data`, asked through its inbox. An empty publisher is whose store it is."""

    def __init__(self, data: Path, *, run: str, publisher: str = "") -> None:
        self._data, self._run, self._publisher = data, run, publisher
        self._num_refusals = 0

    async def hand_over(self, path: Path, version: int) -> Published:
        """Leave a request with the origin and wait for its answer."""
        digest = await self._ask(path, version)
        self._num_refusals = 0
        folder = self._data / f"v{version}-{digest[:16]}"
        publisher = self._publisher or read_publisher(self._data)
        root = await run_blocking(None, read_root, folder, publisher, self._run, digest)
        return Published(version, root, digest)

    def list_served(self) -> set[int]:
        """Versions that the origin's store holds."""
        names = [path.name for path in self._data.iterdir()] if self._data.is_dir() else []
        return {int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))}

    async def _ask(self, path: Path, version: int) -> str:
        if not self._is_served():
            raise UnreachableError(f"{self._data}: no origin serves it now")
        request = await run_blocking(None, ask_publish, self._data, Request(path.resolve(), version))
        try:
            return await wait_answer(request, self._is_served)
        except DiskError as error:
            raise UnreachableError(str(error)) from None
        except ConfigError as error:
            self._num_refusals += self._is_served()
            if self._num_refusals > MAX_REFUSALS:
                raise TrainerError(f"the origin does not publish v{version}: {error}") from None
            raise UnreachableError(str(error)) from None
        except BaseException:
            withdraw_request(request)
            raise

    def _is_served(self) -> bool:
        return find_owner(self._data) is not None


def read_publisher(data: Path) -> str:
    """Whose versions a store holds; the folder is trusted as the origin is."""
    return str(json.loads((data / "store.json").read_bytes())["publisher"])


def read_root(folder: Path, publisher: str, run: str, digest: str) -> str:
    """The root of a version, from the manifest in the origin's store. Blocking."""
    log = ManifestLog(publisher, run)
    try:
        with (folder / MANIFEST).open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                log.feed(line)
    except FileNotFoundError:
        raise UnreachableError(f"{folder}: was published, and is gone again") from None
    except ManifestError as error:
        raise TrainerError(f"{folder / MANIFEST}: {error}; is the origin's key that of the run?") from None
    if log.root is None or log.digest != digest:
        raise TrainerError(f"{folder / MANIFEST}: is not the manifest that the origin answered with")
    return log.root
