"""What a worker has taken on and what it has written, on disk until the coordinator has it: a restart loses nothing.

    <folder>/orders/asking.json        the key under which a lease is being asked for
    <folder>/orders/<lease>.json       a lease that was granted
    <folder>/outbox/<lease>.parquet    its rollouts, and then
    <folder>/outbox/<lease>.json       their manifest, which makes them complete

Invariants:
- a lease is asked for under a key that is on disk, so that one whose grant was not heard is granted again, not lost;
- the same key is never used for two leases: it is removed once the lease is on disk;
- names are ids of leases, which messages check: nothing else of a coordinator becomes part of a path.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shoal.errors import ConfigError
from shoal.files import sweep_leftovers, write_atomic
from shoal.rollout import Group
from shoal.submission.write import Proofs, Written, write_submission
from shoal.swarm.messages import Lease, LeaseRequest, Manifest
from shoal.worker.author import Work

_ASKING = "asking.json"

Write = Callable[[Path, Sequence[Group], Proofs], Written]
Kept = TypeVar("Kept", Lease, LeaseRequest, Manifest)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Work that is ready to be handed in."""

    manifest: Manifest
    path: Path


class Outbox:
    """The orders and parcels of one worker. Blocking; for one process."""

    def __init__(self, folder: Path, write: Write = write_submission) -> None:
        """`write` makes the file of work."""
        self._write = write
        self._orders, self._parcels = folder / "orders", folder / "outbox"
        for path in (self._orders, self._parcels):
            path.mkdir(parents=True, exist_ok=True)
            sweep_leftovers(path)

    def find_key(self) -> str:
        """The key to ask for a lease with: the one that is under way, or a new one."""
        path = self._orders / _ASKING
        if path.exists():
            return _read(path, LeaseRequest).request_key
        request = LeaseRequest(request_key=os.urandom(16).hex())
        write_atomic(path, request.model_dump_json().encode())
        return request.request_key

    def add_lease(self, lease: Lease) -> None:
        """Keep a lease that was granted under the key."""
        write_atomic(self._orders / f"{lease.lease}.json", lease.model_dump_json().encode())
        self.drop_key()

    def drop_key(self) -> None:
        """The next lease is asked for under another key."""
        (self._orders / _ASKING).unlink(missing_ok=True)

    def list_leases(self) -> list[Lease]:
        """Leases that were taken on and are neither written nor given up."""
        return [_read(path, Lease) for path in _list_named(self._orders) if not self._has_parcel(path.stem)]

    def pack(self, work: Work, fence: int) -> Parcel:
        """Write work down, ready to be handed in."""
        lease = work.order.lease
        path = self._parcels / f"{lease}.parquet"
        written = self._write(path, work.groups, work.proofs)
        manifest = Manifest(
            lease=lease,
            fence=fence,
            blob=written.sha256,
            size=written.size,
            version=work.version,
            rollouts=written.entries,
        )
        write_atomic(self._parcels / f"{lease}.json", manifest.model_dump_json().encode())
        return Parcel(manifest, path)

    def list_parcels(self) -> list[Parcel]:
        """Work that was written and is not yet handed in."""
        paths = _list_named(self._parcels)
        return [Parcel(_read(path, Manifest), path.with_suffix(".parquet")) for path in paths]

    def forget(self, lease: str) -> None:
        """Remove all about a lease: it is handed in, or nobody wants it."""
        # The order first: with it and without the manifest the lease would be written again, and signed for twice.
        # Then the manifest: without it the rest is not a parcel.
        (self._orders / f"{lease}.json").unlink(missing_ok=True)
        (self._parcels / f"{lease}.json").unlink(missing_ok=True)
        (self._parcels / f"{lease}.parquet").unlink(missing_ok=True)

    def _has_parcel(self, lease: str) -> bool:
        return (self._parcels / f"{lease}.json").exists()


def _list_named(folder: Path) -> Iterator[Path]:
    """Files about leases, the oldest lease first."""
    paths = [path for path in folder.glob("l*.json") if path.stem[1:].isdecimal()]
    return iter(sorted(paths, key=lambda path: int(path.stem[1:])))


def _read(path: Path, model: type[Kept]) -> Kept:
    try:
        found: BaseModel = model.model_validate_json(path.read_bytes())
    except ValidationError:
        raise ConfigError(f"{path}: is damaged; remove it, the lease will be given to somebody") from None
    assert isinstance(found, model)
    return found
