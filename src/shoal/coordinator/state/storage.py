"""The room that files occupy or may occupy, by owner and in total; see `rules.storage` for what counts.

    lease.grant        reserves the largest file of the lease
    lease.end          releases it, unless a file was announced
    sub.commit         reserves it again for a lease that had expired
    sub.outcome        accepted: counts its size from now on, and its reservation as earned
    blob.drop          releases it

Invariant: the rows are sums over leases and submissions (`tests/fixtures/world.py` counts them again).
"""

from typing import NamedTuple

from sqlalchemy import Connection

from shoal.coordinator.rules.storage import Room
from shoal.coordinator.state.leases import find_lease
from shoal.coordinator.state.submissions import SubmissionRow, find_submission, list_with_blob
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.events import BlobDrop, LeaseEnd, LeaseGrant, SubmissionOutcome, read_body
from shoal.protocol.messages import Manifest, SubmissionState


class OwnerRoomRow(NamedTuple):
    """The room of an owner."""

    owner: str
    held: int
    earned: int


class TotalRoomRow(NamedTuple):
    """The room of all owners; one row."""

    id: int
    over: int
    """from the pool"""
    stored: int
    """held and kept"""


OWNER_ROOM = db.define_table("owner_room", OwnerRoomRow, key="owner")
db.index_some("room_unearned", "earned = 0 AND held > 0", OWNER_ROOM.c.owner)
TOTAL_ROOM = db.define_table("total_room", TotalRoomRow, key="id")


def find_owner_room(connection: Connection, owner: str) -> Room:
    row = db.find_row(connection, OwnerRoomRow, owner=owner)
    return Room() if row is None else Room(row.held, row.earned)


def find_total_room(connection: Connection) -> TotalRoomRow:
    return db.find_row(connection, TotalRoomRow, id=1) or TotalRoomRow(1, 0, 0)


def reserve_file(event: Event, connection: Connection) -> None:
    """lease.grant"""
    body = read_body(event, LeaseGrant)
    _move_room(connection, body.owner, held=body.file_bytes)


def release_file(event: Event, connection: Connection) -> None:
    """lease.end; the file of a submission that is given up may have arrived, so its room is released with the file"""
    body = read_body(event, LeaseEnd)
    if body.state != "unsent":
        _move_room(connection, body.owner, held=-_find_reserved(connection, event.subject))


def retake_room(event: Event, connection: Connection) -> None:
    """sub.commit, before the state of the lease changes"""
    lease = find_lease(connection, read_body(event, Manifest).lease)
    if lease is not None and lease.state == "expired":
        _move_room(connection, lease.owner, held=lease.file_bytes)


def settle_file(event: Event, connection: Connection) -> None:
    """sub.outcome, before the state of the submission changes"""
    row = find_submission(connection, event.subject)
    if row is None:
        raise ValueError("outcome of a submission that does not exist")
    is_accepted = read_body(event, SubmissionOutcome).state is SubmissionState.ACCEPTED
    if is_accepted is (row.state == SubmissionState.ACCEPTED):
        return
    way = 1 if is_accepted else -1
    reserved, size = _find_reserved(connection, row.lease), row.size
    if row.dropped:
        _move_room(connection, row.owner, earned=way * reserved)
    else:
        _move_room(connection, row.owner, held=-way * reserved, earned=way * reserved, kept=way * size)


def drop_room(event: Event, connection: Connection) -> None:
    """blob.drop, before its submissions are marked"""
    for blob in read_body(event, BlobDrop).blobs:
        for row in list_with_blob(connection, blob):
            if row.decided_ms and not row.dropped:
                _drop_file(connection, row)


def _drop_file(connection: Connection, row: SubmissionRow) -> None:
    if row.state == SubmissionState.ACCEPTED:
        _move_room(connection, row.owner, kept=-row.size)
    else:
        _move_room(connection, row.owner, held=-_find_reserved(connection, row.lease))


def _find_reserved(connection: Connection, lease: str) -> int:
    row = find_lease(connection, lease)
    if row is None:
        raise ValueError("file of a lease that was not granted")
    return row.file_bytes


def _move_room(connection: Connection, owner: str, *, held: int = 0, earned: int = 0, kept: int = 0) -> None:
    old, total = find_owner_room(connection, owner), find_total_room(connection)
    new = Room(old.held + held, old.earned + earned)
    if min(new) < 0:
        raise ValueError("more room released than was reserved")
    if new != old:
        db.replace_rows(connection, OWNER_ROOM, {"owner": owner, **new._asdict()})
    changed = {"over": total.over + new.over - old.over, "stored": total.stored + held + kept}
    db.replace_rows(connection, TOTAL_ROOM, {"id": 1, **changed})
